"""Linear layers, with any number of dimensions between the batch and the features.

Example i has inputs X_i [T, in] and output gradients G_i [T, out] over its T positions. The rule computes

    norm²  ||G_iᵀ X_i||² + ||sum_t G_it||²               (weight, bias)
    sums   sum_i s_i G_iᵀ X_i,  sum_i s_i sum_t G_it

by forming G_iᵀ X_i, once or for each of the two, or by ||G_iᵀ X_i||² = sum_tu (X_it · X_iu)(G_it · G_iu), or, where
T = 1, by ||G_i||² ||X_i||².
The positions of several uses of the same weight are positions of one example.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmdp.gradients import compiled
from lmdp.gradients.contract import Example, Piece, Rule, Sizes, Use
from lmdp.gradients.rows import (
    Factored,
    FormedAgain,
    Pair,
    Rows,
    Stored,
    added,
    chunks,
    gram_squared_norms,
    joined,
    kept_blocks,
    one_position_norms,
    per_example_scales,
)


def piece(use: Use) -> Piece:
    return join([use])


def join(uses: Sequence[Use]) -> Piece:
    """By one position, by forming, or by Gram matrices."""
    trainable, batch = uses[0].trainable, uses[0].batch_size
    weight, bias = "weight" in trainable, "bias" in trainable
    pairs = [(positions(use.input), positions(use.output_grad)) for use in uses]  # [B, T, in], [B, T, out] each
    if not weight:
        return Stored({"bias": Rows.of(_over_positions(pairs))})

    def contract(pairs: Sequence[Pair], scales: Tensor) -> list[dict[str, Tensor]]:
        weights = [{"weight": added_sums(pairs, column)} for column in scales.unbind()]
        if not bias:
            return weights
        biases = [{"bias": of_scale} for of_scale in _bias_sums(pairs, scales).unbind()]
        return [{**of_weight, **of_bias} for of_weight, of_bias in zip(weights, biases)]

    def expand(pairs: Sequence[Pair]) -> Stored:
        return Stored(_formed(*one_sequence(pairs), bias=bias))

    count, sizes = sum(x.shape[1] for x, _ in pairs), _sizes(pairs)
    if count != 1 and not uses[0].prefers_gram(sizes):
        if not uses[0].forms_again(sizes):
            return expand(pairs)
        x, g = one_sequence(pairs)
        return Stored(_formed_again(x.clone() if len(uses) == 1 and uses[0].is_data else x, g, bias=bias))
    if count == 1:  # an outer product, with a 1 beside x for the bias: its norm is the product of theirs
        x, g = one_sequence(pairs)
        norms = one_position_norms(_squares(x[:, 0]), _squares(g[:, 0]), x.dtype, bias=bias)
    else:
        room = max(count**2, 0 if len(pairs) == 1 else sizes.factors)
        norms = joined([_gram_norms(*one_sequence(pairs, chunk)) for chunk in chunks(batch, room)])
        norms = norms + _squares(_over_positions(pairs)) if bias else norms
    kept = tuple((x.clone() if use.is_data else x, g) for use, (x, g) in zip(uses, pairs))
    return Factored(norms, kept, contract, expand)


def one_sequence(pairs: Sequence[Pair], examples: slice = slice(None)) -> Pair:
    """The positions of all uses after each other, of these examples: a copy if there are several uses."""
    x, g = (joined([side[examples] for side in sides], dim=1) for sides in zip(*pairs))
    return x, g


def added_sums(pairs: Sequence[Pair], scales: Tensor) -> Tensor:
    """sum_i s_i G_iᵀ X_i of all uses [out, in]. The narrower of the two sides is scaled: less to copy."""
    total: Tensor | None = None
    for x, g in pairs:
        column = per_example_scales(scales, x)
        x, g = (x * column, g) if x.shape[2] < g.shape[2] else (x, g * column)
        x, g = x.flatten(0, 1), g.flatten(0, 1).T  # [B · T, in], [out, B · T]
        total = g @ x if total is None else total.addmm_(g, x)
    assert total is not None
    return total


def _bias_sums(pairs: Sequence[Pair], scales: Tensor) -> Tensor:
    """[S, out], without a scaled copy of g."""
    return added([{"": scales.repeat_interleave(g.shape[1], dim=1) @ g.flatten(0, 1)} for _, g in pairs])[""]


def _over_positions(pairs: Sequence[Pair]) -> Tensor:
    """[B, out]"""
    return added([{"": g.sum(1)} for _, g in pairs])[""]


def _sizes(pairs: Sequence[Pair]) -> Sizes:
    x, g = pairs[0]
    count, inputs, outputs = sum(x.shape[1] for x, _ in pairs), x.shape[2], g.shape[2]
    features = inputs + outputs
    weights, factors = inputs * outputs, count * features
    return Sizes(count, features, weights, factors, len(x), x.element_size(), can_form_again=True)


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


def _formed_again(x: Tensor, g: Tensor, *, bias: bool) -> dict[str, Rows | FormedAgain]:
    """The same, with weights of a few examples at a time: x and g are kept."""
    shape = (g.shape[2], x.shape[2])
    blocks, norms, biases = kept_blocks(len(x), shape[0] * shape[1]), [], []
    for block in blocks:
        rows = _formed(x[block], g[block], bias=bias)
        norms.append(rows["weight"].squared_norms)
        biases += [rows["bias"].all()] if bias else []
    weight = FormedAgain((x, g), blocks, _block, joined(norms), lambda flat: flat.unflatten(-1, shape))
    return {"weight": weight, "bias": Rows.of(joined(biases))} if bias else {"weight": weight}


def _block(x: Tensor, g: Tensor) -> Tensor:
    """[b, out · in]"""
    return joined(_formed(x, g, bias=False)["weight"].blocks)


def _gram_norms(x: Tensor, g: Tensor) -> Tensor:
    return gram_squared_norms(x, g, torch.bmm(x, x.transpose(1, 2)), torch.bmm(g, g.transpose(1, 2)))


def _squares(rows: Tensor) -> Tensor:
    """Squared norms in float64: of two factors, one may be as small as the other is large."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square()


def positions(tensor: Tensor) -> Tensor:
    """[B, ..., F] → [B, T, F]."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:-1].numel(), tensor.shape[-1])


def _explain(trainable: frozenset[str]) -> tuple[str, str]:
    if "weight" not in trainable:
        return "formed", "only its bias is trained"
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
    join=join,
    sizes=lambda use: _sizes([(positions(use.input), positions(use.output_grad))]),
)
