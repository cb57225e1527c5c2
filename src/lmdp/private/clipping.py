"""One matrix in, one matrix out: per-example, per-layer gradient norms [B, L] → scales [B, L].

The step is then, for each layer, `sum_i scale_il * gradient_il`, and for a reweighted method w_l times that.

Guarantee. Whatever the norms and gradients, one example's contribution, and so the distance between the sums of two
batches that differ by adding or removing one example, has norm at most `sensitivity`; an example with a gradient
that is not finite, or with a scale outside of the normal range of the parameters' type, contributes exactly zero.
(A subnormal number has few bits: it may be rounded to twice itself.) For a reweighted method this holds of the
weighted sum, with ||w|| = 1: sum_l (w_l C_i)² = C_i² ≤ C². The engine multiplies the noise by what is stated here, and
by nothing else.

Assumes norms that are not smaller than those of the gradients that are then summed (`gradients/`: formed rules
measure the very numbers they sum; Gram norms are rounded up), and, for reweighted methods, weights that were fixed
before the batch was seen (`weights.py`).

The formulas and their bounds stand in `lmdp.methods`. All of this runs in float64 on a matrix of a few thousand
numbers: it costs nothing and cannot overflow for any float32 gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.gradients.rows import norm_floor
from lmdp.methods import METHODS, Method


@dataclass(frozen=True)
class Clipping:
    """A method for a model of a given number of layers.

    `scales` bounds every example's contribution by `sensitivity`. A reweighted method does so only once the layer
    weights are applied: without them it gives the scales of U_l = sum_i (C_i / n_il) g_il, and the step is w_l U_l.
    """

    method: Method
    clip_norm: float
    sensitivity: float

    @classmethod
    def of(cls, name: str, *, clip_norm: float, layers: int) -> Clipping:
        """The method of this name. Refuses a name or bound that does not exist."""
        private = [method.name for method in METHODS.values() if method.private]
        if name not in private:
            raise ValueError(f"method is {name!r}; it must be one of {', '.join(private)}")
        if not (clip_norm > 0 and math.isfinite(clip_norm)):
            raise ValueError(f"max_grad_norm is {clip_norm}; it must be a finite number above 0")
        return cls(METHODS[name], clip_norm, clip_norm * METHODS[name].sensitivity(layers))

    def scales(self, norms: Tensor, *, weights: Tensor | None = None) -> Tensor:
        assert self.method.scales is not None
        n, C, w = norms.double(), self.clip_norm, weights
        scales = self.method.scales(n, C)
        return scales if w is None else scales * w

    def fitting(self, norms: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales, which `factor` times multiply gradients of this type, and the examples that these do not fit.

        A norm of zero, or one that counts as zero, has the scale 0. No example fits a bound below the floor of norms.
        """
        scales = self.scales(norms).masked_fill(norms == 0, 0.0)
        used, info = scales * factor, torch.finfo(dtype)
        normal = (used >= info.tiny) & (used <= info.max) & (self.clip_norm >= norm_floor(dtype))
        bad = ~(normal | (used == 0)).all(dim=1)
        return scales.masked_fill(bad[:, None], 0.0), bad


def usable(norms: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Norms fit for clipping, and which examples are not: a NaN or infinite example contributes nothing.

    Norms below the floor of the gradients' type, whose squares lose terms to underflow, count as zero, so that a method
    that normalises scales no layer past its bound.
    """
    good = torch.isfinite(norms).all(dim=1)
    kept = torch.where(good[:, None] & (norms >= norm_floor(dtype)), norms, torch.zeros_like(norms))
    return kept.double(), ~good
