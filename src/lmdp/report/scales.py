"""From values to coordinates. A scale never leaves its range, so nothing is ever drawn outside the plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Scale(Protocol):
    """Maps a value between `low` and `high` to a coordinate; values beyond are drawn at the edge."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    def __call__(self, value: float) -> float: ...
    def ticks(self) -> list[tuple[float, str]]: ...


@dataclass(frozen=True)
class Linear:
    low: float
    high: float
    start: float
    end: float
    wanted: int = 5

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        step = _step(self.high - self.low, self.wanted)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, _label(i * step, step)) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Log:
    """Powers of ten; `low` is above 0."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [(10.0**i, f"{10.0**i:g}") for i in range(first, last + 1)]


def span(values: Iterable[float], least: float, floor: float = -math.inf, ceiling: float = math.inf) -> Interval:
    """A range around the values with a little air, at least `least` wide, within floor and ceiling."""
    values = list(values) or [0.0]
    low, high = min(values), max(values)
    least = max(least, 1e-6 * abs(low), 1e-6 * abs(high))  # what floating point can tell apart
    air = max(0.06 * (high - low), (least - (high - low)) / 2)
    low, high = max(floor, low - air), min(ceiling, high + air)
    if high - low < least:  # pushed against floor or ceiling: grow the other way
        low, high = (low, low + least) if low == floor else (high - least, high)
    return low, high


Interval = tuple[float, float]


def _step(width: float, wanted: int) -> float:
    rough = width / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(step for step in STEPS if step * power >= rough * (1 - 1e-9))


def _label(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) != round(step * 10**decimals):  # 2.5 needs one more
        decimals += 1
    return f"{value:,.{decimals}f}".replace(",", "\u2009").replace("-", "−")
