"""Train models on private data that are then served as embeddings, without leaking who was in the data.

public shadow data → shadow model → representations → adversaries → **risk profile** → private training
(norms → scales → weighted sums → noise → step, accountant beside it) → model → **audit** → report.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdp.app.serving import load
    from lmdp.audit import (
        AuditReport,
        CheckReport,
        EpsilonBound,
        audit,
        audit_embeddings,
        audit_epsilon,
        check,
        plant_canaries,
    )
    from lmdp.averages import WeightAverage
    from lmdp.guards import make_compatible
    from lmdp.layers import Layer, LayerMap
    from lmdp.private import NotCertifiedWarning, PrivacyEngine, PrivacyStatement
    from lmdp.risk import RiskProfile, estimate_risk
    from lmdp.units import PerUser, Unit, Views

__version__ = "0.2.0"

__all__ = [
    "AuditReport",
    "CheckReport",
    "EpsilonBound",
    "Layer",
    "LayerMap",
    "NotCertifiedWarning",
    "PerUser",
    "PrivacyEngine",
    "PrivacyStatement",
    "RiskProfile",
    "Unit",
    "Views",
    "WeightAverage",
    "audit",
    "audit_embeddings",
    "audit_epsilon",
    "check",
    "estimate_risk",
    "load",
    "make_compatible",
    "plant_canaries",
]

_ROOM_OF = {
    "AuditReport": "lmdp.audit",
    "CheckReport": "lmdp.audit",
    "EpsilonBound": "lmdp.audit",
    "Layer": "lmdp.layers",
    "LayerMap": "lmdp.layers",
    "NotCertifiedWarning": "lmdp.private",
    "PerUser": "lmdp.units",
    "PrivacyEngine": "lmdp.private",
    "PrivacyStatement": "lmdp.private",
    "RiskProfile": "lmdp.risk",
    "Unit": "lmdp.units",
    "Views": "lmdp.units",
    "WeightAverage": "lmdp.averages",
    "audit_embeddings": "lmdp.audit",
    "audit_epsilon": "lmdp.audit",
    "check": "lmdp.audit",
    "estimate_risk": "lmdp.risk",
    "load": "lmdp.app.serving",
    "make_compatible": "lmdp.guards",
    "plant_canaries": "lmdp.audit",
}


def __getattr__(name: str) -> Any:
    """Rooms are opened when they are first asked for, so that `lmdp --help` need not wait for torch."""
    if name in ("audit", "data", "extending", "integrations", "models", "opacus", "report"):
        return importlib.import_module(f"lmdp.{name}")
    if name in _ROOM_OF:
        return getattr(importlib.import_module(_ROOM_OF[name]), name)
    raise AttributeError(f"module 'lmdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
