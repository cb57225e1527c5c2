"""Embedding tables: an example touches only the rows of its own indices.

Position t of example i has index k_it and output gradient G_it. With the row r_ik = sum over t with k_it = k of G_it,

    norm²  sum_k ||r_ik||²
    sums   row k of the table: sum_i s_i r_ik
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmdp.gradients.contract import Example, Piece, Rule, Use
from lmdp.gradients.rows import squared_row_norms, zero_rows


def piece(use: Use) -> Piece:
    """Output gradients of equal index within one example are added; what is left is one row per distinct index."""
    module, g = use.module, use.output_grad
    assert isinstance(module, nn.Embedding)
    size, width = module.num_embeddings, module.embedding_dim
    index = use.input.reshape(use.batch_size, -1)  # [B, T]
    owner = torch.arange(use.batch_size).unsqueeze(1).expand_as(index)
    if module.padding_idx is not None:
        used = index != module.padding_idx  # [B, T]
        index, owner, g = index[used], owner[used], g.reshape(*used.shape, width)[used]
    # keys [K]: each (example, index) that occurs, once; place: which of them a position belongs to
    keys, place = torch.unique(owner.flatten() * size + index.flatten(), return_inverse=True)
    rows = g.new_zeros(len(keys), width).index_add_(0, place, g.reshape(-1, width))
    return TouchedRows(rows, keys // size, keys % size, use.batch_size, size)


@dataclass(frozen=True)
class TouchedRows:
    """Row k is the gradient of example `example[k]` for table row `index[k]`; pairs are distinct."""

    rows: Tensor
    example: Tensor
    index: Tensor
    batch_size: int
    size: int

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return (self.rows,)

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        each = squared_row_norms(self.rows)
        return {"weight": each.new_zeros(self.batch_size).index_add_(0, self.example, each)}

    def weighted_sums(self, scales: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        sums = []
        for column in scales["weight"].to(self.rows.dtype).unbind():
            table = self.rows.new_zeros(self.size, self.rows.shape[1])
            sums.append({"weight": table.index_add_(0, self.index, self.rows * column[self.example, None])})
        return sums

    def per_example(self) -> dict[str, Tensor]:
        tables = self.rows.new_zeros(self.batch_size, self.size, self.rows.shape[1])
        tables[self.example, self.index] = self.rows
        return {"weight": tables}

    def without(self, dropped: Tensor) -> TouchedRows:
        rows = zero_rows(self.rows, dropped[self.example])
        return TouchedRows(rows, self.example, self.index, self.batch_size, self.size)


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
)
