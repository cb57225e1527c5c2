"""Numbers about private gradients, for debugging and for reproducing figures. NOT PRIVATE: no noise is added.

Off unless asked for. Publishing any of them voids the guarantee that the privacy statement makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

LABEL = "not private: computed from private gradients without noise; publishing it voids the guarantee"


class Unnoised(Protocol):
    """The sums of clipped and of raw gradients of a batch, how many examples it had, and how many were left out."""

    clipped: dict[str, Tensor]
    raw: dict[str, Tensor]
    examples: int
    nonfinite: int


@dataclass(frozen=True)
class StepRecord:
    """One step. `bias_norm` is ||mean clipped − mean raw gradient||; `weights` are those that were applied."""

    bias_norm: float
    clip_fraction: float
    weights: tuple[float, ...] | None
    mean_norms: tuple[float, ...]
    examples: int
    nonfinite_examples: int
    raw_loss: float | None = None

    @classmethod
    def of(
        cls,
        norms: Tensor,
        sums: Unnoised,
        weights: Mapping[str, float],
        *,
        clip_norm: float,
        w: tuple[float, ...] | None,
    ) -> StepRecord:
        """From norms [B, L], sums of gradients, and the weight that each parameter's sum has."""
        off = (sums.clipped[name] * weights[name] - raw for name, raw in sums.raw.items())
        squared = sum(float(each.double().square().sum()) for each in off)
        return cls(
            bias_norm=math.sqrt(squared) / max(1, sums.examples),
            clip_fraction=float((norms.norm(dim=1) > clip_norm).double().mean()) if len(norms) else 0.0,
            weights=w,
            mean_norms=tuple(norms.mean(0).tolist()) if len(norms) else (),
            examples=sums.examples,
            nonfinite_examples=sums.nonfinite,
        )


@dataclass
class Diagnostics:
    """The records of all steps so far."""

    label: str = LABEL
    steps: list[StepRecord] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list, repr=False)

    def record_loss(self, loss: Tensor | float) -> None:
        """Keep the raw loss of the coming step (the mean over its parts, if it has several)."""
        self._losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def add(self, record: StepRecord) -> None:
        losses, self._losses = self._losses, []
        self.steps.append(replace(record, raw_loss=sum(losses) / len(losses) if losses else None))

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, "steps": [vars(record) for record in self.steps]}
