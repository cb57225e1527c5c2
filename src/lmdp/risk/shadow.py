"""Shadow models: the private model's architecture, trained without noise on half of the public data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.membership.examples import take
from lmdp.membership.instrument import Part, Progress, unheard
from lmdp.models import Inputs, accuracy, device_of, run, scores_of


@dataclass(frozen=True)
class Schedule:
    """How a shadow model is trained: until it fits its half (`enough` of it) or the epochs are used up.

    A model that is stopped as soon as it fits has learnt little by heart. With `enough=2` it goes on.
    """

    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 1e-3
    enough: float = 0.99

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0:
            raise ValueError(f"{self}: epochs and batch_size must be 1 or more, learning_rate above 0")
        if not 0 < self.enough <= 2:
            raise ValueError(f"{self}: enough must be above 0 and at most 2; above 1, all epochs are used")


@dataclass(frozen=True)
class Shadow:
    """A trained shadow model, which examples it was trained on, and how well it does on these and on the others."""

    model: nn.Module
    member: NDArray[np.bool_]
    train_accuracy: float
    test_accuracy: float
    epochs: int
    seconds: float


def halves(size: int, models: int, seed: int) -> NDArray[np.bool_]:
    """[models, size]: who is a member of which model's half, drawn independently for every model.

    Halves that are balanced against each other (opposite pairs) would tell, by who is in the reference models, who is
    in the attacked one: calibration would then find membership where there is no leak.
    """
    generator = np.random.default_rng(seed)
    member = np.zeros((models, size), dtype=np.bool_)
    for row in member:
        row[generator.permutation(size)[: size // 2]] = True
    return member


def train_shadow(
    model: nn.Module,
    inputs: Inputs,
    labels: Tensor,
    member: NDArray[np.bool_],
    schedule: Schedule,
    seed: int,
    say: Progress,
    part: Part = unheard,
) -> Shadow:
    """Train on the member half by Adam, and report accuracy on both halves as it goes."""
    start = time.perf_counter()
    inside, outside = (torch.from_numpy(np.flatnonzero(half)) for half in (member, ~member))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=schedule.learning_rate)
    model.train()
    train = test = 0.0
    epoch = 0
    for epoch in range(1, schedule.epochs + 1):
        right = 0
        for batch in inside[torch.randperm(len(inside), generator=generator)].split(schedule.batch_size):
            optimizer.zero_grad()
            logits, wanted = scores_of(run(model, take(inputs, batch))), labels[batch].to(device_of(model))
            F.cross_entropy(logits, wanted).backward()
            optimizer.step()
            right += int((logits.argmax(1) == wanted).sum())
        part(epoch / schedule.epochs)
        running = right / len(inside)
        if running >= schedule.enough or epoch in (1, schedule.epochs) or epoch % 10 == 0:
            train, test = (
                accuracy(model, ((take(inputs, batch), labels[batch]) for batch in half.split(512)))
                for half in (inside, outside)
            )
            say(f"epoch {epoch}: train accuracy {train:.3f}, test accuracy {test:.3f}")
            if train >= schedule.enough:
                break
    return Shadow(model, member, train, test, epoch, time.perf_counter() - start)
