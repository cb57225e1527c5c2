"""One setting out of several, on the frontier of leakage against accuracy: the same rule for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """A setting, and what it gave with each seed: test accuracy, and AUC on canaries at the leakiest layer."""

    values: tuple[tuple[str, Any], ...]
    accuracies: tuple[float, ...]
    leakages: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def leakage(self) -> float:
        return sum(self.leakages) / len(self.leakages)

    def __getitem__(self, key: str) -> Any:
        return dict(self.values)[key]


def least_leaky(points: Sequence[Point], tolerance: float) -> Point:
    """Of the points within `tolerance` of the highest mean accuracy, the one with the lowest mean leakage."""
    if not points:
        raise ValueError("there is nothing to choose from: no setting was measured")
    highest = max(point.accuracy for point in points)
    near = [point for point in points if point.accuracy >= highest - tolerance]
    return min(near, key=lambda point: (point.leakage, -point.accuracy))


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: at least as accurate, leaking no more, and better in one of the two."""
    return [p for p in points if not any(_beats(other, p) for other in points)]


def _beats(one: Point, other: Point) -> bool:
    no_worse = one.accuracy >= other.accuracy and one.leakage <= other.leakage
    return no_worse and (one.accuracy, one.leakage) != (other.accuracy, other.leakage)
