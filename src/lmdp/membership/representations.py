"""Every layer's representation of every example, in one streaming pass of bounded memory.

What is kept of a layer has a bounded width (`compaction`): the adversary's input then has the same size for every
layer, whatever the layer's.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.gradients.attach import keep_freed_memory
from lmdp.layers import CUSTOM, GROUPINGS, MODULE, LayerMap
from lmdp.membership.compaction import BATCH, WIDTH, compact, pooled, require_pooling
from lmdp.membership.examples import Stored, count, take
from lmdp.models import Inputs, device_of, evaluation, main_tensor, run

MEMORY_LIMIT = 2 * 2**30
FEWEST, NEAR = 16, 2 * 2**20
"""Examples of a batch at least, and bytes of what one module gives out of it that a processor still has near."""


Layers = str | LayerMap | Sequence[str] | None
"""Which layers to read: a grouping by its name, a layer map, or names of layers (by module or by block)."""
Alter = Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Tap:
    """Where a layer's representation is read: from what a module gives out, or from what it is given."""

    module: nn.Module
    reads: str = "output"
    in_decoder: bool = False


@dataclass(frozen=True)
class Recording:
    """Representations by layer, [n, 1 + copies, width], first those of the inputs as they are; in memory, or in files
    under a temporary folder. And the model's outputs."""

    rows: dict[str, NDArray[np.float32]]
    outputs: NDArray[np.float32] | None
    folder: Path | None

    @property
    def layers(self) -> dict[str, NDArray[np.float32]]:
        """Of the inputs as they are."""
        return {name: rows[:, 0] for name, rows in self.rows.items()}


def record(
    model: nn.Module,
    inputs: Stored,
    *,
    layers: Layers = None,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
    seed: int = 0,
    alters: Sequence[Alter] = (),
    pooling: str | None = None,
    pool: bool = True,
) -> Recording:
    """Read the inputs once, run the model on them (in evaluation mode) and on each altered copy, and keep every layer.

    The model runs where it lives; batches go there, and what is kept of them comes back: `width` numbers of each
    example, copy and layer. Above `memory_limit` bytes they go to memory-mapped files. `pooling` says what is kept of a
    sequence (`compaction.pooled`).
    """
    require_pooling(pooling)
    keep_freed_memory()  # layers' outputs come and go in every batch
    taps = tap_modules(model, layers)
    kept: dict[str, NDArray[np.float32]] = {}
    outputs: NDArray[np.float32] | None = None
    size = count(inputs)
    spill = len(taps) * size * (1 + len(alters)) * width * 4 > memory_limit
    folder = Path(tempfile.mkdtemp(prefix="lmdp-")) if spill else None
    caught: dict[str, Any] = {}
    with evaluation(model), torch.no_grad(), listening(taps, caught):
        step = _batch_size(model, taps, take(inputs, slice(1 if size == 2 else 2)), caught)
        for start in range(0, size, step):
            plain = take(inputs, slice(start, start + step))
            for copy, batch in enumerate([plain, *(alter(plain) for alter in alters)]):
                result = main_tensor(run(model, batch))
                for name, tap in taps.items():
                    tensor = rows_of(name, caught.pop(name, None), count(batch))
                    tensor = pooled(tensor, tap.module, batch, pooling, name, in_decoder=tap.in_decoder)
                    rows = compact(tensor, tap.module, width, f"{seed}:{name}", pool=pool).numpy()
                    if name not in kept:
                        kept[name] = _allocate((size, 1 + len(alters), rows.shape[1]), folder, len(kept))
                    kept[name][start : start + len(rows), copy] = rows
                if copy == 0 and result is not None and result.dim() == 2 and len(result) == count(batch):
                    if outputs is None:
                        outputs = np.empty((size, result.shape[1]), dtype=np.float32)
                    outputs[start : start + len(result)] = result.float().cpu().numpy()
    recording = Recording(kept, outputs, folder)
    if folder is not None:
        weakref.finalize(recording, shutil.rmtree, folder, ignore_errors=True)
    return recording


def _batch_size(model: nn.Module, taps: dict[str, Tap], few: Inputs, caught: dict[str, Any]) -> int:
    """How many examples at a time: on the host, so many that what a module gives out stays near the processor.

    Tried on so few that nothing else has their number: a table has as many positions as a batch has examples.
    """
    largest = [1]

    def measure(_: nn.Module, __: Any, output: Any) -> None:
        tensor = main_tensor(output)
        largest[0] = max(largest[0], 0 if tensor is None else tensor.numel() * tensor.element_size() // count(few))

    handles = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        run(model, few)
    finally:
        for handle in handles:
            handle.remove()
    for name in taps:
        rows_of(name, caught.pop(name, None), count(few))
    return min(BATCH, max(FEWEST, NEAR // largest[0])) if device_of(model).type == "cpu" else BATCH


def rows_of(name: str, output: Any, size: int) -> Tensor:
    """What a layer gave out. It speaks of members only if it has a row for each example of a batch."""
    tensor = main_tensor(output)
    if tensor is None or not tensor.dim() or len(tensor) != size:
        what = "was not called" if output is None else "gives out another number of rows than there are examples"
        raise ValueError(
            f"layer '{name}' {what}: it has no representation of each example (a table of positions is the same for "
            "all of them). Name the layers to be read, without this one: layers=[…]; or take blocks, and what stands "
            "before them, whole: layers='block'."
        )
    return tensor


def tap_modules(model: nn.Module, layers: Layers) -> dict[str, Tap]:
    """Layer name → where the layer's representation is read. Layers that are frozen are read too."""
    if isinstance(layers, LayerMap):
        chosen = list(layers)
    elif layers is None or isinstance(layers, str):
        chosen = list(LayerMap.of(model, layers or MODULE, frozen=True))
    else:
        by_module, by_block = (LayerMap.of(model, by, frozen=True) for by in GROUPINGS)
        every = {layer.name: layer for layer in (*by_block, *by_module)}
        if unknown := [name for name in layers if name not in every]:
            blocks = [name for name in by_block.names if name not in by_module.names]
            further = f" By block it has {blocks} too." if blocks else ""
            raise ValueError(f"layers {unknown} are not layers of the model. It has {list(by_module.names)}.{further}")
        chosen = [every[name] for name in layers]
    return {
        layer.name: Tap(model.get_submodule(layer.tap), layer.reads, "decoder" in layer.tap.split("."))
        for layer in chosen
    }


def grouping(layers: Layers) -> str:
    """How layers that were chosen so are grouped."""
    if layers is None or isinstance(layers, str):
        return layers or MODULE
    return layers.by if isinstance(layers, LayerMap) else CUSTOM


def only(name: str, model: nn.Module, layers: Layers) -> Layers:
    """One of the layers that are read."""
    if isinstance(layers, str):
        layers = LayerMap.of(model, layers, frozen=True)
    if isinstance(layers, LayerMap):
        return LayerMap(tuple(layer for layer in layers if layer.name == name), layers.by)
    return [name]


@contextmanager
def listening(taps: dict[str, Tap], caught: dict[str, Any]) -> Iterator[None]:
    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            caught[name] = output

        return hook

    def keep_input(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            first = main_tensor(args)  # of the first call, if a block is called again and again
            caught.setdefault(name, main_tensor(kwargs) if first is None else first)

        return hook

    handles = [
        tap.module.register_forward_pre_hook(keep_input(name), with_kwargs=True)
        if tap.reads == "input"
        else tap.module.register_forward_hook(keep(name))
        for name, tap in taps.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _allocate(shape: tuple[int, ...], folder: Path | None, number: int) -> NDArray[np.float32]:
    if folder is None:
        return np.empty(shape, dtype=np.float32)
    return np.lib.format.open_memmap(folder / f"layer{number}.npy", mode="w+", dtype=np.float32, shape=shape)
