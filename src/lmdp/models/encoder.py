"""A small transformer for texts: word vectors, two blocks of attention, the mean over the words of a text, classes.

Positions are marked by fixed waves, so that nothing but words, blocks and head is learnt. Padding is left out of
attention and of the mean: a text gives the same numbers whatever it is padded with.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TinyEncoder(nn.Module):
    """For texts of any length: ids and mask [B, T] → scores [B, classes]."""

    def __init__(self, vocabulary: int, classes: int = 2, width: int = 64, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.words(input_ids)
        x = x + waves(x.shape[1], x.shape[2]).to(x)
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.head(mean_over(x, mask))
        return scores


class Block(nn.Module):
    """Attention among the words of a text, then two linear layers; each is added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.mix(self.norm1(x)), mask))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def _attend(self, mixed: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2)
        )  # each [B, heads, T, d]
        seen = (mask != 0)[:, None, None, :]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)


def mean_over(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T, d] → [B, d]: over the words, without the padding."""
    weights = (mask != 0).to(x.dtype).unsqueeze(2)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def waves(length: int, width: int) -> Tensor:
    """[T, d]: sines and cosines of the place in the text, from fast to slow."""
    speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length).unsqueeze(1) * speeds
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width].mul(width**-0.5)
