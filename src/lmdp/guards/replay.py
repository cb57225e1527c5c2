"""Do examples meet in the model? It is run again on the examples of a real batch, with others beside them.

Half of the rows stay, the other half is replaced by copies of the first, or of one of these; every input that counts
examples is varied. All batches have one shape and draw the same randomness, and for the rows that stayed the same
gradient is sent into the outputs. What the engine then computes for these rows, per-example norms and sums, must be
equal: it is what the guarantee is about, forward, backward, hooks and all. A model that returns its loss is judged
with it.

For a model in which no examples meet this sees nothing, whatever the data. It can speak only where the guarantee did
not hold in the first place.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients import Capture, PerExampleGradients
from lmdp.gradients.attach import full_precision
from lmdp.guards.still import Still
from lmdp.layers import Attributes

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
EXTREME = 1e3
"""What the other examples' numbers are multiplied with, to see what an outlier does to the rest."""
MIDWAY = 0.1
COARSE, COARSER = 5e-3, 5e-2
"""Under autocast; and between batches of different sizes, of which other sums are rounded."""


@dataclass(frozen=True)
class RootCall:
    """One call of the whole model, on `size` examples; `autocast` is None, or the type that it ran in."""

    args: Any
    kwargs: Any
    size: int
    autocast: torch.dtype | None

    def inputs(self) -> list[Tensor]:
        """Those that count the examples."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.size]


@dataclass(frozen=True)
class Answer:
    """Of a model that was run again.

    meet   whether examples meet; None if that cannot be told
    sized  whether it is known that neither the number of examples matters, nor their places
    """

    meet: bool | None
    sized: bool = False


def run_again(
    capture: Capture,
    call: RootCall,
    reached: Sequence[tuple[int, bool]],
    handed: Callable[[Tensor], bool],
    most: int,
    *,
    mean_loss: bool,
) -> Answer:
    """Whether examples meet in the model.

    That cannot be told if the model does not run again, draws what nobody repeats, or has an input whose length is that
    of the batch and which the data loader did not hand out: it may count something else. `reached`: which of its
    outputs, by their place, the loss was computed from, and whether their first dimension is sure to be the examples.
    `most`: how many other companies are tried. `mean_loss`: whether a loss that the model gives out is a mean.
    """
    replay = Replay(capture, call, reached, mean_loss=mean_loss)
    try:
        with same_attributes(capture.model), _cast(call.autocast):
            meet = replay.meet(most)
            if meet and not all(map(handed, call.inputs()[1:])):
                meet = None
            return Answer(meet, sized=meet is False and replay.is_sized())
    except Exception:  # a model may refuse anything, for any reason: then nothing is known
        return Answer(None)


class Replay:
    """One call of the model, which can be made again on other rows."""

    def __init__(
        self, capture: Capture, call: RootCall, reached: Sequence[tuple[int, bool]], *, mean_loss: bool
    ) -> None:
        self._capture, self._size, self._reached, self._mean_loss = capture, call.size, reached, mean_loss
        leaves, self._spec = pytree.tree_flatten((call.args, call.kwargs))
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._seed = secrets.randbelow(2**31)  # another one in every look, so that a rare chance has its chance
        self._call, self._every = call, torch.arange(call.size)

    def meet(self, most: int) -> bool | None:
        first = self._run(self._every)
        if first is None:
            return None
        for number, (stay, order) in enumerate(_companies(self._size)[:most], start=1):
            second = self._run(order, stay, number)
            if second is None:
                return None
            if self._differ(first, second, stay, stay):
                return self._unless_unsteady(first)
        if most > 1 and self._is_moved_by_outliers(first):
            return self._unless_unsteady(first)
        return False if first.is_sure else None

    def is_sized(self) -> bool:
        """Whether half of the examples come out the same without the others, in other places."""
        half = self._every[self._size // 2 :]
        try:
            with Still():
                among, alone = self._run(self._every), self._run(half)
        except Exception:  # what the model was given besides may be for so many examples
            return False
        if among is None or alone is None or not (among.is_sure and alone.is_sure):
            return False
        return not self._differ(among, alone, half, torch.arange(len(half)))

    def _is_moved_by_outliers(self, first: Ran) -> bool:
        stay, order = _companies(self._size)[-1]
        try:
            second = self._run(order, stay, 0, times=EXTREME)
        except Exception:  # a model may refuse numbers that no example has
            return False
        return second is not None and self._differ(first, second, stay, stay)

    def _unless_unsteady(self, first: Ran) -> bool | None:
        again = self._run(self._every)
        return None if again is None or self._differ(first, again, self._every, self._every) else True

    def _differ(self, one: Ran, other: Ran, rows: Tensor, rows_of_other: Tensor) -> bool:
        tolerance = tolerance_of(self._capture, self._call, sizes_differ=one.size != other.size)
        a, b = (ran.sketch(self._capture, at, tolerance) for ran, at in ((one, rows), (other, rows_of_other)))
        return a.differs(b)

    def _run(self, order: Tensor, stay: Tensor | None = None, company: int = 0, times: float = 1.0) -> Ran | None:
        """On these rows; in all places but `stay` with other signs, and with numbers so many `times` as large."""
        others = order[:0] if stay is None else self._every[~torch.isin(self._every, stay)]
        rows = list(self._leaves)
        for i, leaf in enumerate(rows):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self._size:
                rows[i] = leaf[order.to(leaf.device)]
                if times != 1.0 and leaf.is_floating_point():
                    rows[i][others.to(leaf.device)] *= times
        args, kwargs = pytree.tree_unflatten(rows, self._spec)
        model = self._capture.model
        with self._capture.beside(), torch.enable_grad(), same_randomness(self._seed, devices_of(model)):
            outputs = pytree.tree_leaves(model(*args, **kwargs))
            chosen = [(outputs[i], sure) for i, sure in self._reached if i < len(outputs)]
            chosen = [(out, sure) for out, sure in chosen if isinstance(out, Tensor) and out.requires_grad]
            if not chosen:
                return None
            terms = [out for out, _ in chosen]
            dims = [0 if sure else _example_dim(out, len(order)) for out, sure in chosen]
            at = self._every if len(order) == self._size else order
            torch.autograd.backward(terms, [_signs(out, dim, at, others, company) for out, dim in zip(terms, dims)])
            of_mean = self._mean_loss and all(out.numel() == 1 for out in terms)
            factor = float(len(order)) if of_mean else 1.0
            return Ran(self._capture.take(), [out.detach() for out in terms], dims, factor)


def _companies(size: int) -> list[tuple[Tensor, Tensor]]:
    """Which rows stay, and the rows [size] that are put in all places. Of two halves one cannot decide for both."""
    every, half = torch.arange(size), max(1, size // 2)
    first, second = every[:half], every[half:]
    at = every % half
    return [
        (first, torch.where(every < half, every, at)),
        (second, torch.where(every < half, half + every % (size - half), every)),
        (first, torch.where(every < half, every, 0)),
    ]


@dataclass(frozen=True)
class Ran:
    """What one run gave: per-example gradients, and the outputs that were differentiated.

    dims    which dimension of these counts the examples; None for a loss, or where that is not sure
    factor  what a mean has divided the gradients by
    """

    gradients: PerExampleGradients
    outputs: list[Tensor]
    dims: list[int | None]
    factor: float

    @property
    def size(self) -> int:
        return self.gradients.batch_size

    @property
    def is_sure(self) -> bool:
        return all(out.numel() == 1 or dim is not None for out, dim in zip(self.outputs, self.dims))

    def sketch(self, capture: Capture, rows: Tensor, tolerance: float) -> Sketch:
        theirs = [out.index_select(dim, rows) for out, dim in zip(self.outputs, self.dims) if dim is not None]
        return Sketch.of(self.gradients, capture, rows, tolerance, factor=self.factor, outputs=theirs)


def _example_dim(output: Tensor, size: int) -> int | None:
    """Which dimension of an output counts the examples, if only one has their number."""
    dims = [dim for dim, length in enumerate(output.shape) if length == size]
    return dims[0] if len(dims) == 1 else None


def _signs(output: Tensor, dim: int | None, places: Tensor, others: Tensor, company: int) -> Tensor:
    """±1 for every number, so that no entry of a row hides another; different ones for the others in each company."""
    if output.numel() == 1:
        return torch.ones_like(output)
    shape = list(output.shape)
    if dim is not None:
        shape[dim] = int(places.max()) + 1
    signs, changed = (
        torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1 for seed in (0, company)
    )
    if dim is not None:
        signs.index_copy_(dim, others, changed.index_select(dim, others))
        signs = signs.index_select(dim, places)
    return signs.to(output)


@dataclass(frozen=True)
class Sketch:
    """What the engine computed for some rows of a batch: norms [rows, L], and two sums under random signs.

    sums       of gradients as they are
    evens      of gradients that are all about as long, so that none hides behind a longer one
    tolerance  for rounding, relative
    """

    norms: Tensor
    sums: dict[str, Tensor]
    evens: dict[str, Tensor]
    tolerance: float
    outputs: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        gradients: PerExampleGradients,
        capture: Capture,
        rows: Tensor,
        tolerance: float,
        *,
        factor: float = 1.0,
        outputs: Sequence[Tensor] = (),
    ) -> Sketch:
        """Gradients that are not finite count as zero. `factor`: what a mean has divided them by."""
        with full_precision(capture.device):
            norms = gradients.squared_norms(capture.layers).sqrt() * factor
            bad = ~torch.isfinite(norms).all(dim=1)
            if bool(bad.any()):
                gradients, norms = gradients.without(bad), norms.masked_fill(bad[:, None], 0)
            signs = torch.randint(0, 2, (len(rows), 1), generator=torch.Generator().manual_seed(2)) * 2.0 - 1
            scales, even = torch.zeros_like(norms), torch.zeros_like(norms)
            scales[rows] = signs.to(norms) * factor
            even[rows] = scales[rows] / _lengths(norms[rows], tolerance)
            both = gradients.weighted_sums([scales.to(capture.dtype), even.to(capture.dtype)], capture.layers)
        return cls(norms[rows], both[0], both[1], tolerance, outputs)

    @property
    def is_nothing(self) -> bool:
        return not bool(self.norms.any())

    def is_midway(self, middle: Sketch, end: Sketch) -> bool:
        """Whether a change from here to the end has come half the way in the middle, more or less."""
        drift = sum(float((end.sums[n] - self.sums[n]).double().square().sum()) for n in self.sums)
        halves = ((middle.sums[n] - (self.sums[n] + end.sums[n]) / 2).double().square().sum() for n in self.sums)
        return sum(map(float, halves)) <= MIDWAY**2 * drift

    def differs(self, other: Sketch, times: float = 1.0) -> bool:
        """By more than rounding may do, so many times."""
        tolerance = times * self.tolerance
        if self.norms.shape != other.norms.shape or self.sums.keys() != other.sums.keys():
            return True
        if not len(self.norms):
            return False
        larger = torch.maximum(self.norms, other.norms)  # [rows, L]
        allowed = torch.minimum(larger.amax(0), _lengths(larger, self.tolerance)) * tolerance
        if bool(((self.norms - other.norms).abs() > allowed).any()):
            return True
        if any(_differ(a, b, tolerance) for a, b in zip(self.outputs, other.outputs)):
            return True
        off = (float((self.evens[n] - other.evens[n]).double().norm()) for n in self.evens)
        return any(each > tolerance * len(self.norms) for each in off)


def _lengths(norms: Tensor, tolerance: float) -> Tensor:
    """[rows, L] → [rows, 1]: how long each example's gradient is, or what passes for that if it is very short."""
    whole: Tensor = norms.double().norm(dim=1, keepdim=True).to(norms)
    if not len(whole):
        return whole
    return torch.maximum(whole, min(0.3, 10 * tolerance) * whole.amax()).clamp_min(torch.finfo(norms.dtype).tiny)


def _differ(a: Tensor, b: Tensor, tolerance: float) -> bool:
    finite = torch.isfinite(a) & torch.isfinite(b)
    off = torch.where(finite, (a - b).abs(), torch.zeros_like(a))
    return bool((off > tolerance * (1 + a.abs())).any())


def tolerance_of(capture: Capture, call: RootCall | None, *, sizes_differ: bool) -> float:
    """For rounding, relative."""
    if call is not None and call.autocast is not None:
        return COARSER if sizes_differ else COARSE
    return TOLERANCE.get(capture.dtype, 1e-3)


def _cast(kind: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was in the forward pass."""
    return torch.autocast("cpu", dtype=kind or torch.bfloat16, enabled=kind is not None)


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """What modules keep on themselves while they run (activations, counters, lists) is put back."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def same_randomness(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Every run inside draws the same (initial weights, dropout, shuffles), and nobody else's draws change."""
    python, numeric = random.getstate(), np.random.get_state()  # noqa: NPY002  users' code may draw from it
    with torch.random.fork_rng(list(devices)):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numeric)  # noqa: NPY002


def remember_randomness() -> Callable[[], None]:
    """Call what it returns to draw the same once more: torch's, numpy's and Python's random numbers."""
    python, numeric, state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def again() -> None:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002
        torch.set_rng_state(state)

    return again


def devices_of(model: nn.Module) -> list[int]:
    return sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
