"""What the report draws of an audit and of a bound on epsilon.

Protocols, so that an audit can draw itself (`AuditReport.to_html`): the audit room opens this one, and not also the
other way round. Leaks and risk profiles draw nothing and are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmdp.membership.leak import Leak


class Peak(Protocol):
    """The leakiest layer, with an interval that allows for having looked at all of them."""

    @property
    def name(self) -> str: ...
    @property
    def auc(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float]: ...


class CanaryLeaks(Protocol):
    """As `lmdp.audit.CanaryLeaks`."""

    @property
    def kind(self) -> str: ...
    @property
    def layers(self) -> tuple[Leak, ...]: ...
    @property
    def peak(self) -> Peak: ...
    @property
    def reference(self) -> Leak | None: ...
    @property
    def inside(self) -> int: ...
    @property
    def outside(self) -> int: ...
    @property
    def bound(self) -> Bound | None: ...


class Audit(Protocol):
    """As `lmdp.AuditReport`."""

    @property
    def layers(self) -> tuple[Leak, ...]: ...
    @property
    def peak(self) -> Peak: ...
    @property
    def reference(self) -> Leak | None: ...
    @property
    def controls(self) -> tuple[Leak, ...]: ...
    @property
    def members(self) -> int: ...
    @property
    def nonmembers(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    @property
    def warning(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def tpr_limit_at_1pct(self) -> float | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def canaries(self) -> CanaryLeaks | None: ...
    @property
    def together(self) -> tuple[Leak, ...]: ...


@dataclass(frozen=True)
class Vulnerable:
    """What an audit says of canaries, as if it were of nothing else: they are drawn and told as members are."""

    layers: tuple[Leak, ...]
    peak: Peak
    reference: Leak | None
    members: int
    nonmembers: int
    by: str
    tpr_limit_at_1pct: float | None = None
    controls: tuple[Leak, ...] = ()
    left_out: int = 0
    warning: str = ""
    verdict: str = ""
    notes: tuple[str, ...] = ()
    canaries: CanaryLeaks | None = None
    together: tuple[Leak, ...] = ()

    @classmethod
    def of(cls, audit: Audit) -> Vulnerable | None:
        """None where no canaries were planted."""
        c, limit = audit.canaries, audit.tpr_limit_at_1pct
        return None if c is None else cls(c.layers, c.peak, c.reference, c.inside, c.outside, audit.by, limit)


class Bound(Protocol):
    """As `lmdp.EpsilonBound`."""

    @property
    def claimed(self) -> float: ...
    @property
    def lower(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def confidence(self) -> float: ...
    @property
    def training(self) -> str: ...
    @property
    def canary(self) -> str: ...
    @property
    def exceeded(self) -> bool: ...
    @property
    def verdict(self) -> str: ...
