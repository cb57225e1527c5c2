"""The result of an audit: plain values, one entry per layer, that can be saved, drawn and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lmdp.audit.epsilon import EpsilonBound
from lmdp.data.records import MAY_BE_MISSING, Amount, Count, Share, at_least, decoded, encoded, read_object
from lmdp.membership.leak import By, Leak, Pooling, References, Together, table, without_usual
from lmdp.membership.metrics import Interval
from lmdp.report.audit_page import render
from lmdp.report.values import at_output

FORMAT = 1
NO_CANARIES = (
    "What the most vulnerable give away was not measured: plant canaries when you train (--canaries 500, "
    "lmdp.plant_canaries)."
)
NO_PROOF = "An audit that finds nothing is no proof."
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

    @property
    def leaks(self) -> bool:
        """Whether it lies above chance, however many layers were looked at."""
        return self.interval[0] > 0.5

    def __str__(self) -> str:
        low, high = self.interval
        looked = f", corrected for {self.layers_looked_at} layers" if self.layers_looked_at > 1 else ""
        return f"AUC {self.auc:.3f} (95 % interval {low:.3f} to {high:.3f}{looked})"


@dataclass(frozen=True)
class CanaryLeaks:
    """What the layers give away about canaries: those that were in the training against those that were not.

    Coins decided which, so no difference between the groups needs a control. `bound` is how much epsilon the training
    spent at least, by the model's loss on each canary; None where no statement was given.
    """

    kind: str
    layers: tuple[Leak, ...]
    peak: Peak
    reference: Leak | None
    inside: Count
    outside: Count
    bound: EpsilonBound | None = None
    one_sided: Annotated[str, MAY_BE_MISSING] = ""

    @property
    def sentences(self) -> list[str]:
        """What they show, a claim that they refute before all else."""
        who = f"{self.inside + self.outside} canaries ({self.kind})"
        top = next((leak for leak in self.layers if leak.name == self.peak.name), None)
        certain = "" if top is None else f", TPR {top.tpr_at_1pct:.3f} at 1 % FPR"
        said = [self.bound.verdict] if self.bound is not None and self.bound.exceeded else []
        if self.one_sided:
            said.append(self.one_sided)
        elif self.peak.leaks:
            said.append(
                f"The most vulnerable examples, {who}: layer '{self.peak.name}' gives them away, {self.peak}{certain}."
            )
        else:
            said.append(
                f"The most vulnerable examples, {who}: no layer gives them away measurably, the highest is {self.peak}."
            )
        return said

    def __str__(self) -> str:
        rows = table([*_shown(self.layers, self.peak), *([output] if (output := at_output(self)) else [])])
        return "\n".join(["canaries", rows, *([] if self.bound is None else [self.bound.verdict])])


@dataclass(frozen=True)
class AuditReport:
    """What the representations of a model reveal about membership, layer by layer, beside the controls.

    `notes` say what the audit could not see; `one_sided` that only one of the groups has values that are not finite.
    """

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
    by: By = "module"
    pooling: Pooling | None = None
    tpr_limit_at_1pct: Share | None = None
    """What no attack exceeds at a false positive rate of 1 %, if the epsilon holds; None where no epsilon is known."""
    notes: Annotated[tuple[str, ...], MAY_BE_MISSING] = ()
    one_sided: Annotated[str, MAY_BE_MISSING] = ""
    references: References = 0
    canaries: CanaryLeaks | None = None
    together: Together = ()
    sha256: Annotated[str, MAY_BE_MISSING] = ""
    """Of the file of the model that was attacked, where it was one."""

    @property
    def verdict(self) -> str:
        """The most vulnerable first, then ordinary examples; nothing that the intervals do not support."""
        if self.one_sided:
            return " ".join([self.one_sided, *([] if self.canaries is None else self.canaries.sentences)])
        peaks = [self.peak] if self.canaries is None else [self.peak, self.canaries.peak]
        silent = any(not peak.leaks for peak in peaks) or any(control.fires for control in self.controls)
        sentences = [
            *(["Only ordinary examples were tried."] if self.canaries is None else self.canaries.sentences),
            self._ordinary,
            *([NO_CANARIES] if self.canaries is None else []),
            *([NO_PROOF] if silent else []),
        ]
        return " ".join(sentences)

    @property
    def _ordinary(self) -> str:
        of = "" if self.canaries is None else " of ordinary examples"
        shifted = [c for c in self.controls if c.fires]
        if shifted:
            return (
                f"Members and non-members{of} differ before any training is looked at (control '{shifted[0].name}': "
                f"AUC {shifted[0].auc:.3f}): this audit measures that difference, not a leak."
            )
        if self.peak.leaks and not self.controls:
            return (
                f"Layer '{self.peak.name}' tells members{of} from non-members: {self.peak}. Without a control this may "
                "be a difference between the groups, and not a leak."
            )
        if self.peak.leaks:
            return f"Layer '{self.peak.name}' gives membership{of} away: {self.peak}."
        return f"No layer gives membership{of} away measurably: the highest is {self.peak}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        optional = ("notes", "one_sided", "tpr_limit_at_1pct", "canaries", "sha256")
        content = {k: v for k, v in encoded(self).items() if k not in optional or v not in (None, "", [])}
        if self.canaries is not None and self.canaries.bound is not None:
            content["canaries"]["bound"] = self.canaries.bound.to_dict()
        return {**without_usual(content), "verdict": self.verdict}

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> AuditReport:
        """Read a saved audit; a file that is not one is refused with the field that is wrong."""
        report = decoded(cls, read_object(path, "an audit"), str(path), version=FORMAT)
        if not report.layers or (report.canaries is not None and not report.canaries.layers):
            raise ValueError(f"{path}: layers is empty; an audit has at least 1 layer")
        return report

    def to_html(self, path: str | Path) -> None:
        """One page that opens offline, in the style and with the charts of a whole report."""
        Path(path).write_text(render(self), encoding="utf-8")

    def __str__(self) -> str:
        answer = [output] if (output := at_output(self)) else []
        rows = table([*_shown(self.layers, self.peak), *self.together, *self.controls, *answer])
        limit = [] if self.tpr_limit_at_1pct is None else [_permitted(self.tpr_limit_at_1pct)]
        planted = [] if self.canaries is None else ["", str(self.canaries), "", "ordinary examples"]
        return "\n".join([self.verdict, *planted, rows, *limit, *self.notes])


def _shown(layers: Sequence[Leak], peak: Peak) -> list[Leak]:
    """The leakiest has the interval that its sentence has: it allows for having looked at all layers."""
    return [replace(leak, interval=peak.interval) if leak.name == peak.name else leak for leak in layers]


def _permitted(limit: float) -> str:
    rounded = math.ceil(1000 * limit - 1e-9) / 1000  # up: a promise may not become smaller by being told
    return f"The claimed epsilon permits a TPR of at most {rounded:.3f} at 1 % FPR, to any attack."
