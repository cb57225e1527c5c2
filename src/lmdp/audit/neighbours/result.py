"""The results of neighbour checks: one finding for each kind of thing that leaves a private training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmdp.data.records import encoded

MEANING = (
    "a test on one pair of neighbours, not a proof; it was computed from the examples it was given, without privacy"
)
CHANCE = (
    "the runs drew different random numbers of their own: what the loop or the collation draws for a whole batch "
    "(augmentation, mixup, sampled labels) shifts from one example to the next. Switch it off for the check, or draw "
    "it where the dataset reads an example."
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
    chance_shared: bool = True

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of what escaped."""
        return tuple(finding.name for finding in self.findings if not finding.passed)

    def __contains__(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)

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
        return "\n".join([head, *(str(finding) for finding in self.findings), *_notes([self]), f"  ({self.meaning})"])


@dataclass(frozen=True)
class CheckReport:
    """What each of several examples changed in all that a training gave out: a report for each, by its name."""

    reports: Mapping[str, NeighbourReport]
    runs: int

    @property
    def passed(self) -> bool:
        return all(report.passed for report in self.reports.values())

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of what escaped, for any of the examples."""
        return tuple(dict.fromkeys(name for report in self.reports.values() for name in report.failures))

    @property
    def steps(self) -> int:
        return min(report.steps for report in self.reports.values())

    def __getitem__(self, example: str) -> NeighbourReport:
        if example not in self.reports:
            raise KeyError(f"no example {example!r}; there are {', '.join(self.reports)}")
        return self.reports[example]

    def evidence(self) -> str:
        """One sentence, without a number that depends on data: what was run, and what came of it."""
        examples = f"{len(self.reports)} examples, one at a time ({', '.join(self.reports)})"
        told = "everything that left it was bounded as stated" if self.passed else f"NOT bounded: {self._who_escaped()}"
        ran = f"lmdp.check ran this training {self.runs} times, for {self.steps} steps"
        return f"{ran}, with and without {examples}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        reports = {name: report.to_dict() for name, report in self.reports.items()}
        summary = {"passed": self.passed, "failures": list(self.failures), "evidence": self.evidence()}
        return {**summary, "runs": self.runs, "steps": self.steps, "examples": reports}

    def __str__(self) -> str:
        first = next(iter(self.reports.values()))
        verdict = "bounded as stated" if self.passed else "NOT bounded as stated"
        head = (
            f"{len(self.reports)} examples, one at a time, {self.steps} steps of {first.method} "
            f"(weights: {first.weight_source}), {self.runs} runs: {verdict}"
        )
        names = dict.fromkeys(finding.name for report in self.reports.values() for finding in report.findings)
        rows = [self._row(name) for name in names]
        rows.sort(key=lambda row: row.startswith("  ok"))
        columns = f"       {'what left the training':<26} {'moved':>9}  most by"
        tried = f"  (examples: {', '.join(self.reports)})"
        return "\n".join([head, columns, *rows, *_notes(self.reports.values()), tried, f"  ({first.meaning})"])

    def _row(self, name: str) -> str:
        """The worst of all examples, and which others failed too."""
        of = {example: report[name] for example, report in self.reports.items() if name in report}
        failed = [example for example, finding in of.items() if not finding.passed]
        worst = max(of, key=lambda example: (not of[example].passed, of[example].movement or 0.0))
        finding = of[worst]
        moved = "" if finding.movement is None else f"{finding.movement:.4g}"
        who = worst if failed or finding.movement is not None else "none"
        also = f" (also {', '.join(e for e in failed if e != worst)})" if len(failed) > 1 else ""
        detail = f": {finding.detail}" if failed else ""
        return f"  {'FAIL' if failed else 'ok  '} {name:<26} {moved:>9}  {who}{also}{detail}"

    def _who_escaped(self) -> str:
        by_failure = {
            name: [example for example, report in self.reports.items() if name in report.failures]
            for name in self.failures
        }
        return "; ".join(f"{name} ({', '.join(examples)})" for name, examples in by_failure.items())


def _notes(reports: Any) -> list[str]:
    unshared = any(not report.passed and not report.chance_shared for report in reports)
    return [f"  Note: {CHANCE}"] if unshared else []
