"""The result of a neighbour check: one finding for each kind of thing that leaves a private training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmdp.data.records import encoded

MEANING = (
    "a test on one pair of neighbours, not a proof; it was computed from the examples it was given, without privacy"
)


@dataclass(frozen=True)
class Finding:
    """One released quantity. `movement` is what one example moved, in units of what is allowed; None: yes or no."""

    name: str
    passed: bool
    movement: float | None
    detail: str

    def __str__(self) -> str:
        moved = "" if self.movement is None else f"{self.movement:.4g}"
        return f"  {'ok  ' if self.passed else 'FAIL'} {self.name:<26} {moved:>9}  {self.detail}"


@dataclass(frozen=True)
class NeighbourReport:
    """What one example changed in all that a training gave out. `passed` only if every finding is."""

    method: str
    weight_source: str
    steps: int
    sensitivity: float
    noise_multiplier: float
    findings: tuple[Finding, ...]
    meaning: str = MEANING

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of what escaped."""
        return tuple(finding.name for finding in self.findings if not finding.passed)

    def __getitem__(self, name: str) -> Finding:
        by_name = {finding.name: finding for finding in self.findings}
        if name not in by_name:
            raise KeyError(f"no finding {name!r}; there are {', '.join(by_name)}")
        return by_name[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
        return {**encoded(self), "passed": self.passed}

    def __str__(self) -> str:
        verdict = "bounded as stated" if self.passed else f"NOT bounded as stated: {', '.join(self.failures)}"
        head = f"one example, {self.steps} steps of {self.method} (weights: {self.weight_source}): {verdict}"
        return "\n".join([head, *(str(finding) for finding in self.findings), f"  ({self.meaning})"])
