"""Layer weights that minimise the bias of a step: mathematics on a few numbers, wherever they are.

With A_l = |u_l|² and B_l = u_l · mean gradient, the bias of w·u is least, over unit vectors w, at

    w_l = B_l / (A_l - λ),    λ ≤ min A,    ||w|| = 1

where the norm of w rises monotonically in λ from 0, so there is one root. In the hard case (B vanishes where A is
smallest) the norm may stay below 1 up to λ = min A; that coordinate then takes what is missing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS, POINTS = 10, 65
"""Of a search by ever finer grids: 41 in the logarithm of μ, by 64 in each round, is below the last bit of a double."""


def bias_optimal(A: Tensor, B: Tensor) -> Tensor:
    """argmin over ||w|| = 1 of sum_l A_l w_l² - 2 B_l w_l, in float64. No number is read, so no device is waited for.

    In terms of μ = min A - λ > 0, w = b / (gap + μ). At μ = 2 ||b|| the norm is at most 1/2, since gap ≥ 0.
    """
    scale = torch.maximum(A.abs().max(), B.abs().max())
    usable = torch.isfinite(scale) & (scale > 0)
    a, b = (torch.where(usable, t / scale, torch.ones_like(t)) for t in (A, B))
    gap, high = a - a.min(), 2 * _norm(b)
    low = high * 1e-18
    easy = (low > 0) & (_norm(b / (gap + low)) >= 1)
    w = torch.where(easy, b / (gap + _root(gap, b, low, high)), _hard_case(gap, b, low))
    return torch.where(usable, w / _norm(w), torch.full_like(A, 1 / math.sqrt(len(A))))


def _root(gap: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The μ between these at which the norm is 1. In log μ: it may lie many orders of magnitude below the upper end."""
    tiny = torch.finfo(gap.dtype).tiny
    ends = low.clamp(min=tiny).log(), high.clamp(min=tiny).log()
    places = torch.linspace(0, 1, POINTS, dtype=gap.dtype, device=gap.device)
    for _ in range(ROUNDS):
        grid = ends[0] + (ends[1] - ends[0]) * places  # [POINTS]
        norms = torch.linalg.vector_norm(b / (gap + grid.exp()[:, None]), dim=1)
        last = ((norms >= 1).sum() - 1).clamp(0, POINTS - 2)  # norms fall along the grid
        ends = grid.gather(0, last[None])[0], grid.gather(0, last[None] + 1)[0]
    return ((ends[0] + ends[1]) / 2).exp()


def _hard_case(gap: Tensor, b: Tensor, mu: Tensor) -> Tensor:
    """Even this close to λ = min A the norm is below 1: the coordinate of smallest A takes what is missing."""
    smallest = torch.arange(len(gap), device=gap.device) == gap.argmin()
    w = (b / (gap + mu.clamp(min=torch.finfo(gap.dtype).tiny))).masked_fill(smallest, 0.0)
    missing = (1 - w.square().sum()).clamp(min=0).sqrt()
    return torch.where(smallest, torch.copysign(missing, b), w)


def _norm(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector)
    return norm
