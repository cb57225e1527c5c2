"""Small trainings for the neighbour check: every model of one family, one loop, everything else an option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lmdp
from lmdp.audit.neighbours.training import Train
from lmdp.models import ResNet18

SIZE, COMMON = 8, 11


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.inner = nn.Linear(4 * 9, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.tanh(self.inner(torch.flatten(h, 1))))


class Block(nn.Module):
    """Embedding, position, attention, norms: a transformer on the rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, 8)
        self.position = nn.Parameter(torch.zeros(1, SIZE, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.squeeze(1)) + self.position).mean(1))


def resnet() -> nn.Module:
    return ResNet18(channels=1, classes=3, width=8)  # narrower, its last norms would refuse a batch of one


def examples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images that resemble each other, so that gradients are aligned and a change of weights adds up."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(1, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    noise = torch.randn(COMMON, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return pattern + 0.1 * noise, torch.ones(COMMON, dtype=torch.long)


def outliers() -> dict[str, tuple[Tensor, Tensor]]:
    x, y = examples()
    return {
        "huge": (x[0] * 1e4, torch.tensor(2)),  # attention squares it: beyond 1e5 its own rounding looks like influence
        "aligned": (x[0] * 3, y[0]),
        "zero": (torch.zeros_like(x[0]), torch.tensor(0)),
        "nan": (torch.full_like(x[0], float("nan")), torch.tensor(1)),
        "infinite": (torch.full_like(x[0], float("inf")), torch.tensor(1)),
    }


def training(
    make: Callable[[], nn.Module] = CNN,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    loss: Callable[..., Tensor] = F.cross_entropy,
    loop: Callable[..., Any] | None = None,
    **options: Any,
) -> Train:
    """An ordinary private training of three steps."""

    def train(engine: lmdp.PrivacyEngine, dataset: Any) -> Any:
        dtype = dataset[0][0].dtype
        model = make().to(dtype)
        held = optimizer(model.parameters(), lr=0.1)
        x, y = examples(1)
        public = (x.to(dtype), y)
        three = engine.make_private(
            module=model,
            optimizer=held,
            data_loader=DataLoader(dataset, batch_size=4),
            **({"noise_multiplier": 1.0, "max_grad_norm": 0.7, "public_data": public, "public_every": 2} | options),
        )
        return (loop or plain)(engine, *three, loss)

    return train


def plain(engine: Any, model: nn.Module, optimizer: Any, loader: Any, loss: Callable[..., Tensor]) -> nn.Module:
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            loss(model(x), y).backward()
        optimizer.step()
    return model
