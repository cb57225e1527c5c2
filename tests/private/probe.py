"""A model whose per-example gradients are its inputs, so that a test can put any gradient through the real engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp

LAYERS, WIDTH = 4, 3


class Probe(nn.Module):
    """Layer l sees x[:, l] and adds its scalar product with it to the output: its gradient is x[:, l]."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x[:, i]) for i, part in enumerate(self.parts))


def total(output: Tensor, _: Any = None) -> Tensor:
    """A loss whose gradient at every output is 1 (with loss_reduction='sum')."""
    return output.sum()


def private_probe(
    batch: Tensor, *, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.0, **options: Any
) -> tuple[lmdp.PrivacyEngine, Probe, torch.optim.Optimizer]:
    """An engine on a probe; expected batch size 1, so that `.grad` is the released sum itself."""
    settings = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "loss_reduction": "sum",
        "poisson_sampling": False,
        "criterion": lambda output, _: output.mean(),
        "seed": 0,
    }
    model = Probe(layers=batch.shape[1], width=batch.shape[2]).to(batch.dtype)
    held = optimizer(model.parameters(), lr=lr)
    data = DataLoader(TensorDataset(torch.zeros(1, *batch.shape[1:])), batch_size=1)
    engine = lmdp.PrivacyEngine()
    engine.make_private(module=model, optimizer=held, data_loader=data, **(settings | options))
    return engine, model, held


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """One ordinary iteration; the released gradient as [layers, width]."""
    optimizer.zero_grad()
    total(model(batch)).backward()
    optimizer.step()
    return torch.cat([p.grad.clone() for p in model.parameters()])
