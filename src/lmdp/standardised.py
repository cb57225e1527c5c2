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
    return _parts(weight)[1].view_as(weight)


def pulled_back(weight: Tensor, rows: Tensor) -> Tensor:
    """Gradients [B, *shape] at the standardised filters → at the weights."""
    scale, unit = _parts(weight.detach())  # [out, 1], [out, K]
    g = rows.flatten(2)
    along = (g * unit).sum(2, keepdim=True)
    centred = g - g.mean(2, keepdim=True)
    return centred.sub_(unit * along).mul_(scale).view(rows.shape)


def _parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    centred = weight.flatten(1)
    centred = centred - centred.mean(1, keepdim=True)
    scale = torch.rsqrt(centred.square().sum(1, keepdim=True) + EPS)
    return scale, centred * scale
