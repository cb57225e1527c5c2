"""A table that embeddings and linear layers share, as in language models: looked up first, multiplied by at the end.

To look up is to multiply by a vector of zeros and a one. So an embedding is a linear layer turned round: where the
linear layer has an input x_t and an output gradient g_t at position t, the embedding has its output gradient and the
vector e_k that stands for its index. With the positions of all uses as positions of one example,

    norm²  sum_tu (x_t · x_u)(g_t · g_u), where g_t · e_k = g_tk and e_k · e_l is 1 if k = l and else 0
    sums   sum_i s_i sum_t g_t x_tᵀ, where rows of e_k are added to row k

The table of an example, as large as the vocabulary is, is never formed, unless all positions together are larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmdp.gradients import embedding, linear
from lmdp.gradients.contract import Piece, Use
from lmdp.gradients.linear import added_sums, one_sequence, positions
from lmdp.gradients.rows import (
    Factored,
    Pair,
    Rows,
    Stored,
    chunks,
    joined,
    joint_squared_norms,
    kept_blocks,
    per_example_scales,
)

FEW = 4
"""A table that is smaller than all positions together by this factor is formed."""


def join(uses: Sequence[Use]) -> Piece:
    """By Gram matrices; by the usual rule where all uses are of one kind."""
    looked = [use for use in uses if isinstance(use.module, nn.Embedding)]
    if not looked:
        return linear.join(uses)
    if len(looked) == len(uses):
        return embedding.join(uses)
    multiplied = [use for use in uses if not isinstance(use.module, nn.Embedding)]
    pairs = [(positions(use.input), positions(use.output_grad)) for use in multiplied]  # [B, T, in], [B, T, out] each
    pairs = [(x.clone() if use.is_data else x, g) for use, (x, g) in zip(multiplied, pairs)]
    pairs += [embedding.looked_up(use) for use in looked]  # [B, T, in], [B, T] each
    table = embedding.table(looked[0])
    if FEW * table.weight.numel() < sum(t[0].numel() for pair in pairs for t in pair):
        return _formed(pairs)
    count = sum(x.shape[1] for x, _ in pairs)
    norms = joined([_gram_norms([(x[c], g[c]) for x, g in pairs]) for c in chunks(len(pairs[0][0]), count**2)])
    return Factored(norms, tuple(pairs), _sums, _formed)


def _split(pairs: Sequence[Pair]) -> tuple[Pair, Pair]:
    """All positions of linear layers, all positions of embeddings."""
    dense, looked = ([pair for pair in pairs if pair[1].dim() == dims] for dims in (3, 2))
    return one_sequence(dense), one_sequence(looked)


def _gram_norms(pairs: Sequence[Pair]) -> Tensor:
    (x, g), (rows, index) = uses = _split(pairs)
    every = joined([x, rows], dim=1)  # [B, T, in]
    one_kind, other = torch.bmm(g, g.transpose(1, 2)), (index.unsqueeze(2) == index.unsqueeze(1)).to(g.dtype)
    mixed = g.gather(2, index.unsqueeze(1).expand(-1, g.shape[1], -1))  # [B, T of linear layers, T of embeddings]
    gram_g = torch.cat([torch.cat([one_kind, mixed], 2), torch.cat([mixed.transpose(1, 2), other], 2)], 1)
    return joint_squared_norms(
        [(use, use[0].shape[1]) for use in uses], torch.bmm(every, every.transpose(1, 2)), gram_g
    )


def _sums(pairs: Sequence[Pair], scales: Tensor) -> list[dict[str, Tensor]]:
    sums = []
    for column in scales.unbind():
        table = added_sums([pair for pair in pairs if pair[1].dim() == 3], column)
        for rows, index in (pair for pair in pairs if pair[1].dim() == 2):
            table.index_add_(0, index.flatten(), (rows * per_example_scales(column, rows)).flatten(0, 1))
        sums.append({"weight": table})
    return sums


def _formed(pairs: Sequence[Pair]) -> Stored:
    (x, g), (rows, index) = _split(pairs)
    shape = (g.shape[2], x.shape[2])

    def form(block: slice) -> Tensor:
        tables = torch.bmm(g[block].transpose(1, 2), x[block])  # [b, out, in]
        return tables.scatter_add_(1, index[block].unsqueeze(2).expand_as(rows[block]), rows[block]).flatten(1)

    blocks = kept_blocks(len(x), shape[0] * shape[1])
    return Stored({"weight": Rows.gather(map(form, blocks), lambda flat: flat.unflatten(-1, shape))})
