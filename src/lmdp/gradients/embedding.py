"""Embedding tables: an example touches only the rows of its own indices.

Position t of example i has index k_it and output gradient G_it. With the row r_ik = sum over t with k_it = k of G_it,

    norm²  sum_k ||r_ik||²
    sums   row k of the table: sum_i s_i r_ik

The positions of several uses of the same table are positions of one example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.rows import Pair, joined, per_example_scales, squared_row_norms, zero_rows


def piece(use: Use) -> Piece:
    return join([use])


def join(uses: Sequence[Use]) -> Piece:
    """Output gradients of equal index within one example are added; what is left is one row per distinct index."""
    size = table(uses[0]).num_embeddings
    g, index = (joined(sides, dim=1) for sides in zip(*map(looked_up, uses)))  # [B, T, width], [B, T]
    place, index = slots(index, size)
    batch, count, width = len(g), index.shape[1], g.shape[2]
    place = place + count * torch.arange(batch, device=g.device).unsqueeze(1)
    rows = g.new_zeros(batch * count, width).index_add_(0, place.flatten(), g.flatten(0, 1))
    return TouchedRows(rows.view(batch, count, width), index, size)


def looked_up(use: Use) -> Pair:
    """Output gradients [B, T, width], zero where nothing is learned, and indices [B, T]."""
    index = use.input.reshape(use.batch_size, -1).long()
    g = use.output_grad.reshape(*index.shape, use.output_grad.shape[-1])
    padding = table(use).padding_idx
    return g if padding is None else g.masked_fill(index.eq(padding).unsqueeze(2), 0), index


def table(use: Use) -> nn.Embedding | nn.EmbeddingBag:
    assert isinstance(use.module, nn.Embedding | nn.EmbeddingBag)
    return use.module


def slots(index: Tensor, size: int) -> Pair:
    """The slot of its example that a position belongs to [B, T], equal for equal indices; each slot's index [B, S].

    There are as many slots as an example has positions, whatever it holds: what is left over has index 0. A table
    that is no larger has a slot for each of its rows.
    """
    if size <= index.shape[1]:
        return index, torch.arange(size, device=index.device).expand(len(index), size)
    ordered, order = index.sort(dim=1)
    number = torch.zeros_like(ordered)
    number[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    return torch.empty_like(index).scatter_(1, order, number), torch.zeros_like(index).scatter_(1, number, ordered)


@dataclass(frozen=True)
class TouchedRows:
    """`rows` [B, S, width] are gradients of the table's rows `index` [B, S]; unless zero, an example's are distinct."""

    rows: Tensor
    index: Tensor
    size: int

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.rows, self.index

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        return {"weight": squared_row_norms(self.rows.flatten(1))}

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        sums = []
        for column in scales["weight"].to(self.rows.dtype).unbind():
            scaled = self.rows * per_example_scales(column, self.rows)
            table = self.rows.new_zeros(self.size, self.rows.shape[2])
            sums.append({"weight": table.index_add_(0, self.index.flatten(), scaled.flatten(0, 1))})
        return sums

    def per_example(self) -> dict[str, Tensor]:
        tables = self.rows.new_zeros(len(self.rows), self.size, self.rows.shape[2])
        return {"weight": tables.scatter_add_(1, self.index.unsqueeze(2).expand_as(self.rows), self.rows)}

    def without(self, dropped: Tensor) -> TouchedRows:
        return TouchedRows(zero_rows(self.rows, dropped), self.index, self.size)


RULE = Rule(
    "embedding",
    (nn.Embedding,),
    piece,
    lambda trainable: ("touched rows", "an example touches only the rows that it indexes"),
    (
        Example(lambda: nn.Embedding(7, 3), (4,), indices=7),
        Example(lambda: nn.Embedding(7, 3, padding_idx=2), (2, 5), indices=7),
    ),
    takes_more_dims=True,
    join=join,
)
