"""Attacks on representations: what a trained model's layers give away about who was in its training data.

`lmdp.audit(model, members, nonmembers)` runs the audit; the module itself is what is called.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from lmdp.audit.epsilon import EpsilonBound, audit_epsilon
from lmdp.audit.neighbours.check import Finding, NeighbourReport, check_neighbours
from lmdp.audit.results import AuditReport, Leak, Peak
from lmdp.membership.instrument import audit, audit_embeddings

__all__ = [
    "AuditReport",
    "EpsilonBound",
    "Finding",
    "Leak",
    "NeighbourReport",
    "Peak",
    "audit",
    "audit_embeddings",
    "audit_epsilon",
    "check_neighbours",
]


class _Callable(types.ModuleType):
    """`lmdp.audit` is a room and, as people know it, a function: both hold whichever is imported first."""

    def __call__(self, *args: Any, **kwargs: Any) -> AuditReport:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
