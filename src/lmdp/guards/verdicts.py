"""What the proof of a run's epsilon assumes, and what is known of each assumption: a table of three states.

    holds            with how that was established
    violated         with what was seen; such a step is refused where that is possible
    not established  with why: no look was possible, or it was switched off

An epsilon is certified only where all hold. What was once seen of a run stays on its statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

HOLDS, VIOLATED, NOT_ESTABLISHED = "holds", "violated", "not established"

ASSUMPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "model": "examples do not influence each other in the model",
        "loss": "examples do not influence each other in the loss",
        "rows": "the rows of a batch are its examples",
        "content": "nothing without noise is trained or saved",
        "sampling": "every drawn batch is stepped, once, as drawn",
        "process": "one process trains, or a known group",
        "numbers": "sums and noise are exact enough, and the noise is secret",
        "weights": "layer weights are fixed before the batch is seen",
        "account": "what the weights it began with had cost is in epsilon; what is taken as public is public",
    }
)
"""Key → sentence, in the order in which they are shown."""

BEFORE_VERDICTS = "written by a version that did not judge its assumptions one by one"
NOTHING_RELEASED = "nothing has been released yet"


@dataclass(frozen=True, eq=False)
class Verdict:
    """Of one assumption; equal to the word for its state.

    `how` (or `why`, which is the same) says how it was established, what was seen against it, or why nothing can be
    said.
    """

    state: str
    how: str

    def __post_init__(self) -> None:
        if self.state not in (HOLDS, VIOLATED, NOT_ESTABLISHED):
            raise ValueError(f"state is {self.state!r}; it must be {HOLDS!r}, {VIOLATED!r} or {NOT_ESTABLISHED!r}")

    @property
    def why(self) -> str:
        return self.how

    @property
    def holds(self) -> bool:
        return self.state == HOLDS

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.state == other
        return isinstance(other, Verdict) and (self.state, self.how) == (other.state, other.how)

    def __hash__(self) -> int:
        return hash(self.state)

    def __str__(self) -> str:
        return self.state


@dataclass
class Judgement:
    """What has been said against the assumptions of one run so far; nothing is ever taken back."""

    violations: dict[str, list[str]] = field(default_factory=dict)
    doubts: dict[str, list[str]] = field(default_factory=dict)

    def violated(self, key: str, why: str) -> None:
        self._say(self.violations, key, why)

    def doubted(self, key: str, why: str) -> None:
        self._say(self.doubts, key, why)

    def _say(self, said: dict[str, list[str]], key: str, why: str) -> None:
        if key not in ASSUMPTIONS:
            raise KeyError(f"no assumption {key!r}; there are {', '.join(ASSUMPTIONS)}")
        if why not in said.setdefault(key, []):
            said[key].append(why)

    def verdicts(self, established: Mapping[str, Verdict]) -> dict[str, Verdict]:
        """Of every assumption: what was said against it, else what is known of it now, else nothing."""
        now = {}
        for key in ASSUMPTIONS:
            present = established.get(key, Verdict(NOT_ESTABLISHED, "nothing was looked at"))
            violations = [*self.violations.get(key, ()), *([present.how] if present.state == VIOLATED else ())]
            doubts = [*self.doubts.get(key, ()), *([present.how] if present.state == NOT_ESTABLISHED else ())]
            if violations:
                now[key] = Verdict(VIOLATED, _joined(violations))
            elif doubts:
                now[key] = Verdict(NOT_ESTABLISHED, _joined(doubts))
            else:
                now[key] = present
        return now

    def note_setup(self, *, refuted: str, poisson: bool, noise: float, seed: int | None, observed: bool) -> None:
        """What follows from how a training was set up. `refuted`: why the layer weights are not private, if so."""
        if refuted:
            self.violated("weights", refuted)
        if not poisson:
            self.violated(
                "sampling",
                "batches are not Poisson-sampled (poisson_sampling=False): the epsilon assumes that they are",
            )
        if noise == 0:
            self.violated("numbers", "no noise is added (noise_multiplier=0)")
        if seed is not None:
            self.violated("numbers", f"the seed is fixed ({seed}): whoever knows it can subtract the noise")
        if observed:
            self.violated("numbers", "an observer may have replaced what was drawn or released")

    def state(self) -> dict[str, dict[str, list[str]]]:
        """For a saved run."""
        return {VIOLATED: dict(self.violations), NOT_ESTABLISHED: dict(self.doubts)}

    def inherit(self, state: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """What was said of the run that this one goes on from."""
        for kind, say in ((VIOLATED, self.violated), (NOT_ESTABLISHED, self.doubted)):
            for key, reasons in state.get(kind, {}).items():
                for why in reasons:
                    say(key, str(why))


def _joined(reasons: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))


def unjudged(why: str = BEFORE_VERDICTS) -> dict[str, Verdict]:
    """Every assumption not established, for the same reason."""
    return dict.fromkeys(ASSUMPTIONS, Verdict(NOT_ESTABLISHED, why))
