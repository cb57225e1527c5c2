"""One matrix in, one matrix out: per-example, per-layer gradient norms [B, L] → scales [B, L].

The step is then, for each layer, `sum_i scale_il * gradient_il`. Every method states how far one example can move
that sum (its sensitivity); the engine multiplies the noise by what is stated here, and by nothing else.

All of this runs in float64 on a matrix of a few thousand numbers: it costs nothing and cannot overflow for any
float32 gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STABILISER = 0.01
"""The gamma of Auto-S and DP-PSAC."""


@dataclass(frozen=True)
class Clipping:
    """A clipping method for a model of a given number of layers.

    `scales` bounds every example's contribution by `sensitivity`. A reweighted method does so only once the layer
    weights are applied (`weights`, of norm 1, fixed before the batch is seen): without them it gives the scales of
    U_l = sum_i (C_i / n_il) g_il, and the step is w_l U_l.
    """

    name: str
    clip_norm: float
    reweighted: bool
    sensitivity: float
    _rule: Callable[[Tensor, float], Tensor]

    def scales(self, norms: Tensor, *, weights: Tensor | None = None) -> Tensor:
        n, C, w = norms.double(), self.clip_norm, weights
        scales = self._rule(n, C)
        return scales if w is None else scales * w


def clipping(name: str, *, clip_norm: float, layers: int) -> Clipping:
    """The method of this name. Refuses a name or bound that does not exist."""
    if name not in METHODS:
        raise ValueError(f"method is {name!r}; it must be one of {', '.join(METHODS)}")
    if not (clip_norm > 0 and math.isfinite(clip_norm)):
        raise ValueError(f"max_grad_norm is {clip_norm}; it must be a finite number above 0")
    rule, reweighted, factor = METHODS[name]
    return Clipping(name, clip_norm, reweighted, clip_norm * factor(layers), rule)


def usable(norms: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Norms fit for clipping, and which examples are not: a NaN or infinite example contributes nothing.

    Norms below `floor` count as zero: they come from sums of squares, which lose terms to underflow. An underestimated
    norm would let a method that normalises scale a layer past its bound.
    """
    good = torch.isfinite(norms).all(dim=1)
    kept = torch.where(good[:, None] & (norms >= floor), norms, torch.zeros_like(norms))
    return kept.double(), ~good


def total(norms: Tensor) -> Tensor:
    """Norm of each example's whole gradient, as a column."""
    column: Tensor = torch.linalg.vector_norm(norms, dim=1, keepdim=True)
    return column


def clipped_norm(norms: Tensor, clip_norm: float) -> Tensor:
    """C_i = min(C, ||G_i||), as a column."""
    return total(norms).clamp(max=clip_norm)


def over(numerator: Tensor, norms: Tensor) -> Tensor:
    """numerator / norms, and 0 where the norm is 0: a zero gradient contributes zero."""
    return torch.where(norms > 0, numerator / norms, torch.zeros((), dtype=norms.dtype))


def _dpsgd(n: Tensor, C: float) -> Tensor:
    return (C / total(n)).clamp(max=1.0).expand_as(n)


def _autos(n: Tensor, C: float) -> Tensor:
    return (C / (total(n) + STABILISER)).expand_as(n)


def _psac(n: Tensor, C: float) -> Tensor:
    G = total(n)
    return (C / (G + STABILISER / (G + STABILISER))).expand_as(n)


def _perlayer(n: Tensor, C: float) -> Tensor:
    return _naive_perlayer(n, C / math.sqrt(n.shape[1]))


def _naive_perlayer(n: Tensor, C: float) -> Tensor:
    return (C / n).clamp(max=1.0)


def _lm(n: Tensor, C: float) -> Tensor:
    return over(clipped_norm(n, C), n)


def _one(layers: int) -> float:
    return 1.0


METHODS: dict[str, tuple[Callable[[Tensor, float], Tensor], bool, Callable[[int], float]]] = {
    # name: (scales, reweighted by layer, sensitivity in units of the clip norm as a function of the number of layers)
    "dpsgd": (_dpsgd, False, _one),
    "autos": (_autos, False, _one),
    "psac": (_psac, False, _one),
    "perlayer": (_perlayer, False, _one),
    "naive-perlayer": (_naive_perlayer, False, math.sqrt),
    "lm": (_lm, True, _one),
    "lm-optimal": (_lm, True, _one),
}
