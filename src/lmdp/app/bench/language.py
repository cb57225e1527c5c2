"""Models of text in the shapes that people train, written in plain layers: nothing is downloaded or installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward part, each followed by a norm, as in BERT and MiniLM; or preceded, as in GPT-2."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attended(self.norm1(x))
            return x + self.fed_forward(self.norm2(x))
        x = self.norm1(x + self.attended(x))
        y: Tensor = self.norm2(x + self.fed_forward(x))
        return y

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def fed_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Words(nn.Module):
    """Indices [B, T] → vectors [B, T, width] of words and of their places."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        y: Tensor = self.word(tokens) + self.place(places)
        return y


class Encoder(nn.Module):
    """Sentences [B, T] → vectors [B, width], the mean over their words. The shape is that of all-MiniLM-L6."""

    def __init__(self, vocabulary: int = 30_522, width: int = 384, depth: int = 6, heads: int = 12) -> None:
        super().__init__()
        self.words, self.norm = Words(vocabulary, width, 512), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.norm(self.words(tokens))).mean(1)
        return y


class Classifier(nn.Sequential):
    """An encoder and a linear layer on its vectors."""

    def __init__(self, classes: int = 10, width: int = 384, encoder: nn.Module | None = None) -> None:
        super().__init__(encoder or Encoder(width=width), nn.Linear(width, classes))


class Siamese(nn.Module):
    """Pairs of sentences [B, 2, T] → scores [B, 2] for being unlike and alike: their cosine, at a temperature."""

    def __init__(self, encoder: nn.Module | None = None, temperature: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.temperature = encoder or Encoder(), temperature

    def forward(self, pairs: Tensor) -> Tensor:
        a, b = (self.encoder(pairs[:, side]) for side in range(2))
        alike = F.cosine_similarity(a, b, dim=1) / self.temperature
        return torch.stack([-alike, alike], dim=1)


class LanguageModel(nn.Module):
    """Indices [B, T] → scores [B, T, vocabulary] of the next word, by the table that words are looked up in: GPT-2."""

    def __init__(self, vocabulary: int = 16_384, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words = Words(vocabulary, width, 1024)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.words.word.weight, std=0.02)
        self.head.weight = self.words.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.words(tokens))))
        return y


class LowRank(nn.Module):
    """A frozen linear layer with a trained change of low rank beside it: LoRA."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Linear(frozen.in_features, rank, bias=False)
        self.b = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.b(self.a(x))
        return y


def low_rank(encoder: Encoder, rank: int = 8) -> Encoder:
    """The same encoder, of which changes of queries and values are trained and nothing else."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        block.query, block.value = LowRank(block.query, rank), LowRank(block.value, rank)  # type: ignore[assignment]
    return encoder


class Recurrent(nn.Module):
    """A table, an LSTM and a linear layer on its last state."""

    def __init__(self, vocabulary: int = 10_000, width: int = 128, hidden: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.word(tokens))[0][:, -1])
        return y
