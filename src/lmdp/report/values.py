"""What the report reads out of a story, with doubt kept: values that may be missing, not finite, or uncertain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmdp.membership.metrics import around

if TYPE_CHECKING:
    from lmdp.membership.leak import Leak
    from lmdp.report.drawn import Audit, Bound, CanaryLeaks
    from lmdp.report.story import Trained

CERTIFIED, CLAIMED = "certified", "claimed, NOT certified"
STATES = HOLDS, VIOLATED, NOT_ESTABLISHED = "holds", "violated", "not established"
LITTLE = 0.9
"""Above this share of members that may be recognised, a promise is said to limit little."""
UNJUDGED = "written before assumptions were judged one by one"


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, or without one where none is known."""

    value: float
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" [{between(self.interval)}]" if self.interval else "")

    def below(self, other: Estimate) -> bool:
        """Whether the whole interval lies below the other's. Without intervals nothing is known to lie below."""
        return bool(self.interval and other.interval and self.interval[1] < other.interval[0])


def between(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f}–{interval[1]:.3f}"


def finite(value: object) -> float | None:
    """The number, if it is one that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e15 else None


def wilson(share: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share of `total` examples (Wilson)."""
    from scipy.stats import binomtest  # here, because importing it takes longer than a page

    low, high = binomtest(round(share * total), total).proportion_ci(0.95, "wilson")
    return float(low), float(high)


def share(value: float, total: int | None) -> Estimate:
    """A test accuracy, with its interval where the number of test examples is known."""
    return Estimate(value, wilson(value, total) if total and total > 0 and 0 <= value <= 1 else None)


def over_steps(trained: Trained, key: str) -> list[tuple[float, float]]:
    """(step, value) in order, without rows that lack either."""
    pairs = ((finite(row.get("step")), finite(row.get(key))) for row in trained.metrics)
    return sorted((step, value) for step, value in pairs if step is not None and value is not None and step >= 0)


def weights_over_steps(trained: Trained) -> list[tuple[float, list[float | None]]]:
    """(step, weight of each layer) in order."""
    rows = []
    for row in trained.metrics:
        step, weights = finite(row.get("step")), row.get("layer_weights")
        if step is not None and step >= 0 and isinstance(weights, list | tuple):
            values = [finite(weight) for weight in weights]
            if any(value is not None for value in values):
                rows.append((step, values))
    return sorted(rows, key=lambda row: row[0])


def accuracy(trained: Trained) -> Estimate | None:
    """The last test accuracy that was measured."""
    seen = over_steps(trained, "test_accuracy")
    return share(seen[-1][1], trained.test_examples) if seen else None


def epsilon(privacy: Mapping[str, Any] | None) -> float | None:
    """The epsilon of a privacy statement: infinity where it says "inf", None where there is none."""
    if privacy is None:
        return None
    said = privacy.get("epsilon")
    return math.inf if said in ("inf", math.inf) else finite(said)


def epsilon_text(value: float | None) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """Rounded up: a promise may not become smaller by being told."""
    rounded = math.ceil(1000 * share - 1e-9) / 10
    return f"{rounded:.1f}\u00a0%" if rounded < 10 else f"{math.ceil(rounded)}\u00a0%"


def small(value: float | None) -> str:
    """A delta, as people write it: 1e-5."""
    return "–" if value is None else f"{value:.3g}".replace("e-0", "e-")


@dataclass(frozen=True)
class Assumed:
    """One assumption of the proof: what is known of it, and how."""

    sentence: str
    state: str
    how: str

    @property
    def holds(self) -> bool:
        return self.state == HOLDS


def assumed(privacy: Mapping[str, Any]) -> list[Assumed]:
    """What a privacy statement says of its assumptions; of one that says nothing, nothing is established.

    In sentences where the statement brings its `table` (assumption, state, how), else by the names in `verdicts`.
    """
    rows: list[Any] = []
    if isinstance(table := privacy.get("table"), list | tuple):
        rows = [row for row in table if isinstance(row, list | tuple) and len(row) == 3]
    elif isinstance(verdicts := privacy.get("verdicts"), Mapping):
        judged = ((key, value if isinstance(value, Mapping) else {}) for key, value in verdicts.items())
        rows = [(key, value.get("state"), value.get("how", "the statement does not say how")) for key, value in judged]
    if not rows:
        return [Assumed("what the proof assumes", NOT_ESTABLISHED, UNJUDGED)]
    return [Assumed(str(a), str(state) if state in STATES else NOT_ESTABLISHED, str(how)) for a, state, how in rows]


def bounds_of(trained: Trained, bounds: Iterable[Bound]) -> list[Bound]:
    """What attacks show of a private model's epsilon: by canaries in it, and in trainings of the same method."""
    if trained.privacy is None:
        return []
    planted = None if trained.audit is None else trained.audit.canaries
    mine = [] if planted is None or planted.bound is None else [planted.bound]
    alike = (bound for bound in bounds if bound.training.partition(",")[0] == trained.method)
    return [*mine, *(bound for bound in alike if bound not in mine)]


def is_certified(privacy: Mapping[str, Any]) -> bool:
    """Only if the statement says so, gives no reason against it, and every assumption holds."""
    said = privacy.get("certified") is True and not privacy.get("reasons")
    return said and all(row.holds for row in assumed(privacy))


def standing(privacy: Mapping[str, Any]) -> str:
    return CERTIFIED if is_certified(privacy) else CLAIMED


def shown_names(names: Iterable[str], by: str) -> dict[str, str]:
    """Name of a layer → what a chart calls it: "block 3" for encoder.layer.3, the name itself for all else.

    Where there are several lists of blocks, each is told by the first word in which their names differ.
    """
    names = list(dict.fromkeys(names))
    split = [name.split(".") for name in names]
    numbered = {tuple(parts[:-1]) for parts in split if by == "block" and parts[-1].isdecimal()}
    differ = next((i for i, words in enumerate(zip(*numbered)) if len(set(words)) > 1), None)
    labels = {}
    for name, parts in zip(names, split):
        inside = tuple(parts[:-1])
        which = "" if len(numbered) < 2 else inside[differ] if differ is not None else ".".join(inside)
        labels[name] = f"{which} block {parts[-1]}".strip() if inside in numbered and parts[-1].isdecimal() else name
    return labels if len(set(labels.values())) == len(names) else {name: name for name in names}


def peak(audit: Audit) -> Estimate:
    return Estimate(audit.peak.auc, audit.peak.interval)


def peak_leak(audit: Audit) -> Leak | None:
    """The entry of the leakiest layer."""
    return next((leak for leak in audit.layers if leak.name == audit.peak.name), None)


def at_peak(leak: Leak, audit: Audit) -> Leak:
    """A layer as everything shows it: the leakiest with the interval that allows for having looked at all of them."""
    return replace(leak, interval=audit.peak.interval) if leak.name == audit.peak.name else leak


def at_output(audit: Audit | CanaryLeaks) -> Leak | None:
    """The model's own output, which its users see, with an interval that allows for having looked at all layers."""
    if (leak := audit.reference) is None:
        return None
    return replace(leak, interval=around(leak.auc, leak.auc_error, 0.95 ** (1 / (len(audit.layers) + 1))))


def found_in_output(audit: Audit) -> bool:
    """Whether the model's own output gives members away measurably."""
    leak = at_output(audit)
    return leak is not None and leak.interval[0] > 0.5


def beyond_layers(audit: Audit) -> list[tuple[str, Leak]]:
    """What was measured beside the layers, with its role."""
    output = at_output(audit)
    reference = [("reference", output)] if output is not None else []
    return [*reference, *(("control", control) for control in audit.controls)]
