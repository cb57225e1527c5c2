"""What the report draws of an audit and of a bound on epsilon.

Protocols, so that an audit can draw itself (`AuditReport.to_html`): the audit room opens this one, and not also the
other way round. Leaks and risk profiles draw nothing and are taken as they are.
"""

from __future__ import annotations

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
