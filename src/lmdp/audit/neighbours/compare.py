"""From the records of neighbouring runs to findings: every rule of the neighbour check, each in one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmdp.accounting import Mechanism
from lmdp.audit.neighbours.result import Finding, NeighbourReport

if TYPE_CHECKING:
    from lmdp.audit.neighbours.run import Record

NEIGHBOURS = (("with", "without"), ("alone", "empty"))
NOTHING_RUN = "empty"
"""In this run no batch has an example. Whether the loop is called at all is then the engine's business, so that nothing
is asked of what the loop did."""


@dataclass(frozen=True)
class Rounding:
    """What rounding may do to a sound training, in units of the sensitivity.

    one      to how far one example moves the sum
    meeting  to what the others contribute, times the root of the expected batch: many roundings, each in one share
    """

    one: float
    meeting: float


ROUNDING = {
    torch.float64: Rounding(1e-6, 4e-5),
    torch.float32: Rounding(1e-3, 5e-3),
    torch.float16: Rounding(2e-2, 3e-2),
    torch.bfloat16: Rounding(5e-2, 6e-2),
}
LUCK = 1e-7
"""A noise check fails a sound run this rarely."""

Records = Mapping[str, "Record"]


def compare(
    records: Records, tolerance: float | None, *, mild: bool = False, bare: Records | None = None
) -> NeighbourReport:
    """Every rule, applied to the records of the runs by their names.

    mild  whether the example is one that rounding does not carry away: then single precision is judged sharply too
    bare  runs without clipping and noise, if there are any
    """
    leader = records["without"]
    stated = next(r.stated for r in records.values() if r.stated is not None)
    dtype = max(leader.precisions & set(ROUNDING), key=lambda dtype: ROUNDING[dtype].one, default=torch.float32)
    rounding = ROUNDING[dtype]
    slack = (rounding.one if tolerance is None else tolerance) + _grain(leader, stated)
    sharp = mild or dtype == torch.float64
    shared = rounding.meeting * math.sqrt(stated.expected_batch_size) * slack / rounding.one
    bound = shared if sharp else 2 * (1 + slack)
    looped = {name: record for name, record in records.items() if name != NOTHING_RUN}
    findings = [
        _movement(records, stated, slack),
        *_statistic(records, slack),
        *_jointly(records, stated, slack),
        _meeting(records, stated, bound, dtype, sharp),
        *(() if bare is None else (_unclipped(bare, shared),)),
        _undrawn(records, stated, slack),
        _noise(records["empty"], stated),
        _same_at_each_step(records, "noise drawn", lambda r: [x.noise_drawn for x in r.releases]),
        _same_at_each_step(records, "layer weights", lambda r: [str(x.weights) for x in r.releases]),
        _same_at_each_step(looped, "parameters and state", lambda r: [*(x.state for x in r.releases), r.final_state]),
        _same(records, "number of steps", lambda r: f"{len(r.releases)} released, {r.steps} accounted"),
        _same(records, "errors", lambda r: r.error or "none"),
        _same(looped, "printed, logged, warned", lambda r: "\n".join(r.said)),
        _same(looped, "returned by train", lambda r: repr(r.returned) if r.error is None else ""),
        _same(records, "saved by the engine", lambda r: r.saved),
    ]
    return NeighbourReport(
        method=stated.method,
        weight_source=stated.weight_source,
        steps=len(leader.releases),
        sensitivity=stated.sensitivity,
        noise_multiplier=stated.noise_multiplier,
        findings=tuple(findings),
        chance_shared=_same_chance(looped),
    )


def _same_chance(records: Records) -> bool:
    """Whether all runs drew the same random numbers besides those of the engine."""
    together = zip(*(r.releases for r in records.values()))
    return all(len({release.chance for release in step}) == 1 for step in together)


def _grain(record: Record, stated: Mechanism) -> float:
    """How far rounding to the public grid may move a release, a step in every number, in units of the sensitivity."""
    if not record.releases:
        return 0.0
    gradient, statistic = record.releases[0].gradient, record.releases[0].statistic
    grains = [math.sqrt(gradient.numel()) * stated.gradient_grid.step / stated.sensitivity]
    if statistic is not None:
        grains.append(math.sqrt(statistic.numel()) * stated.statistic_grid.step)
    return max(grains)


def _comparable(*records: Record) -> int:
    """How many steps, from the first, all of these made from the same state. Noise alone has none."""
    together = zip(*(r.releases for r in records))
    looped = [i for i, record in enumerate(records) if record.name != NOTHING_RUN]
    states = [len({step[i].state for i in looped}) == 1 for step in together]
    return states.index(False) if False in states else len(states)


def _pairs(records: Records, *pairs: tuple[str, str]) -> Iterator[tuple[int, float, float | None]]:
    """For the pairs of neighbours and each step: how far the gradient and the statistic moved."""
    for a, b in pairs or NEIGHBOURS:
        for t in range(_comparable(records[a], records[b])):
            one, other = records[a].releases[t], records[b].releases[t]
            moved = None
            if one.statistic is not None and other.statistic is not None:
                moved = _distance(one.statistic, other.statistic)
            yield t, _distance(one.gradient, other.gradient), moved


def _movement(records: Records, stated: Mechanism, slack: float) -> Finding:
    unit = stated.expected_batch_size / stated.sensitivity
    lengths = [(gradient * unit, t) for t, gradient, _ in _pairs(records)]
    return _bounded("gradient", lengths, slack, f"of the sensitivity {stated.sensitivity:g}")


def _statistic(records: Records, slack: float) -> Iterator[Finding]:
    lengths = [(moved, t) for t, _, moved in _pairs(records) if moved is not None]
    if lengths:
        yield _bounded("weight statistic", lengths, slack, "of the sensitivity 1")


def _jointly(records: Records, stated: Mechanism, slack: float) -> Iterator[Finding]:
    """Gradient and statistic, each in units of its own noise: together one Gaussian mechanism of multiplier σ."""
    unit = stated.expected_batch_size / stated.sensitivity
    share = stated.statistic_share
    both = [
        (math.sqrt((1 - share) * (gradient * unit) ** 2 + share * moved**2), t)
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


def _meeting(records: Records, stated: Mechanism, bound: float, dtype: torch.dtype, sharp: bool) -> Finding:
    """What the outlier did to the contributions of the others, in units of the sensitivity.

    Below double precision the outlier's own gradient may come out different alone and in a batch, if it is extreme: its
    contribution can then differ by up to twice the sensitivity without anybody meeting, and the bound is that.
    """
    unit = stated.expected_batch_size / stated.sensitivity
    four = [records[name] for name in ("with", "without", "alone", "empty")]
    lengths = []
    for t in range(_comparable(*four)):
        a, b, c, d = (record.releases[t].gradient for record in four)
        alike = a.shape == b.shape == c.shape == d.shape
        lengths.append((_length((a - b) - (c - d)) * unit if alike else math.inf, t))
    if not lengths:
        return Finding("others' contributions", False, None, "no step could be compared")
    worst, t = max(lengths)
    kind = str(dtype).removeprefix("torch.")
    roughly = "" if sharp else f"; only roughly judged in {kind}, sharply for a model in float64"
    return Finding(
        "others' contributions",
        worst <= bound,
        worst,
        f"of the sensitivity; most at step {t + 1}{roughly}",
    )


def _unclipped(records: Records, bound: float) -> Finding:
    """What the outlier did to the sum of the others' gradients before clipping, in units of the larger part of it.

    Where all examples are clipped, one that scales the gradients of all others is not seen, and still is there.
    """
    name, three = "others' gradients", [records[name] for name in ("with", "without", "alone")]
    shares = []
    for t in range(_comparable(*three)):
        a, b, c = (record.releases[t].gradient for record in three)
        size = max(_length(b), _length(c)) if a.shape == b.shape == c.shape else math.nan
        if 0 < size < math.inf:  # a training without clipping may go anywhere after its first step
            shares.append((_length(a - b - c) / size, t))
    if not shares:
        return Finding(name, False, None, "no step could be compared")
    worst, t = max(shares)
    return Finding(name, worst <= bound, worst, f"of their sum before clipping; most at step {t + 1}")


def _undrawn(records: Records, stated: Mechanism, slack: float) -> Finding:
    """An example that is in the data and in no batch must not be seen at all."""
    unit, name = stated.expected_batch_size / stated.sensitivity, "example not drawn"
    lengths = [(gradient * unit, t) for t, gradient, _ in _pairs(records, ("aside", "without"))]
    if not lengths:
        return Finding(name, False, None, "no step could be compared: the runs differ before the first release")
    worst, t = max(lengths)
    return Finding(name, worst <= slack, worst, f"of the sensitivity; most at step {t + 1}")


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


def _distance(a: Tensor, b: Tensor) -> float:
    """Infinite between things of different shape."""
    return _length(a - b) if a.shape == b.shape else math.inf


def _length(vector: Tensor) -> float:
    length = float(torch.linalg.vector_norm(vector))
    return length if math.isfinite(length) else math.inf
