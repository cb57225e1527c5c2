"""Weights are noted with what they cost, even if nobody asks for a statement: when the next training begins, when the
engine is forgotten, and when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmdp.accounting import Ledger
from lmdp.lineage.training import Lineage

if TYPE_CHECKING:
    from torch import Tensor


class Training(Protocol):
    """One that can tell what it has cost so far."""

    def record(self) -> None: ...


_TRAININGS: weakref.WeakSet[Training] = weakref.WeakSet()
_FORGOTTEN: list[Noted] = []


@dataclass
class Noted:
    """What outlives a training, so that its weights can be noted after it. `records`: whether it is to note them."""

    ledger: Ledger
    parameters: Mapping[str, Tensor]
    records: bool
    lineage: Lineage | None = None
    steps: int = 0

    def follow(self, training: Training) -> None:
        """Note its weights once it is forgotten; of one that is forgotten nobody knows whether it was certified."""
        _TRAININGS.add(training)
        weakref.finalize(training, self._forgotten).atexit = False

    def _forgotten(self) -> None:
        """Called at any moment, also inside transforms of torch in which no number can be read: then it is put off."""
        try:
            self.record(certified=False)
        except Exception:
            _FORGOTTEN.append(self)

    @property
    def is_due(self) -> bool:
        return self.records and self.ledger.steps > self.steps

    def record(self, *, certified: bool) -> None:
        if self.is_due and self.lineage is not None:
            steps, mechanism = self.ledger.steps, self.ledger.mechanism
            rate, sigma = mechanism.sample_rate, mechanism.noise_multiplier
            self.lineage.record(self.parameters, self.lineage.spent(sigma, rate, steps, certified=certified))
            self.steps = steps


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
