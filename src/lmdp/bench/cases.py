"""What is measured on: the four models of the paper and a transformer encoder, each with its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmdp.models import DCNN, SCNN, VGG16, ResNet18


class Transformer(nn.Module):
    """Pre-norm encoder blocks with attention written out in linear layers."""

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10

    def batch(self, size: int | None = None) -> tuple[Tensor, Tensor]:
        count = self.shape[0] if size is None else size
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, *self.shape[1:], generator=generator)
        return x, torch.randint(0, self.classes, (count,), generator=generator)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


CASES = {
    "scnn": Case("S-CNN, batch 600", SCNN, (600, 1, 28, 28)),
    "dcnn": Case("D-CNN, batch 256", DCNN, (256, 3, 32, 32)),
    "resnet18": Case("ResNet-18, batch 64", lambda: ResNet18(classes=10), (64, 3, 32, 32)),
    "vgg16": Case("VGG-16 on 64x64, batch 32", lambda: VGG16(classes=10), (32, 3, 64, 64)),
    "transformer": Case("transformer 4x256, 128 tokens, batch 32", Transformer, (32, 128, 256)),
}
