"""Small models that use every rule: what the recorded trainings train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmdp.models import DCNN, SCNN

TOKENS, WIDTH = 17, 8


class TiedTransformer(nn.Module):
    """Tied embedding and head, a block that is called twice, attention taken as a whole, bare parameters, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, 6, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.groups(self.conv(x.transpose(1, 2))).transpose(1, 2)
        out: Tensor = self.head(self.last_norm(x.mean(1)))
        return out


def factory(channels: int, classes: int) -> nn.Module:
    """For `lmdp train --model tests.record.models:factory`."""
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, classes)
    )


def examples(model: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of this name with its first weights, and its data."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if model == "s-cnn":
            return SCNN(), torch.randn(30, 1, 28, 28, generator=generator), torch.arange(30) % 10
        if model == "d-cnn":
            return DCNN(), torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
        tokens = torch.randint(0, TOKENS, (30, 6), generator=generator)
        return TiedTransformer().double(), tokens, torch.arange(30) % TOKENS


MODELS = ("s-cnn", "d-cnn", "transformer")
