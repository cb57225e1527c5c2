"""The result of an audit: plain values, one entry per layer, that can be saved, drawn and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lmdp.data.records import Fields
from lmdp.membership.crossfit import Result
from lmdp.membership.metrics import Interval, Metrics, roc

FORMAT = 1
NOT_PRIVATE = (
    "computed on private members: this report is not covered by any epsilon. Share it as you would share the data."
)


@dataclass(frozen=True)
class Leak:
    """How well one kind of evidence (a layer, the raw input, the model's output) gives membership away.

    `interval` is the 95 % interval of the AUC. `error_rate` is 1 − `accuracy`, balanced over members and non-members.
    """

    name: str
    accuracy: float
    accuracy_interval: Interval
    error_rate: float
    error_rate_interval: Interval
    auc: float
    interval: Interval
    auc_error: float
    tpr_at_1pct: float
    tpr_at_1pct_interval: Interval
    tpr_at_01pct: float | None
    attack: str
    roc: tuple[tuple[float, ...], tuple[float, ...]] = field(repr=False, default=((), ()))

    @classmethod
    def of(cls, name: str, result: Result) -> Leak:
        fpr, tpr = roc(result.folds)
        return cls.from_metrics(name, result.metrics, result.attack, (tuple(fpr), tuple(tpr)))

    @classmethod
    def from_metrics(
        cls, name: str, metrics: Metrics, attack: str, curve: tuple[tuple[float, ...], tuple[float, ...]]
    ) -> Leak:
        return cls(
            name=name,
            accuracy=metrics.accuracy,
            accuracy_interval=metrics.accuracy_interval,
            error_rate=metrics.error_rate,
            error_rate_interval=metrics.error_rate_interval,
            auc=metrics.auc,
            interval=metrics.auc_interval,
            auc_error=metrics.auc_error,
            tpr_at_1pct=metrics.tpr_at_1pct,
            tpr_at_1pct_interval=metrics.tpr_at_1pct_interval,
            tpr_at_01pct=metrics.tpr_at_01pct,
            attack=attack,
            roc=curve,
        )

    @classmethod
    def read(cls, fields: Fields) -> Leak:
        fpr, tpr = (tuple(fields.points("roc", axis)) for axis in (0, 1))
        return cls(
            name=fields.text("name"),
            accuracy=fields.share("accuracy"),
            accuracy_interval=fields.interval("accuracy_interval"),
            error_rate=fields.share("error_rate"),
            error_rate_interval=fields.interval("error_rate_interval"),
            auc=fields.share("auc"),
            interval=fields.interval("interval"),
            auc_error=fields.share("auc_error"),
            tpr_at_1pct=fields.share("tpr_at_1pct"),
            tpr_at_1pct_interval=fields.interval("tpr_at_1pct_interval"),
            tpr_at_01pct=fields.optional_share("tpr_at_01pct"),
            attack=fields.text("attack"),
            roc=(fpr, tpr),
        )

    @property
    def found(self) -> bool:
        """Whether the interval lies above chance."""
        return self.interval[0] > 0.5

    @property
    def fires(self) -> bool:
        """For a control: whether it lies above chance beyond doubt (one in two thousand by luck)."""
        return self.auc - 3.29 * self.auc_error > 0.5


@dataclass(frozen=True)
class Peak:
    """The leakiest layer. Its interval is wider than the layer's own: the best of many is partly luck."""

    name: str
    auc: float
    interval: Interval
    layers_looked_at: int


@dataclass(frozen=True)
class AuditReport:
    """What the representations of a model reveal about membership, layer by layer, beside the controls."""

    layers: tuple[Leak, ...]
    peak: Peak
    reference: Leak | None
    controls: tuple[Leak, ...]
    members: int
    nonmembers: int
    left_out: int
    seed: int
    seconds: float
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
        return asdict(self) | {"verdict": self.verdict}

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> AuditReport:
        """Read a saved audit; a file that is not one is refused with the field that is wrong."""
        root = Fields.load(path, "an audit")
        root.format(FORMAT)
        layers, peak, reference = (
            tuple(map(Leak.read, root.each("layers"))),
            root.inner("peak"),
            root.optional("reference"),
        )
        if not layers:
            raise ValueError(f"{path}: layers is empty; an audit has at least 1 layer")
        return cls(
            layers=layers,
            peak=Peak(
                peak.text("name"), peak.share("auc"), peak.interval("interval"), peak.integer("layers_looked_at", 1)
            ),
            reference=None if reference is None else Leak.read(reference),
            controls=tuple(map(Leak.read, root.each("controls"))),
            members=root.integer("members", 0),
            nonmembers=root.integer("nonmembers", 0),
            left_out=root.integer("left_out", 0),
            seed=root.integer("seed"),
            seconds=root.seconds("seconds"),
            warning=root.text("warning"),
        )

    def to_html(self, path: str | Path) -> None:
        from lmdp.report.audit_page import render

        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.verdict}\n{table([*self.layers, *self.controls, *([self.reference] if self.reference else [])])}"


class Row(Protocol):
    """What a table shows of a layer."""

    @property
    def name(self) -> str: ...
    @property
    def auc(self) -> float: ...
    @property
    def interval(self) -> Interval: ...
    @property
    def error_rate(self) -> float: ...
    @property
    def tpr_at_1pct(self) -> float: ...
    @property
    def attack(self) -> str: ...


def table(rows: Sequence[Row]) -> str:
    """Fixed-width text."""
    width = max(12, *(len(row.name) for row in rows))
    lines = [f"{'':{width}}  AUC (95 % interval)      error rate  TPR at 1 % FPR  attack"]
    lines += [
        f"{row.name:{width}}  {row.auc:.3f} ({row.interval[0]:.3f} – {row.interval[1]:.3f})    "
        f"{row.error_rate:.3f}       {row.tpr_at_1pct:.3f}           {row.attack}"
        for row in rows
    ]
    return "\n".join(lines)
