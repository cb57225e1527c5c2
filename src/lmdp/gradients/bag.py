"""Bags of embeddings: the sum, mean or maximum of the rows of a table that an example names.

Position t of example i has index k_it. With the output gradient G_i, its row k_it gets

    sum   s_it G_i                         s_it the weight of the position, if there are any
    mean  G_i / number of positions
    max   of G_i what is at numbers that are the largest of their column, the first of them

and nothing where k_it is the padding. What follows is that of `embedding`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.gradients import embedding
from lmdp.gradients.contract import Example, Piece, Rule, Use, argument


def piece(use: Use) -> Piece:
    """As of an embedding whose output gradients are those that positions get."""
    module, g = use.module, use.output_grad
    assert isinstance(module, nn.EmbeddingBag)
    index, inside = argument(use.args, use.kwargs, 0, "input"), None
    weights = argument(use.args, use.kwargs, 2, "per_sample_weights")
    if index.dim() == 1:
        offsets = argument(use.args, use.kwargs, 1, "offsets")
        place, inside = _places(offsets, len(index), use.batch_size)
        index, weights = index[place], None if weights is None else weights[place]
    if inside is None:
        inside = torch.ones_like(index, dtype=torch.bool)
    if module.padding_idx is not None:
        inside = inside & (index != module.padding_idx)
    shares = inside.unsqueeze(2).to(g)  # [B, T, 1]
    if module.mode == "mean":
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    elif module.mode == "max":
        shares = _largest(module.weight.detach()[index].to(g), inside)
    elif weights is not None:
        shares = shares * weights.unsqueeze(2)
    return embedding.piece(replace(use, input=index, output_grad=shares * g.unsqueeze(1)))


def _places(offsets: Tensor, count: int, bags: int) -> tuple[Tensor, Tensor]:
    """Where the indices of every bag are [B, T], and which of these places are its own. Bags follow one another."""
    ends = torch.cat([offsets, offsets.new_tensor([count])])[1 : bags + 1]
    lengths = ends - offsets[:bags]
    steps = torch.arange(int(lengths.max()) if bags else 0, device=offsets.device)
    inside = steps < lengths.unsqueeze(1)
    return (offsets[:bags].unsqueeze(1) + steps) * inside, inside


def _largest(rows: Tensor, inside: Tensor) -> Tensor:
    """[B, T, width] → 1 at the first of the largest numbers of every column, 0 elsewhere."""
    shares = torch.zeros_like(rows)
    if rows.shape[1]:
        at = rows.masked_fill(~inside.unsqueeze(2), -torch.inf).argmax(1, keepdim=True)
        shares.scatter_(1, at, 1.0)
    return shares * inside.unsqueeze(2)


def taken_in(module: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The shape of what it took in; of indices in one row, how many bags they are in."""
    index, offsets = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "offsets")
    if index.dim() == 1 and offsets is not None:
        return (len(offsets) - module.include_last_offset,)
    return tuple(index.shape)


RULE = Rule(
    "bag",
    (nn.EmbeddingBag,),
    piece,
    lambda trainable: ("touched rows", "an example touches only the rows that it indexes"),
    (
        Example(lambda: nn.EmbeddingBag(7, 3, mode="sum"), (4,), indices=7),
        Example(lambda: nn.EmbeddingBag(7, 3, mode="mean", padding_idx=2), (4,), indices=7),
        Example(lambda: nn.EmbeddingBag(7, 3, mode="max"), (4,), indices=7),
    ),
    taken_in=taken_in,
    remedy="Give the model a table of indices with a row for every example, filled up with the bag's padding_idx",
)
