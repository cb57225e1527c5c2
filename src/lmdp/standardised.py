"""Convolutions whose weights are standardised, filter by filter, whenever they are used.

With c = w − mean(w) of the K weights w of one filter, the filter that convolves is ŵ = s·c, s = (||c||² + ε)^(-1/2):
mean zero, length one. So no step, however noisy, makes a filter louder. It is a function of the weights alone and mixes
no examples. A gradient g at ŵ is, at w,

    s · ((g − mean(g)) − ŵ (ŵ·g))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPS = 1e-5


class StandardisedConv2d(nn.Conv2d):
    """A convolution in two dimensions with standardised filters."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(x, standardised(self.weight), self.bias)  # type: ignore[no-untyped-call, unused-ignore]
        return out


def standardised(weight: Tensor) -> Tensor:
    """Filters of mean zero and length one (but for ε), in the same shape."""
    return scales_and_filters(weight)[1].view_as(weight)


def scales_and_filters(weight: Tensor) -> tuple[Tensor, Tensor]:
    """s [out, 1] and ŵ [out, K]."""
    centred = weight.flatten(1)
    centred = centred - centred.mean(1, keepdim=True)
    scale = torch.rsqrt(centred.square().sum(1, keepdim=True) + EPS)
    return scale, centred * scale


def brought_back(filters: Tensor, rows: Tensor) -> Tensor:
    """Gradients [..., *shape] at the filters ŵ [out, K], times their s → at the weights."""
    g = rows.double().reshape(-1, *filters.shape)
    along = (g * filters).sum(2, keepdim=True)
    return (g - g.mean(2, keepdim=True) - filters * along).to(rows.dtype).reshape(rows.shape)
