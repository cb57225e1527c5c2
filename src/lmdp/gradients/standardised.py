"""Convolutions with standardised filters: a convolution's gradients at the filters, brought back to the weights.

Filter f is ŵ = s·c, with c = w − mean(w) of its K weights. A gradient g at ŵ is, at w, P g = s((g − mean g) − ŵ(ŵ·g)):
linear, and the same for all examples. So with J_i the gradient of example i at the filters, each times its s,

    norm²  ||J_i||² − sum_f [(sum_k J_ifk)² / K + (2 − ||ŵ_f||²)(ŵ_f·J_if)²] + ||sum_t G_it||²       (weight, bias)
    sums   sum_i c_i J_i, from which what goes along ŵ and the mean are taken once;  sum_i c_i sum_t G_it

and what is formed for an example is read twice more, but neither changed nor laid out anew. The terms of the norm can
cancel: it is rounded up, by ROUNDED ||J_i||².
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lmdp.gradients import conv
from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.rows import Rows, Stored, joined, zero_rows
from lmdp.standardised import StandardisedConv2d, brought_back, scales_and_filters

ROUNDED = 64.0
"""Units in the last place of ||J_i||², more than sums over the weights of a filter can be off by."""


def piece(use: Use) -> Piece:
    """Formed: no Gram matrix of positions knows what goes along a filter."""
    if "weight" not in use.trainable:
        return conv.piece(use)
    weight = use.module.weight
    assert isinstance(weight, nn.Parameter)
    scale, filters = scales_and_filters(weight.detach())  # [out, 1], [out, K]
    g = use.output_grad
    louder = g * scale.view(-1, *[1] * (g.dim() - 2))
    formed = conv.piece(
        replace(
            use,
            trainable=frozenset({"weight"}),
            output_grads=(louder, *use.output_grads[1:]),
            output_grad=louder,
            prefers_gram=lambda sizes: False,
            forms_again=lambda sizes: False,
        )
    )
    assert isinstance(formed, Stored)
    at_filters = formed.rows["weight"]
    assert isinstance(at_filters, Rows)
    bias = {"bias": Rows.of(g.flatten(2).sum(2))} if "bias" in use.trainable else {}
    return Stored({"weight": BroughtBack.of(at_filters, filters), **bias})


@dataclass(frozen=True)
class BroughtBack:
    """Gradients at the weights, of which those at the filters ŵ [out, K] are kept, times their s."""

    rows: Rows
    filters: Tensor
    squared_norms: Tensor

    @classmethod
    def of(cls, rows: Rows, filters: Tensor) -> BroughtBack:
        return cls(rows, filters, _squared_norms(rows, filters))

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.rows.kept

    def weighted_sums(self, scales: Tensor) -> tuple[Tensor, ...]:
        return tuple(brought_back(self.filters, total) for total in self.rows.weighted_sums(scales))

    def all(self) -> Tensor:
        return brought_back(self.filters, self.rows.all())

    def without(self, dropped: Tensor) -> BroughtBack:
        return replace(self, rows=self.rows.without(dropped), squared_norms=zero_rows(self.squared_norms, dropped))


def _squared_norms(rows: Rows, filters: Tensor) -> Tensor:
    laid = filters.t().contiguous().t()  # as compiled loops leave gradients: filters next to each other
    lengths = 2 - filters.double().square().sum(1)  # [out]
    less = []
    for block in rows.blocks:
        g = rows.restore(block).flatten(2)  # [b, out, K]
        along, means = ((g * laid).sum(2).double(), g.sum(2).double())
        less.append((lengths * along.square() + means.square() / g.shape[2]).sum(1))
    whole = rows.squared_norms.double()
    return (whole - joined(less)).clamp(min=0) + ROUNDED * torch.finfo(filters.dtype).eps * whole


RULE = Rule(
    "standardised convolution",
    (StandardisedConv2d,),
    piece,
    lambda trainable: ("formed", "what goes along a filter is taken from norms and from the sum"),
    (
        Example(lambda: StandardisedConv2d(3, 4, 3, stride=2, padding=1), (3, 6, 5)),
        Example(lambda: StandardisedConv2d(4, 6, 2, groups=2, bias=False), (4, 6, 5)),
    ),
)
