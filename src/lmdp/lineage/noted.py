"""Weights are noted with what they cost, even if nobody asks for a statement: when the next training begins, when the
engine is forgotten, and when the process ends. Those of a training that goes on are noted when somebody reads them to
keep them (`state_dict()`, a copy); whether they are certified turns out later."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmdp.accounting import Ledger
from lmdp.lineage.index import append, digests
from lmdp.lineage.spending import Spending
from lmdp.lineage.training import Lineage

if TYPE_CHECKING:
    from torch import Tensor


OFTEN, SOME = 64, 8
"""Weights that are read after every step (to be averaged) are noted in part: after so many times, so many tensors."""


class Training(Protocol):
    """One that can tell what it has cost so far."""

    def record(self) -> None: ...


_TRAININGS: weakref.WeakSet[Training] = weakref.WeakSet()
_FORGOTTEN: list[Noted] = []
_ALL: weakref.WeakSet[Noted] = weakref.WeakSet()


@dataclass(eq=False)
class Noted:
    """What outlives a training, so that its weights can be noted after it. `records`: whether it is to note them;
    `derived`: digests of weights that were made of released ones, not noted yet; `left`: of those that were read after
    so many steps, and not stated to be certified yet."""

    ledger: Ledger
    parameters: Mapping[str, Tensor]
    records: bool
    lineage: Lineage | None = None
    steps: int = 0
    derived: set[str] = field(default_factory=set)
    left: dict[int, set[str]] = field(default_factory=dict)
    _over: bool = False

    def follow(self, training: Training) -> None:
        """Note its weights once it is forgotten; of one that is forgotten nobody knows whether it was certified."""
        _TRAININGS.add(training)
        _ALL.add(self)
        weakref.finalize(training, self._forgotten).atexit = False

    def _forgotten(self) -> None:
        """Called at any moment, also inside transforms of torch in which no number can be read: then it is put off.

        Parameters that take all processes to be read are not: nobody knows what the others do at this moment.
        """
        self._over = True
        if self.takes_all:
            return
        try:
            self.record(certified=False)
        except Exception:
            _FORGOTTEN.append(self)

    @property
    def takes_all(self) -> bool:
        """Whether all processes must take part where its parameters are read."""
        return bool(getattr(self.parameters, "gathers", False))

    @property
    def is_due(self) -> bool:
        return self.records and (self.ledger.steps > self.steps or bool(self.derived))

    def made(self, weights: Mapping[str, Tensor]) -> None:
        """Of what this training released, by whoever holds it: these cost as much."""
        if self.records and self.ledger.steps:
            self.derived |= set(digests(weights, casts=True))
            if self._over:
                self.record(certified=False)

    def leave(self) -> None:
        """Somebody reads the weights as they are now, in the middle of the training."""
        steps = self.ledger.steps
        if self.takes_all or self.lineage is None or not self.records or steps <= max(self.steps, *self.left, 0):
            return
        self.left[steps] = self.lineage.released(self._some() if len(self.left) >= OFTEN else self.parameters)
        append(self.left[steps], self._spent(steps, certified=False))

    def record(self, *, certified: bool) -> None:
        if self.is_due and self.lineage is not None:
            steps = self.ledger.steps
            spent = self._spent(steps, certified=certified)
            if steps > self.steps:
                append(self.lineage.released(self.parameters), spent)
            append(self.derived, spent)
            for before, tensors in self.left.items() if certified else ():
                append(tensors, self._spent(before, certified=True))
            self.left = {} if certified else self.left
            self.steps, self.derived = steps, set()

    def _some(self) -> Mapping[str, Tensor]:
        """Of different sizes, without the largest: any of them tells whose weights these are."""
        by_size = sorted(self.parameters.items(), key=lambda item: item[1].numel())
        smaller = by_size[: len(by_size) // 2 + 1]
        return dict(smaller[:: 1 + len(smaller) // SOME])

    def _spent(self, steps: int, *, certified: bool) -> tuple[Spending, ...]:
        assert self.lineage is not None
        mechanism = self.ledger.mechanism
        return self.lineage.spent(mechanism.noise_multiplier, mechanism.sample_rate, steps, certified=certified)


def noted_of(parameters: Iterable[Tensor]) -> Noted | None:
    """The latest training of any of these, if there is one."""
    sought = {id(tensor) for tensor in parameters}
    readable = [noted for noted in _ALL if not noted.takes_all]
    trainings = [noted for noted in readable if any(id(tensor) in sought for tensor in noted.parameters.values())]
    return max(trainings, key=lambda noted: noted.ledger.steps, default=None)


def note_all_but(training: Training) -> None:
    """Of which nobody may have asked for a statement yet."""
    while _FORGOTTEN:
        _FORGOTTEN.pop().record(certified=False)
    for other in list(_TRAININGS):
        if other is not training:
            other.record()


@atexit.register
def _note_at_exit() -> None:
    for training in list(_TRAININGS):
        with suppress(Exception):  # nothing may keep a process from ending
            training.record()
