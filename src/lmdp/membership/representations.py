"""Every layer's representation of every example, in one streaming pass of bounded memory.

Feature maps are averaged over a coarse grid and, where still too wide, projected by a fixed seeded random matrix to a
bounded width: the adversary's input then has the same size for every layer, whatever the layer's.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.layers import LayerMap
from lmdp.models import evaluation

WIDTH = 192
BATCH = 256
MEMORY_LIMIT = 2 * 2**30
CHANNELS_FIRST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True)
class Recording:
    """Representations by layer, [n, width], in memory or in files under a temporary folder; and the model's outputs."""

    layers: dict[str, NDArray[np.float32]]
    outputs: NDArray[np.float32] | None
    folder: Path | None


def record(
    model: nn.Module,
    inputs: Tensor,
    *,
    layers: Sequence[str] | None = None,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
    seed: int = 0,
    alter: Callable[[Tensor], Tensor] | None = None,
    pool: bool = True,
) -> Recording:
    """Run the model once over the inputs (in evaluation mode, each batch passed through `alter`) and keep every layer.

    Above `memory_limit` bytes the representations go to memory-mapped files.
    """
    taps = tap_modules(model, layers)
    kept: dict[str, NDArray[np.float32]] = {}
    outputs: NDArray[np.float32] | None = None
    spill = len(taps) * len(inputs) * width * 4 > memory_limit
    folder = Path(tempfile.mkdtemp(prefix="lmdp-")) if spill else None
    caught: dict[str, Tensor] = {}
    with evaluation(model), torch.no_grad(), _listening(taps, caught):
        _refuse_shared(model, taps, inputs[: 1 if len(inputs) == 2 else 2], caught, alter)
        for start in range(0, len(inputs), BATCH):
            batch = inputs[start : start + BATCH]
            result = model(batch if alter is None else alter(batch))
            for name in taps:
                output = caught.pop(name, None)
                _refuse_other_rows(name, output, len(batch))
                rows = compact(output, taps[name], width, f"{seed}:{name}", pool=pool)
                if name not in kept:
                    kept[name] = _allocate(len(inputs), rows.shape[1], folder, len(kept))
                kept[name][start : start + len(rows)] = rows.numpy()
            if isinstance(result, Tensor) and result.dim() == 2:
                if outputs is None:
                    outputs = np.empty((len(inputs), result.shape[1]), dtype=np.float32)
                outputs[start : start + len(result)] = result.float().numpy()
    recording = Recording(kept, outputs, folder)
    if folder is not None:
        weakref.finalize(recording, shutil.rmtree, folder, ignore_errors=True)
    return recording


def _refuse_shared(
    model: nn.Module,
    taps: dict[str, nn.Module],
    few: Tensor,
    caught: dict[str, Tensor],
    alter: Callable[[Tensor], Tensor] | None,
) -> None:
    """By so few examples that nothing else has their number: a table has as many positions as a batch has examples."""
    model(few if alter is None else alter(few))
    for name in taps:
        _refuse_other_rows(name, caught.pop(name, None), len(few))


def _refuse_other_rows(name: str, output: Any, size: int) -> None:
    """A layer speaks of members only if it has a row for each example of a batch."""
    tensor = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(tensor, Tensor) or not tensor.dim() or len(tensor) != size:
        what = "was not called" if output is None else "gives out another number of rows than there are examples"
        raise ValueError(
            f"layer '{name}' {what}: it has no representation of each example (a table of positions is the same for "
            "all of them). Name the layers to be read, without this one: layers=[…]."
        )


def tap_modules(model: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    """Layer name → the module whose output is the layer's representation."""
    taps = {layer.name: layer.tap for layer in LayerMap.of(model, frozen=True)}
    chosen = list(taps) if layers is None else list(layers)
    if unknown := [name for name in chosen if name not in taps]:
        raise ValueError(f"layers {unknown} are not layers of the model. It has {list(taps)}.")
    return {name: model.get_submodule(taps[name]) for name in chosen}


def compact(output: Any, module: nn.Module, width: int, key: str, *, pool: bool = True) -> Tensor:
    """[B, ...] → [B, at most width], by a rule that depends on the layer's shape and `key` only."""
    tensor = output[0] if isinstance(output, tuple | list) else output
    rows: Tensor = tensor.detach().float()
    if not pool:
        rows = rows.flatten(1)
    if rows.dim() > 2:
        channels_first = isinstance(module, CHANNELS_FIRST)
        rows = rows.flatten(2) if channels_first else rows.flatten(1, -2).transpose(1, 2)
        channels = rows.shape[1]
        cells = max(1, min(rows.shape[2], 4 * width // channels))
        rows = torch.cat([F.adaptive_avg_pool1d(rows, cells).flatten(1), rows.amax(2)], dim=1)
    if rows.shape[1] > width:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{key}:{rows.shape[1]}".encode()))
        matrix = torch.randn(rows.shape[1], width, generator=generator) / width**0.5
        rows = rows @ matrix
    return rows


def compact_inputs(inputs: Tensor, *, width: int = WIDTH, seed: int = 0) -> NDArray[np.float32]:
    """The raw inputs, brought to the same width: what an adversary sees that sees no network at all."""
    rows = [
        compact(inputs[start : start + BATCH].float().flatten(1), nn.Identity(), width, f"{seed}:input").numpy()
        for start in range(0, len(inputs), BATCH)
    ]
    return np.concatenate(rows)


@contextmanager
def _listening(taps: dict[str, nn.Module], caught: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            caught[name] = output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in taps.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _allocate(n: int, width: int, folder: Path | None, number: int) -> NDArray[np.float32]:
    if folder is None:
        return np.empty((n, width), dtype=np.float32)
    path = folder / f"layer{number}.npy"
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, width))
