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
        weakref.finalize(training, self.record, certified=False).atexit = False

    @property
    def is_due(self) -> bool:
        return self.records and self.ledger.steps > self.steps

    def record(self, *, certified: bool) -> None:
        if self.is_due and self.lineage is not None:
            self.steps, mechanism = self.ledger.steps, self.ledger.mechanism
            rate, sigma = mechanism.sample_rate, mechanism.noise_multiplier
            spent = self.lineage.spent(sigma, rate, self.ledger.steps, certified=certified)
            self.lineage.record(self.parameters, spent)


def note_all_but(training: Training) -> None:
    """Of which nobody may have asked for a statement yet."""
    for other in list(_TRAININGS):
        if other is not training:
            other.record()


@atexit.register
def _note_at_exit() -> None:
    for training in list(_TRAININGS):
        with suppress(Exception):  # nothing may keep a process from ending
            training.record()
