"""Trained models under attack: what their layers give away about members, and whether the claimed epsilon holds.

`lmdp.audit(model, members, nonmembers)` runs an audit; the module itself is what is called.

    model         `audit`: attack every layer of a trained model, or embeddings that a service returned
    embeddings    embeddings beside their raw inputs, checked and balanced
    finite        values that are not finite: of embeddings refused, of one group's outputs said
    results       `AuditReport`: what was measured, to be saved, printed and drawn
    planting      `plant_canaries`: canaries in a training, each in or out by a secret coin
    coins         what planted canaries tell of their training: leaks by layer, epsilon from below
    canaries      examples made to be recognised, and the model on which any gradient can be set by hand
    curves        trade-off curves: how well any attack can do on Gaussian steps
    bounds        from guesses about canaries to a lower bound on epsilon: pure statistics
    epsilon       `audit_epsilon`: put canaries into a training or leave them out, and bound its epsilon from below
    neighbours/   `check` and `check_neighbours`: one whole training with and without one example
"""

from __future__ import annotations

import sys
import types
from typing import Any

from lmdp.audit.epsilon import EpsilonBound, audit_epsilon
from lmdp.audit.model import audit, audit_embeddings
from lmdp.audit.neighbours.check import CheckReport, Finding, NeighbourReport, check, check_neighbours
from lmdp.audit.planting import Canaries, Planted, plant_canaries
from lmdp.audit.results import AuditReport, CanaryLeaks, Peak
from lmdp.membership.leak import Leak
from lmdp.membership.references import Reference

__all__ = [
    "AuditReport",
    "Canaries",
    "CanaryLeaks",
    "CheckReport",
    "EpsilonBound",
    "Finding",
    "Leak",
    "NeighbourReport",
    "Peak",
    "Planted",
    "Reference",
    "audit",
    "audit_embeddings",
    "audit_epsilon",
    "check",
    "check_neighbours",
    "plant_canaries",
]


class _Callable(types.ModuleType):
    """`lmdp.audit` is a room and, as people know it, a function: both hold whichever is imported first."""

    def __call__(self, *args: Any, **kwargs: Any) -> AuditReport:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
