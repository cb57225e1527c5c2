"""Which of its two exact rules a layer takes: the choice, in one place, and the plan that reports it.

    formed  per-example gradients are formed, measured and kept
    gram    norms come from Gram matrices of the positions; the layer's input and output gradient are kept

Both cost one pass of the size of the weight gradient (forming it, or summing at the end). What differs is the rest, and
what stays in memory until the step. Neither changes a result beyond rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sizes:
    """Numbers per example of a layer: positions T, features on both sides of a position, weights, inputs + outputs."""

    positions: int
    features: int
    weights: int
    factors: int
    batch_size: int
    bytes_each: int = 4

    @property
    def gram_work(self) -> int:
        """Two T x T Gram matrices and a few passes over them. Constants fitted on CPU, in multiply-adds."""
        return self.positions**2 * (self.features + 300)

    @property
    def formed_work(self) -> int:
        """Every per-example weight is written, read for the norm and read again for the sum: little while in cache."""
        return (60 if self.weights > IN_CACHE else 5) * self.weights

    def kept(self, gram: bool) -> int:
        """Bytes that stay until the step."""
        return self.batch_size * self.bytes_each * (self.factors if gram else self.weights)

    @property
    def gram_is_lean(self) -> bool:
        return self.factors < self.weights


IN_CACHE = 2**15
"""Weights of a layer whose gradients for a usual batch are not written to memory and read back."""

Chooser = Callable[[Sizes], bool]
MOST_STORED = 2**27
"""Above this many numbers, per-example gradients of one layer are not formed if there is a leaner way."""


def by_cost(sizes: Sizes) -> bool:
    """Whether the Gram rule is the cheaper one; above a size that no layer should take, the leaner one."""
    huge = sizes.batch_size * sizes.weights > MOST_STORED and sizes.gram_is_lean
    return huge or sizes.gram_work < sizes.formed_work


@dataclass
class Entry:
    """One layer of the plan."""

    sizes: Sizes
    gram: bool
    reason: str


@dataclass
class Plan:
    """Remembers every layer's choice. With a memory budget, layers move to their lean rule until the sum fits.

    The sizes of a layer are known when its first gradient arrives. Until then, and until a batch has passed that was as
    large as the present one, a layer under a budget takes its lean rule.
    """

    memory_budget: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    _settled_for: int = 0
    _warned: bool = False

    def begin(self, batch_size: int) -> None:
        """A backward pass starts to deliver gradients of this many examples."""
        if self.memory_budget is not None and batch_size > self._settled_for and self.entries:
            self._settle(batch_size)

    def prefers_gram(self, name: str, sizes: Sizes) -> bool:
        known = self.entries.get(name)
        if known is None or not _alike(known.sizes, sizes):
            known = self.entries[name] = self._first_choice(sizes)
            self._settled_for = 0
        elif self.memory_budget is None and known.sizes.batch_size != sizes.batch_size:
            known = self.entries[name] = self._first_choice(sizes)
        return known.gram

    def _first_choice(self, sizes: Sizes) -> Entry:
        if self.memory_budget is not None:
            return Entry(sizes, sizes.gram_is_lean, "the lean rule, until all layers have been seen")
        return _cheaper(sizes)

    def _settle(self, batch_size: int) -> None:
        """Every layer on its cheaper rule; then, where that is not lean, by work per byte saved until the sum fits."""
        assert self.memory_budget is not None
        for name, entry in self.entries.items():
            fields = {**vars(entry.sizes), "batch_size": batch_size}
            self.entries[name] = _cheaper(Sizes(**fields))
        movable = [e for e in self.entries.values() if e.gram != e.sizes.gram_is_lean]
        movable.sort(key=lambda e: _extra_work(e.sizes) / max(1, e.sizes.kept(e.gram) - e.sizes.kept(not e.gram)))
        for entry in movable:
            if self.kept <= self.memory_budget:
                break
            entry.gram = not entry.gram
            more = 100 * _extra_work(entry.sizes) / max(1, _total_work(entry.sizes))
            saved = (entry.sizes.kept(not entry.gram) - entry.sizes.kept(entry.gram)) / 2**10 / batch_size
            entry.reason = (
                f"memory budget: saves {saved:.1f} kB an example for about {more:.0f} % more work in this layer"
            )
        self._settled_for = batch_size
        if self.kept > self.memory_budget and not self._warned:
            self._warned = True
            # Without numbers of the batch: its size is private.
            warnings.warn(
                f"memory_budget is {self.memory_budget} bytes, and the leanest rules keep more for a batch of this "
                "size. Set max_physical_batch_size to split batches.",
                stacklevel=2,
            )

    @property
    def kept(self) -> int:
        """Bytes that all layers with a choice keep until the step."""
        return sum(entry.sizes.kept(entry.gram) for entry in self.entries.values())


def _cheaper(sizes: Sizes) -> Entry:
    gram, work = by_cost(sizes), (sizes.gram_work / 1e6, sizes.formed_work / 1e6)
    if gram and work[0] >= work[1]:
        return Entry(sizes, gram, f"{sizes.weights} weights for every example of a batch are too many to keep")
    sign = "<" if gram else ">="
    return Entry(sizes, gram, f"T = {sizes.positions}: Gram {work[0]:.3g}M {sign} forming {work[1]:.3g}M per example")


def _extra_work(sizes: Sizes) -> int:
    return abs(sizes.gram_work - sizes.formed_work)


def _total_work(sizes: Sizes) -> int:
    """Of the cheaper rule, with forward, input gradient and weight gradient."""
    return min(sizes.gram_work, sizes.formed_work) + 3 * sizes.positions * sizes.weights


def _alike(a: Sizes, b: Sizes) -> bool:
    return (a.positions, a.features, a.weights, a.factors) == (b.positions, b.features, b.weights, b.factors)
