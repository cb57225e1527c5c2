"""Linear layers, with any number of dimensions between the batch and the features.

Example i has inputs X_i [T, in] and output gradients G_i [T, out] over its T positions. The rule computes

    norm²  ||G_iᵀ X_i||² + ||sum_t G_it||²               (weight, bias)
    sums   sum_i s_i G_iᵀ X_i,  sum_i s_i sum_t G_it

by forming G_iᵀ X_i, or by ||G_iᵀ X_i||² = sum_tu (X_it · X_iu)(G_it · G_iu), or, where T = 1, by ||G_i||² ||X_i||².
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmdp.gradients import compiled
from lmdp.gradients.contract import Example, Piece, Rule, Sizes, Use
from lmdp.gradients.rows import (
    Factored,
    Rows,
    Stored,
    chunks,
    gram_squared_norms,
    joined,
    kept_blocks,
    natively,
)


def piece(use: Use) -> Piece:
    """By one position, by forming, or by Gram matrices."""
    x, g = use.input, use.output_grad
    if x.dim() == 2:
        return _of_one_position(use, x, g)
    x, g = _positions(x), _positions(g)
    if x.shape[1] == 1:
        return _of_one_position(use, x[:, 0], g[:, 0])
    weight, bias = "weight" in use.trainable, "bias" in use.trainable

    def summed(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        return _summed(x.flatten(0, 1), g.flatten(0, 1), use.trainable)

    def expand(x: Tensor, g: Tensor) -> Stored:
        return Stored({name: rows for name, rows in _formed(x, g, bias=bias).items() if name in use.trainable})

    batch, positions = x.shape[:2]
    if weight and not use.prefers_gram(_sizes(x, g)):
        return expand(x, g)
    norms = _squares(g.sum(1)) if bias else torch.zeros(batch, dtype=torch.float64)
    if weight:
        norms = norms + joined([_gram_norms(x[chunk], g[chunk]) for chunk in chunks(batch, positions**2)])
    return Factored(norms, x.clone() if use.is_data else x, g, natively(summed), expand)


def _of_one_position(use: Use, x: Tensor, g: Tensor) -> Piece:
    """The outer product of g and x, with a 1 beside x for the bias: its norm is the product of theirs."""

    def summed(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        return _summed(x, g, use.trainable)

    def expand(x: Tensor, g: Tensor) -> Stored:
        rows = {"weight": Rows.of(g.unsqueeze(2) * x.unsqueeze(1)), "bias": Rows.of(g)}
        return Stored({name: rows[name] for name in use.trainable})

    norms = _squares(g)
    if "weight" in use.trainable:
        norms = norms * (_squares(x) + ("bias" in use.trainable))
    return Factored(norms, x.clone() if use.is_data else x, g, natively(summed), expand)


def _summed(x: Tensor, g: Tensor, trainable: frozenset[str]) -> dict[str, Tensor]:
    sums = {}
    if "weight" in trainable:
        sums["weight"] = g.T @ x
    if "bias" in trainable:
        sums["bias"] = g.sum(0)
    return sums


def _sizes(x: Tensor, g: Tensor) -> Sizes:
    batch, positions, inputs = x.shape
    features = inputs + g.shape[2]
    return Sizes(positions, features, inputs * g.shape[2], positions * features, batch, x.element_size())


def _formed(x: Tensor, g: Tensor, *, bias: bool) -> dict[str, Rows]:
    """Per-example gradients, kept."""
    shape = (g.shape[2], x.shape[2])
    blocks = kept_blocks(len(x), shape[0] * shape[1])

    def restore(flat: Tensor) -> Tensor:
        shaped: Tensor = flat.unflatten(-1, shape)
        return shaped

    if compiled.applies(x, g):
        formed = compiled.linear_rows(x, g, blocks, bias=bias)
        rows = {"weight": Rows(formed.blocks, formed.squared_norms, restore)}
        return rows if formed.bias is None else {**rows, "bias": Rows.of(formed.bias)}
    products = (torch.bmm(g[block].transpose(1, 2), x[block]).flatten(1) for block in blocks)  # [b, out · in] each
    rows = {"weight": Rows.gather(products, restore)}
    return {**rows, "bias": Rows.of(g.sum(1))} if bias else rows


def _gram_norms(x: Tensor, g: Tensor) -> Tensor:
    return gram_squared_norms(x, g, torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2)))


def _squares(rows: Tensor) -> Tensor:
    """Squared norms in float64: of two factors, one may be as small as the other is large."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square()


def _positions(tensor: Tensor) -> Tensor:
    """[B, ..., F] → [B, T, F]."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def _explain(trainable: frozenset[str]) -> tuple[str, str]:
    if "weight" not in trainable:
        return "factors", "only its bias is trained"
    return "factors", "one position per example: the norm is |x||g|"


RULE = Rule(
    "linear",
    (nn.Linear,),
    piece,
    _explain,
    (
        Example(lambda: nn.Linear(4, 3), (4,)),
        Example(lambda: nn.Linear(4, 3, bias=False), (5, 4)),
        Example(lambda: nn.Linear(70, 60), (2, 70)),
        Example(lambda: nn.Linear(4, 3), (2, 3, 4)),
    ),
    features=lambda module: module.in_features + module.out_features,
    takes_more_dims=True,
)
