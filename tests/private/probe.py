"""An engine on a slate, whose per-example gradients are its inputs: a test can put any gradient through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.accounting import Grid
from lmdp.audit.canaries import Slate
from lmdp.private.noise import GaussianNoise, Noised


def private_probe(
    batch: Tensor, *, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.0, **options: Any
) -> tuple[lmdp.PrivacyEngine, Slate, torch.optim.Optimizer]:
    """An engine on a slate; expected batch size 1, so that `.grad` is the released sum itself."""
    settings = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "loss_reduction": "sum",
        "poisson_sampling": False,
        "criterion": lambda output, _: output.mean(),
        "check_mixing": False,  # whether examples meet is no question here, and takes most of the time
        "seed": 0,
    }
    model = Slate(layers=batch.shape[1], width=batch.shape[2]).to(batch)
    held = optimizer(model.parameters(), lr=lr)
    data = DataLoader(TensorDataset(torch.zeros(1, *batch.shape[1:])), batch_size=1)
    engine = lmdp.PrivacyEngine()
    engine.make_private(module=model, optimizer=held, data_loader=data, **(settings | options))
    return engine, model, held


def draw(noise: GaussianNoise, like: Sequence[Tensor], std: float) -> list[Tensor]:
    """Noise alone."""
    return noise.added(
        Noised(
            like,
            [torch.zeros_like(t) for t in like],
            torch.ones(len(like), dtype=torch.float64, device="cpu"),
            Grid.of(std),
        )
    )[0]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """One ordinary iteration; the released gradient as [layers, width]."""
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    return torch.cat([p.grad.clone() for p in model.parameters()])
