"""The result of an audit: plain values, one entry per layer, that can be saved, drawn and compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lmdp.data.records import Amount, Count, Share, at_least, decoded, encoded, read_object
from lmdp.membership.leak import Leak, table
from lmdp.membership.metrics import Interval
from lmdp.report.audit_page import render

FORMAT = 1
NOT_PRIVATE = (
    "computed on private members: this report is not covered by any epsilon. Share it as you would share the data."
)


@dataclass(frozen=True)
class Peak:
    """The leakiest layer. Its interval is wider than the layer's own: the best of many is partly luck."""

    name: str
    auc: Share
    interval: Interval
    layers_looked_at: Annotated[int, at_least(1)]


@dataclass(frozen=True)
class AuditReport:
    """What the representations of a model reveal about membership, layer by layer, beside the controls."""

    layers: tuple[Leak, ...]
    peak: Peak
    reference: Leak | None
    controls: tuple[Leak, ...]
    members: Count
    nonmembers: Count
    left_out: Count
    seed: int
    seconds: Amount
    warning: str = NOT_PRIVATE
    format: int = FORMAT

    @property
    def verdict(self) -> str:
        """One sentence, and nothing that the intervals do not support."""
        shifted = [c for c in self.controls if c.fires]
        if shifted:
            return (
                f"Members and non-members differ before any training is looked at (control '{shifted[0].name}': AUC "
                f"{shifted[0].auc:.3f}): this audit measures that difference, not a leak."
            )
        low, high = self.peak.interval
        if low > 0.5:
            return (
                f"Layer '{self.peak.name}' gives membership away: AUC {self.peak.auc:.3f} (95 % interval "
                f"{low:.3f} to {high:.3f}, corrected for {self.peak.layers_looked_at} layers)."
            )
        return (
            f"No layer gives membership away measurably: the highest AUC is {self.peak.auc:.3f} (95 % interval "
            f"{low:.3f} to {high:.3f}, corrected for {self.peak.layers_looked_at} layers)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**encoded(self), "verdict": self.verdict}

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> AuditReport:
        """Read a saved audit; a file that is not one is refused with the field that is wrong."""
        report = decoded(cls, read_object(path, "an audit"), str(path), version=FORMAT)
        if not report.layers:
            raise ValueError(f"{path}: layers is empty; an audit has at least 1 layer")
        return report

    def to_html(self, path: str | Path) -> None:
        """One page that opens offline, in the style and with the charts of a whole report."""
        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.verdict}\n{table([*self.layers, *self.controls, *([self.reference] if self.reference else [])])}"
