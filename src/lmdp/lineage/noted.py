"""Weights are noted with what they cost, even if nobody asks for a statement: when the next training begins, when the
engine is forgotten, and when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmdp.accounting import Ledger
from lmdp.lineage.index import append, digests
from lmdp.lineage.training import Lineage

if TYPE_CHECKING:
    from torch import Tensor


class Training(Protocol):
    """One that can tell what it has cost so far."""

    def record(self) -> None: ...


_TRAININGS: weakref.WeakSet[Training] = weakref.WeakSet()
_FORGOTTEN: list[Noted] = []
_ALL: weakref.WeakSet[Noted] = weakref.WeakSet()


@dataclass(eq=False)
class Noted:
    """What outlives a training, so that its weights can be noted after it. `records`: whether it is to note them;
    `derived`: digests of weights that were made of released ones, not noted yet."""

    ledger: Ledger
    parameters: Mapping[str, Tensor]
    records: bool
    lineage: Lineage | None = None
    steps: int = 0
    derived: set[str] = field(default_factory=set)
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

    def record(self, *, certified: bool) -> None:
        if self.is_due and self.lineage is not None:
            steps, mechanism = self.ledger.steps, self.ledger.mechanism
            rate, sigma = mechanism.sample_rate, mechanism.noise_multiplier
            spent = self.lineage.spent(sigma, rate, steps, certified=certified)
            if steps > self.steps:
                self.lineage.record(self.parameters, spent)
            append(self.derived, spent)
            self.steps, self.derived = steps, set()


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
