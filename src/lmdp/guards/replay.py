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
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients import Capture, PerExampleGradients, randomness
from lmdp.gradients.precision import full_precision
from lmdp.guards.still import Held, Still
from lmdp.layers import Attributes

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
ROUNDING = 16
"""Units in the last place of an example's whole gradient, below which a layer of it is nothing but rounding."""
EXTREME = 1e3
"""What the other examples' numbers are multiplied with, to see what an outlier does to the rest."""
MIDWAY = 0.1
FEWEST, MOST_HELD = 4, 2**25
"""Rows of a batch that are run again at least; bytes that the modules then take in and give out."""
_FRESH = torch.Generator().manual_seed(secrets.randbelow(2**63))
FOLD, KEPT = 2**13, 2**10
_SECRET = secrets.randbelow(2**63)
COARSE, COARSER = 5e-3, 5e-2
"""Under autocast; and between batches of different sizes, of which other sums are rounded."""


@dataclass(frozen=True)
class RootCall:
    """One call of the whole model, on `size` examples; `autocast` is None, or the type that it ran in.

    held  bytes that its modules took in and gave out
    """

    args: Any
    kwargs: Any
    size: int
    autocast: torch.dtype | None
    held: int = 0

    def lighter(self) -> RootCall:
        """The same on a few of its rows, in their order, if it holds more than a second call beside it should."""
        few = max(FEWEST, self.size * MOST_HELD // max(1, self.held))
        if few >= self.size:
            return self
        rows = torch.randperm(self.size, generator=_FRESH)[:few].sort().values

        def cut(leaf: Any) -> Any:
            counts = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.size
            return leaf.detach()[rows.to(leaf.device)] if counts else leaf

        args, kwargs = pytree.tree_map(cut, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, size=few)

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
    handed_out = all(map(handed, call.inputs()[1:]))
    call = call.lighter()
    replay = Replay(capture, call, reached, mean_loss=mean_loss)
    try:
        with same_attributes(capture.model), _cast(capture.device.type, call.autocast):
            meet = replay.meet(most)
            if meet and not handed_out:
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
        companies = _companies(self._size)
        first = self._run(self._every, views=[stay for stay, _ in companies[:-1]])
        if first is None:
            return None
        for number, (stay, order) in enumerate(companies[:most], start=1):
            second = self._run(order, stay, number, views=[stay])
            if second is None:
                return None
            if first.sketches[number - 1].differs(second.sketches[0]):
                return self._unless_unsteady()
        if most > 1 and self._is_moved_by_outliers(first):
            return self._unless_unsteady()
        return False if first.is_sure else None

    def is_sized(self) -> bool:
        """Whether half of the examples come out the same without the others, in other places."""
        half = self._every[self._size // 2 :]
        try:
            with Still(Held(self._size, half.tolist())):
                among = self._run(self._every, views=[half], sizes_differ=True)
            with Still(Held(len(half), range(len(half)))):
                alone = self._run(half, views=[torch.arange(len(half))], sizes_differ=True)
        except Exception:  # what the model was given besides may be for so many examples
            return False
        if among is None or alone is None or not (among.is_sure and alone.is_sure):
            return False
        return not among.sketches[0].differs(alone.sketches[0])

    def _is_moved_by_outliers(self, first: Ran) -> bool:
        stay, order = _companies(self._size)[-1]
        try:
            second = self._run(order, stay, 0, times=EXTREME, views=[stay])
        except Exception:  # a model may refuse numbers that no example has
            return False
        return second is not None and first.sketches[0].differs(second.sketches[0])

    def _unless_unsteady(self) -> bool | None:
        one, other = (self._run(self._every, views=[self._every]) for _ in range(2))
        return None if one is None or other is None or one.sketches[0].differs(other.sketches[0]) else True

    def _run(
        self,
        order: Tensor,
        stay: Tensor | None = None,
        company: int = 0,
        times: float = 1.0,
        *,
        views: Sequence[Tensor],
        sizes_differ: bool = False,
    ) -> Ran | None:
        """On these rows; in all places but `stay` with other signs, and with numbers so many `times` as large.

        `views`: the rows of which a sketch is kept; gradients are not.
        """
        others = order[:0] if stay is None else self._every[~torch.isin(self._every, stay)]
        rows = list(self._leaves)
        for i, leaf in enumerate(rows):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self._size:
                rows[i] = leaf[order.to(leaf.device)]
                if times != 1.0 and leaf.is_floating_point():
                    rows[i][others.to(leaf.device)] *= times
        args, kwargs = pytree.tree_unflatten(rows, self._spec)
        model = self._capture.model
        with self._capture.beside(), torch.enable_grad(), randomness.same(self._seed):
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
            gradients, values = self._capture.take(), [out.detach() for out in terms]
            del outputs, chosen, terms  # and with them the graph
        tolerance = tolerance_of(self._capture, self._call, sizes_differ=sizes_differ)
        sketches = []
        for view in views:
            theirs = [out.index_select(dim, view.to(out.device)) for out, dim in zip(values, dims) if dim is not None]
            sketches.append(Sketch.of(gradients, self._capture, view, tolerance, factor=factor, outputs=theirs))
        return Ran(sketches, all(out.numel() == 1 or dim is not None for out, dim in zip(values, dims)))


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
    """What one run gave: sketches, and whether it is sure which dimension of its outputs counts the examples."""

    sketches: list[Sketch]
    is_sure: bool


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
        torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8).mul_(2).sub_(1)
        for seed in (0, company)
    )
    if dim is not None:
        signs.index_copy_(dim, others, changed.index_select(dim, others))
        signs = signs.index_select(dim, places)
    return signs.to(output)


@dataclass(frozen=True)
class Sketch:
    """What the engine computed for some rows of a batch: norms [rows, L], and two sums under random signs.

    sums       of gradients as they are, of each parameter at most KEPT numbers: what is longer is folded, under random
               signs, so that a difference stays as long as it is
    evens      of gradients that are all about as long, in each layer, so that none hides behind a longer one, and no
               layer behind another: methods that reweight layers raise small ones
    tolerance  for rounding, relative
    last_place the model's machine epsilon: key biases of attention have no gradient, and what is computed for them is
               rounding, which another kernel makes another
    """

    norms: Tensor
    sums: dict[str, Tensor]
    evens: dict[str, Tensor]
    tolerance: float
    last_place: float
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
            even[rows] = scales[rows] / _evened(norms[rows], tolerance)
            sums, evens = (_folded(gradients, of.to(capture.dtype), capture) for of in (scales, even))
        return cls(norms[rows], sums, evens, tolerance, torch.finfo(capture.dtype).eps, outputs)

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
        whole = _lengths(larger, self.tolerance)
        allowed = torch.minimum(larger.amax(0), whole) * tolerance + ROUNDING * self.last_place * whole
        if bool(((self.norms - other.norms).abs() > allowed).any()):
            return True
        if any(_differ(a, b, tolerance) for a, b in zip(self.outputs, other.outputs)):
            return True
        off = (float((self.evens[n] - other.evens[n]).double().norm()) for n in self.evens)
        return any(each > tolerance * len(self.norms) for each in off)


def _folded(gradients: PerExampleGradients, scales: Tensor, capture: Capture) -> dict[str, Tensor]:
    """Weighted sums of all parameters, which are much to keep, folded."""
    return {name: _fold(total.reshape(-1)) for name, (total,) in gradients.each_sum([scales], capture.layers)}


def _fold(numbers: Tensor) -> Tensor:
    """[n] → [KEPT]: each number is added to a place of its own, or its negative: both follow from where it was.

    By way of FOLD places, to take fewer turns.
    """
    if len(numbers) <= KEPT:
        return numbers
    generator = torch.Generator().manual_seed(_SECRET)
    signs, others = (torch.randint(0, 2, (2, FOLD), generator=generator) * 2 - 1).to(numbers).unbind()
    folded = numbers.new_zeros(FOLD, dtype=torch.float64)
    for part in numbers.split(FOLD):
        by, sign = torch.randint(0, FOLD, (2,), generator=generator).tolist()
        folded[: len(part)] += (part * signs[: len(part)]) * (1 - 2 * (sign % 2))
        folded = folded.roll(by)
    return (folded * others).view(-1, KEPT).sum(0)


def _lengths(norms: Tensor, tolerance: float) -> Tensor:
    """[rows, L] → [rows, 1]: how long each example's gradient is, or what passes for that if it is very short."""
    whole: Tensor = norms.double().norm(dim=1, keepdim=True).to(norms)
    if not len(whole):
        return whole
    return torch.maximum(whole, min(0.3, 10 * tolerance) * whole.amax()).clamp_min(torch.finfo(norms.dtype).tiny)


def _evened(norms: Tensor, tolerance: float) -> Tensor:
    """[rows, L] → what each layer of each gradient is divided by: its norm, or what passes for that if it is small.

    Layers are raised within an example. A very short gradient is not: where a loss is nearly met, it is a difference of
    nearly equal numbers, and its rounding is large beside it.
    """
    whole = norms.double().norm(dim=1, keepdim=True).to(norms).clamp_min(torch.finfo(norms.dtype).tiny)
    shares: Tensor = (norms / whole).clamp_min(3 * tolerance)
    return shares * _lengths(norms, tolerance)


def _differ(a: Tensor, b: Tensor, tolerance: float) -> bool:
    finite = torch.isfinite(a) & torch.isfinite(b)
    off = torch.where(finite, (a - b).abs(), torch.zeros_like(a))
    return bool((off > tolerance * (1 + a.abs())).any())


def tolerance_of(capture: Capture, call: RootCall | None, *, sizes_differ: bool) -> float:
    """For rounding, relative."""
    if call is not None and call.autocast is not None:
        return COARSER if sizes_differ else COARSE
    return TOLERANCE.get(capture.dtype, 1e-3)


def _cast(device: str, kind: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was in the forward pass."""
    return torch.autocast(device, dtype=kind, enabled=True) if kind is not None else contextlib.nullcontext()


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """What modules keep on themselves while they run (activations, counters, lists) is put back."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.restore()
