"""What a report tells: the models that were trained, what they cost, what they give away. Any part may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lmdp.report.values import bounds_of, epsilon_text, small

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit, Bound
    from lmdp.risk.profile import RiskProfile


REFUTED = "an attack shows that more epsilon was spent than is claimed"


@dataclass(frozen=True)
class Trained:
    """One trained model.

    `metrics` are the rows of metrics.jsonl (step, epoch, epsilon, test_accuracy, layer_weights, seconds), `privacy` the
    content of privacy.json, None for a model trained without privacy. With `test_examples` the test accuracy is given
    its interval. `limit` is what no attack exceeds at a false positive rate of 1 %, if the epsilon holds, `several` the
    same of 2, 5 … examples of one person at once; `sha256` that of the model's file; `remark` what must be said of its
    weights; `provenance` when (`trained`) and by which `versions` it was trained.
    """

    name: str
    method: str
    metrics: tuple[Mapping[str, Any], ...] = ()
    privacy: Mapping[str, Any] | None = None
    audit: Audit | None = None
    test_examples: int | None = None
    sha256: str = ""
    limit: float | None = None
    remark: str = ""
    several: Mapping[int, float] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Together:
    """What several private models of the same data cost, if all are released, or if one is chosen by comparing them.

    The choice follows from all of them, so that it tells of all, whichever is kept.
    """

    models: tuple[str, ...]
    epsilon: float
    delta: float
    certified: bool

    def __str__(self) -> str:
        *first, last = self.models
        claim = "" if self.certified else ", claimed, NOT certified"
        return (
            f"Releasing all of {', '.join(first)} and {last}, or choosing among them by these results, costs epsilon "
            f"{epsilon_text(self.epsilon)} (delta {small(self.delta)}{claim}): they were trained on the same data."
        )


@dataclass(frozen=True)
class Story:
    """Everything one report shows, and the exact command that made it. `files` are those of its folder, if known.

    A model whose epsilon one of the `bounds` refutes is certified nowhere in it.
    """

    title: str
    command: str
    layers: tuple[str, ...]
    trained: tuple[Trained, ...]
    risk: RiskProfile | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    version: str = ""
    bounds: tuple[Bound, ...] = ()
    together: Together | None = None
    versions: str = ""
    files: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        judged = tuple(_judged(trained, self.bounds) for trained in self.trained)
        object.__setattr__(self, "trained", judged)
        if self.together is not None and any(refuted(trained, self.bounds) for trained in judged):
            object.__setattr__(self, "together", replace(self.together, certified=False))


def refuted(trained: Trained, bounds: Iterable[Bound]) -> bool:
    """Whether an attack shows more epsilon than is claimed of a model."""
    return any(bound.exceeded for bound in bounds_of(trained, bounds))


def _judged(trained: Trained, bounds: Iterable[Bound]) -> Trained:
    if trained.privacy is None or not refuted(trained, bounds):
        return trained
    reasons = dict.fromkeys([*trained.privacy.get("reasons", ()), REFUTED])
    return replace(trained, privacy={**trained.privacy, "certified": False, "reasons": list(reasons)})
