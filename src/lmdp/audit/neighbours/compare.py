"""From the records of neighbouring runs to findings: every rule of the neighbour check, each in one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmdp.accounting import Mechanism
from lmdp.audit.neighbours.result import Finding, NeighbourReport

if TYPE_CHECKING:
    from lmdp.audit.neighbours.check import Record

NEIGHBOURS = (("with", "without"), ("alone", "empty"))
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
MEETING = 20
"""Rounding in a sum over a batch is this many times that in one example's share."""
LUCK = 1e-7
"""A noise check fails a sound run this rarely."""

Records = Mapping[str, "Record"]


def compare(records: Records, tolerance: float | None) -> NeighbourReport:
    """Every rule, applied to the records of the four runs by their names."""
    leader = records["without"]
    stated = next(r.stated for r in records.values() if r.stated is not None)
    slack = TOLERANCE.get(leader.dtype, 1e-3) if tolerance is None else tolerance
    findings = [
        _movement(records, stated, slack),
        *_statistic(records, slack),
        *_jointly(records, stated, slack),
        _meeting(records, stated, slack, sharp=leader.dtype == torch.float64),
        _noise(records["empty"], stated),
        _same_at_each_step(records, "noise drawn", lambda r: [x.noise_drawn for x in r.releases]),
        _same_at_each_step(records, "layer weights", lambda r: [str(x.weights) for x in r.releases]),
        _same_at_each_step(records, "parameters and state", lambda r: [*(x.state for x in r.releases), r.final_state]),
        _same(records, "number of steps", lambda r: f"{len(r.releases)} released, {r.steps} accounted"),
        _same(records, "errors", lambda r: r.error or "none"),
        _same(records, "printed, logged, warned", lambda r: "\n".join(r.said)),
        _same(records, "returned by train", lambda r: repr(r.returned) if r.error is None else ""),
        _same(records, "saved by the engine", lambda r: r.saved),
    ]
    return NeighbourReport(
        method=stated.method,
        weight_source=stated.weight_source,
        steps=len(leader.releases),
        sensitivity=stated.sensitivity,
        noise_multiplier=stated.noise_multiplier,
        findings=tuple(findings),
    )


def _comparable(*records: Record) -> int:
    """How many steps, from the first, all of these made from the same state."""
    together = zip(*(r.releases for r in records))
    states = [len({release.state for release in step}) == 1 for step in together]
    return states.index(False) if False in states else len(states)


def _pairs(records: Records) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """For both pairs of neighbours and each step: how far the gradient and the statistic moved."""
    for a, b in NEIGHBOURS:
        for t in range(_comparable(records[a], records[b])):
            one, other = records[a].releases[t], records[b].releases[t]
            moved = None
            if one.statistic is not None and other.statistic is not None:
                moved = one.statistic - other.statistic
            yield t, one.gradient - other.gradient, moved


def _movement(records: Records, stated: Mechanism, slack: float) -> Finding:
    unit = stated.expected_batch_size / stated.sensitivity
    lengths = [(_length(gradient) * unit, t) for t, gradient, _ in _pairs(records)]
    return _bounded("gradient", lengths, slack, f"of the sensitivity {stated.sensitivity:g}")


def _statistic(records: Records, slack: float) -> Iterator[Finding]:
    lengths = [(_length(moved), t) for t, _, moved in _pairs(records) if moved is not None]
    if lengths:
        yield _bounded("weight statistic", lengths, slack, "of the sensitivity 1")


def _jointly(records: Records, stated: Mechanism, slack: float) -> Iterator[Finding]:
    """Gradient and statistic, each in units of its own noise: together one Gaussian mechanism of multiplier σ."""
    unit = stated.expected_batch_size / stated.sensitivity
    share = stated.statistic_share
    both = [
        (math.sqrt((1 - share) * (_length(gradient) * unit) ** 2 + share * _length(moved) ** 2), t)
        for t, gradient, moved in _pairs(records)
        if moved is not None
    ]
    if both:
        yield _bounded("gradient and statistic", both, slack, "of what the accountant is told")


def _bounded(name: str, lengths: list[tuple[float, int]], slack: float, unit: str) -> Finding:
    if not lengths:
        return Finding(name, False, None, "no step could be compared: the runs differ before the first release")
    worst, t = max(lengths)
    return Finding(name, worst <= 1 + slack, worst, f"{unit}; most at step {t + 1}")


def _meeting(records: Records, stated: Mechanism, slack: float, sharp: bool) -> Finding:
    """What the outlier did to the contributions of the others, in units of the sensitivity.

    In float32 the outlier's own gradient may come out different alone and in a batch, if it is extreme: its
    contribution can then differ by up to twice the sensitivity without anybody meeting.
    """
    unit = stated.expected_batch_size / stated.sensitivity
    four = [records[name] for name in ("with", "without", "alone", "empty")]
    lengths = []
    for t in range(_comparable(*four)):
        a, b, c, d = (record.releases[t].gradient for record in four)
        lengths.append((_length((a - b) - (c - d)) * unit, t))
    if not lengths:
        return Finding("others' contributions", False, None, "no step could be compared")
    worst, t = max(lengths)
    bound = MEETING * slack if sharp else 2 * (1 + slack)
    roughly = "" if sharp else "; only roughly judged in float32, sharply for a model in float64"
    detail = f"moved by the outlier; most at step {t + 1}{roughly}"
    return Finding("others' contributions", worst <= bound, worst, detail)


def _noise(empty: Record, stated: Mechanism) -> Finding:
    """Empty batches release noise and nothing else: its spread must be as stated, and no two steps alike."""
    name, std = "noise", stated.noise_multiplier * stated.sensitivity / math.sqrt(1 - stated.statistic_share)
    if std == 0 or not empty.releases:
        return Finding(name, False, None, "none is added" if std == 0 else "no empty batch was released")
    z = torch.stack([r.gradient for r in empty.releases]) * stated.expected_batch_size / std
    if not torch.isfinite(z).all():
        return Finding(name, False, math.inf, "not finite")
    low, high = _chi_square_range(z.numel())
    spread = float(z.square().sum())
    again = (z[1:] * z[:-1]).sum(1).abs() / math.sqrt(z.shape[1])
    repeated = bool((again > 6).any()) if z.shape[1] >= 20 else False
    detail = "times the stated spread, in empty batches" + ("; the same noise in two steps" if repeated else "")
    return Finding(name, low <= spread <= high and not repeated, math.sqrt(spread / z.numel()), detail)


def _chi_square_range(count: int) -> tuple[float, float]:
    from scipy.special import chdtri  # here, because importing it takes longer than the check

    return float(chdtri(count, 1 - LUCK / 2)), float(chdtri(count, LUCK / 2))


def _same(records: Records, name: str, view: Callable[[Record], str]) -> Finding:
    seen = {run: view(record) for run, record in records.items()}
    differing = [run for run in seen if seen[run] != seen["without"]]
    if not differing:
        return Finding(name, True, None, "the same in all runs")
    a, b = _first_difference(seen["without"], seen[differing[0]])
    return Finding(name, False, None, f"'without': {a}, '{differing[0]}': {b}")


def _same_at_each_step(records: Records, name: str, view: Callable[[Record], Sequence[object]]) -> Finding:
    lead = view(records["without"])
    for run, record in records.items():
        for t, (mine, its) in enumerate(zip(view(record), lead)):
            if mine != its:
                return Finding(name, False, None, f"differs between 'without' and '{run}' from step {t + 1} on")
    return Finding(name, True, None, "the same in all runs")


def _first_difference(a: str, b: str) -> tuple[str, str]:
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(0, at - 20)
    return repr(a[start : start + 60]), repr(b[start : start + 60])


def _length(vector: Tensor) -> float:
    length = float(torch.linalg.vector_norm(vector))
    return length if math.isfinite(length) else math.inf
