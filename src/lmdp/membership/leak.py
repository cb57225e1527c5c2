"""How well one kind of evidence gives membership away: the value that risk profiles and audits are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from lmdp.data.records import MAY_BE_MISSING, Must, Share, at_least, one_of
from lmdp.membership.metrics import Fold, Interval, Metrics, roc

Curve = Annotated[
    tuple[tuple[Share, ...], tuple[Share, ...]],
    Must("two lists of the same length", lambda curve: len(curve[0]) == len(curve[1])),
]
"""The ROC: false positive rates, and the true positive rate at each."""

BY, POOLINGS = ("module", "block", "custom"), ("mean", "cls", "last")
"""Those of `lmdp.layers`, which needs torch; a test holds the two together."""
By = Annotated[str, one_of(*BY), MAY_BE_MISSING]
"""How layers are grouped."""
Pooling = Annotated[str, one_of(*POOLINGS)]
"""What was kept of a sequence."""


References = Annotated[int, at_least(0), MAY_BE_MISSING]
"""How many other models an example's scores were judged by."""


def without_usual(content: dict[str, Any]) -> dict[str, Any]:
    """Files say how layers were grouped, pooled and judged only where earlier versions would not have done it so."""
    usual: dict[str, Any] = {"by": BY[0], "pooling": None, "references": 0, "together": []}
    return {key: value for key, value in content.items() if key not in usual or value != usual[key]}


@dataclass(frozen=True)
class Leak:
    """How well one kind of evidence (a layer, the raw input, the model's output) gives membership away.

    `interval` is the 95 % interval of the AUC. `error_rate` is 1 − `accuracy`, balanced over members and non-members.
    """

    name: str
    accuracy: Share
    accuracy_interval: Interval
    error_rate: Share
    error_rate_interval: Interval
    auc: Share
    interval: Interval
    auc_error: Share
    tpr_at_1pct: Share
    tpr_at_1pct_interval: Interval
    tpr_at_01pct: Share | None
    attack: str
    roc: Curve = field(repr=False, default=((), ()))

    @property
    def fires(self) -> bool:
        """For a control: whether it lies above chance beyond doubt (one in two thousand by luck)."""
        return self.auc - 3.29 * self.auc_error > 0.5


Together = Annotated[tuple[Leak, ...], MAY_BE_MISSING]
"""What all layers give away together, and in a white box."""


def leak_of(name: str, metrics: Metrics, attack: str, folds: Sequence[Fold]) -> Leak:
    """What this attack achieved, with the ROC of its folds."""
    fpr, tpr = roc(folds)
    return Leak(
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
        roc=(tuple(fpr), tuple(tpr)),
    )


def table(leaks: Sequence[Leak]) -> str:
    """Fixed-width text."""
    width = max(12, *(len(leak.name) for leak in leaks))
    lines = [f"{'':{width}}  AUC (95 % interval)      error rate  TPR at 1 % FPR  attack"]
    lines += [
        f"{leak.name:{width}}  {leak.auc:.3f} ({leak.interval[0]:.3f} – {leak.interval[1]:.3f})    "
        f"{leak.error_rate:.3f}       {leak.tpr_at_1pct:.3f}           {leak.attack}"
        for leak in leaks
    ]
    return "\n".join(lines)
