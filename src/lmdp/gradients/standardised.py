"""Convolutions with standardised filters: a convolution's gradients at the filters, brought back to the weights.

With J_i the gradient of example i at the filters, as for any convolution, and P the (linear) way from a gradient at the
filters to one at the weights, the same for all examples,

    norm²  ||P J_i||² + ||sum_t G_it||²                  (weight, bias)
    sums   sum_i s_i P J_i,  sum_i s_i sum_t G_it
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lmdp.gradients import conv
from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.rows import Rows, Stored
from lmdp.standardised import StandardisedConv2d, pulled_back


def piece(use: Use) -> Piece:
    """Formed: P differs from filter to filter, so no Gram matrix of positions knows the norm."""
    rows = conv.piece(replace(use, prefers_gram=lambda sizes: False, forms_again=lambda sizes: False)).per_example()
    if "weight" in rows:
        weight = use.module.weight
        assert isinstance(weight, nn.Parameter)
        rows = {**rows, "weight": pulled_back(weight, rows["weight"])}
    return Stored({name: Rows.of(value) for name, value in rows.items()})


RULE = Rule(
    "standardised convolution",
    (StandardisedConv2d,),
    piece,
    lambda trainable: ("formed", "gradients at the filters are brought back to the weights, filter by filter"),
    (
        Example(lambda: StandardisedConv2d(3, 4, 3, stride=2, padding=1), (3, 6, 5)),
        Example(lambda: StandardisedConv2d(4, 6, 2, groups=2, bias=False), (4, 6, 5)),
    ),
)
