"""What the loader delivered, what the loop did with it, and which batches came to nothing.

    begin_pass ── deliver ──▶ current ── mark_used ──▶ used      a step took it
                                 │
                                 ├── deliver, begin_pass, end_pass ──▶ passed over
                                 └── mark_used, then mark_lost ──▶ lost: its step raised

A batch counts as skipped if it was lost, or passed over in a pass that steps others: what is skipped may depend on what
was seen, and the sampling would no longer be the one that the accountant assumes. A pass without any step (evaluation)
skips nothing, nor does a loop that ends for good.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Delivery:
    """A batch, or a part of one, that the loader has handed out; which parts begin and end a batch."""

    size: int
    first: bool
    last: bool

    @property
    def empty(self) -> bool:
        """A whole batch without examples: the draw found none."""
        return self.size == 0 and self.first and self.last


@dataclass
class DeliveryLog:
    """Tells the private step what was delivered last, and counts batches that the loop skipped."""

    _current: Delivery | None = None
    _passed_over: int = 0
    _any_used: bool = False
    _skipped_before: int = 0

    def begin_pass(self) -> None:
        self.end_pass()  # if the pass before was broken off at a batch that was seen
        self._skipped_before = self.skipped
        self._passed_over, self._any_used = 0, False

    def deliver(self, delivery: Delivery) -> None:
        self.end_pass()
        self._current = delivery

    def end_pass(self) -> None:
        self._passed_over += self._current is not None
        self._current = None

    def mark_used(self) -> Delivery | None:
        """The batch that a step is about to use, once; None if it did not come from the loader."""
        delivery, self._current = self._current, None
        self._any_used |= delivery is not None
        return delivery

    def mark_lost(self) -> None:
        """A batch was used and nothing came of it, because its step raised."""
        self._skipped_before += 1

    @property
    def skipped(self) -> int:
        return self._skipped_before + (self._passed_over if self._any_used else 0)
