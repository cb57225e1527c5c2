"""What the loader delivered, what the loop did with it, and which batches came to nothing.

Draws are numbered, and a step must use the next one: all of its parts, in their order, once.

    deliver ──▶ current ── mark_used ──▶ used      it is the next one: a step takes it
                                     ├──▶ skipped   a later one was used: those between came to nothing
                                     ├──▶ foreign   it was used before (another pass was stepped meanwhile)
                                     └── mark_lost ──▶ skipped   its step raised

What is skipped may depend on what was seen, and the sampling would no longer be the one that the accountant assumes. A
pass that is broken off skips nothing, nor does one without any step (evaluation): the next pass begins with the very
batch, or part of one, that was not stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lmdp.guards.still import Shape

T = TypeVar("T")
SKIPPED = (
    "batches were drawn and skipped: every batch, an empty one too, must be stepped, because the choice to skip may "
    "depend on private data"
)

ELSEWHERE = (
    "batches are drawn by the data loader that make_private returned, as its passes begin, and not by another one over "
    "its batch_sampler, which would hand out none: iterate over the returned loader. In place of Opacus's own "
    "BatchMemoryManager: from lmdp.opacus import BatchMemoryManager"
)


class NotBegun:
    """The draws of a sampler, no pass over which has begun."""

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError(ELSEWHERE)


@dataclass(frozen=True)
class Delivery:
    """A batch, or a part of one, that the loader has handed out; which parts begin and end a batch.

    company  where it is not 0: the how-manieth of `companies` parts that guards compare. All hold the same examples in
             their places `shared`. They come before a batch, are of none, and count for nothing
    still    whether randomness is held still while the model runs on it
    drawn    whether random numbers were drawn to make it that could not be held still
    held     those that could
    number   of the draw
    part     how many parts of it come before
    """

    size: int
    first: bool
    last: bool
    company: int = 0
    companies: int = 0
    shared: tuple[int, ...] = ()
    still: bool = False
    drawn: bool = False
    held: tuple[tuple[Shape, bool], ...] = ()
    number: int = 0
    part: int = 0

    @property
    def empty(self) -> bool:
        """A whole batch without examples: the draw found none, and what was handed out in its place counts nothing."""
        return self.size == 0


@dataclass
class DeliveryLog:
    """Tells the private step what was delivered last, and counts batches that the loop skipped.

    position    the number of the draw that the next step must use; None: whichever a pass begins with
    parts_used  of a draw that is not stepped to its end
    looks_used  parts of the newest look
    uses        how many deliveries were used so far; `last_used` is the newest
    """

    position: Callable[[], int] | None = None
    parts_used: int = 0
    looks_used: int = 0
    skipped: int = 0
    uses: int = 0
    last_used: Delivery | None = None
    _passes: int = 0
    _current: Delivery | None = None
    _next: int = 0

    @property
    def unused(self) -> bool:
        """Whether no step has used what was delivered last."""
        return self._current is not None

    @property
    def completes(self) -> bool:
        """Whether what was delivered last completes a batch: a step is made once it is used."""
        return self._current is not None and self._current.last

    @property
    def only_looked_at(self) -> bool:
        """Whether what was delivered last is part of a look: no step is made of it."""
        return self._current is not None and bool(self._current.company)

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """One pass, and note while it lasts."""
        self._passes += 1
        try:
            yield from batches
        finally:
            self._passes -= 1

    @property
    def passing(self) -> bool:
        """Whether a pass is not over yet, and was not left."""
        return self._passes > 0

    def between_passes(self, number: int) -> None:
        """A pass has ended, or begins, with the draw of this number."""
        self._current, self._next = None, number

    def deliver(self, delivery: Delivery) -> None:
        self._current = delivery

    def mark_used(self) -> Delivery | None:
        """The batch that a step is about to use, once; None if it did not come from the loader, or is not its turn."""
        delivery, self._current = self._current, None
        if delivery is None:
            self.parts_used = 0
            return None
        self.uses, self.last_used = self.uses + 1, delivery
        if delivery.company:
            self.looks_used += delivery.company == self.looks_used + 1
            return delivery
        if not self._is_its_turn(delivery):
            self.parts_used = 0
            return None
        self.parts_used = 0 if delivery.last else self.parts_used + 1
        self._next = delivery.number + delivery.last
        return delivery

    def _is_its_turn(self, delivery: Delivery) -> bool:
        """Counts draws before it that were never stepped, or not to their end."""
        expected = self._expected()
        if delivery.number > expected:
            self.skipped, self.parts_used = self.skipped + delivery.number - expected, 0
        return delivery.number >= expected and delivery.part == self.parts_used

    def parts_used_of(self, number: int) -> int:
        """How many parts of this draw have been stepped."""
        return self.parts_used if number == self._expected() else 0

    def _expected(self) -> int:
        return self._next if self.position is None else self.position()

    def mark_lost(self) -> None:
        """A batch was used and nothing came of it, because its step raised."""
        self.skipped, self.parts_used = self.skipped + 1, 0
