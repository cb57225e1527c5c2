"""How a run goes downhill: its optimizer, and what becomes of the learning rate over its steps.

All of this happens to released gradients and with public numbers, so that no choice here costs privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from lmdp.app.config import Config
from lmdp.methods import METHODS

WARMUP = 0.05
"""The share of the steps over which the rate rises under schedule = warmup, unless it is given."""


def optimizer_for(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer of the trainable parameters."""
    return _OPTIMIZERS[config.optimizer](config, model)


def set_rate(optimizer: torch.optim.Optimizer, config: Config, step: int, total: int) -> None:
    """The learning rate of the step after `step` steps; it follows from the step's number, so a resumed run has it."""
    rate = peak_rate(config) * share_of_rate(config, step, total)
    for group in optimizer.param_groups:
        group["lr"] = rate


def peak_rate(config: Config) -> float:
    if not METHODS[config.method].private:
        return config.sgd_learning_rate
    if config.learning_rate is None:
        raise ValueError("learning_rate is not chosen yet; planning.suited chooses one by examples and epsilon")
    return config.learning_rate


def share_of_rate(config: Config, step: int, total: int) -> float:
    """Of the learning rate, in the step after `step` of `total` steps: in (0, 1]."""
    if config.schedule == "constant":
        return 1.0
    cosine = config.schedule == "cosine"
    share = config.warmup if config.warmup is not None else 0.0 if cosine else WARMUP
    rising = math.ceil(share * total)
    if step < rising:
        return (step + 1) / (rising + 1)
    if not cosine:
        return 1.0
    return (1 + math.cos(math.pi * (step - rising) / max(1, total - rising))) / 2


def _sgd(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=peak_rate(config), momentum=config.momentum, weight_decay=config.weight_decay
    )


def _adamw(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=peak_rate(config), weight_decay=config.weight_decay)


_OPTIMIZERS: dict[str, Callable[[Config, nn.Module], torch.optim.Optimizer]] = {"sgd": _sgd, "adamw": _adamw}
