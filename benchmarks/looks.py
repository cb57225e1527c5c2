"""What the guards cost: a private step with and without looking for examples that meet.

    python benchmarks/looks.py [--steps 60]

Both trainings make a step by turns, in one process. Printed are the first step, which runs the model again, as a
multiple of an ordinary one; the first look and those after it, all parts of each, in ordinary steps; the ratio of the
steps after the first (median, quartiles); the share of all time that looks after the first take, in a training of 1,000
steps and of 10,000; and the share of the guards of what is saved and of processes, which are always on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.guards.looks import is_due
from lmdp.models import build


def perceptron() -> nn.Module:
    """64 layers: many parameters and little to compute."""
    layers = [layer for _ in range(64) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "S-CNN": (lambda: build("s-cnn", (1, 28, 28), 10), (1, 28, 28), 256),
    "D-CNN": (lambda: build("d-cnn", (3, 32, 32), 10), (3, 32, 32), 256),
    "64-layer MLP": (perceptron, (64,), 256),
}


class Training:
    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, *, looks: bool) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(8 * batch, *shape), torch.randint(0, 10, (8 * batch,)))
        model = make()
        self.engine = lmdp.PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            data_loader=DataLoader(data, batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="dpsgd",
            check_mixing=looks,
            looks_besides=True,
        )
        self._batches: Any = iter(())
        self.steps: list[float] = []  # seconds per example
        self.looks: dict[int, float] = {}  # after so many steps → seconds of all its parts
        self.guards = 0.0
        watch = self.engine._attached.watch
        for name in ("hand_out", "check", "settle"):
            setattr(watch, name, self._timed(getattr(watch, name)))

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            begun = time.perf_counter()
            function(*args, **kwargs)
            self.guards += time.perf_counter() - begun

        return timed

    def _next(self) -> tuple[Tensor, Tensor]:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        return batch[0], batch[1]

    def step(self) -> None:
        """One step, and what is to be looked at before it."""
        steps = self.engine.steps
        while self.engine.steps == steps:
            begun = time.perf_counter()
            x, y = self._next()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            seconds = time.perf_counter() - begun
            if self.engine.steps == steps:
                self.looks[steps] = self.looks.get(steps, 0.0) + seconds
            else:
                self.steps.append(seconds / len(x))


def share_of_looks(steps: int, relative: float) -> float:
    """Of the time of so many steps, if every look after the first takes `relative` times as long as a step."""
    looks = relative * sum(is_due(step) for step in range(2, steps + 1))
    return looks / (steps + looks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print(
        f"{'':13s} {'first step':>10s} {'first look':>10s} {'later looks':>12s} {'later steps':>19s}"
        f" {'looks in 1,000':>14s} {'10,000 steps':>13s} {'other':>7s}"
    )
    for name, (make, shape, batch) in CASES.items():
        with_looks, without = (Training(make, shape, batch, looks=looks) for looks in (True, False))
        for i in range(steps):
            for each in (with_looks, without) if i % 2 else (without, with_looks):
                each.step()
            if i == 0:
                with_looks.guards = without.guards = 0.0
        usual = statistics.median(without.steps[1:])
        low, median, high = statistics.quantiles([a / b for a, b in zip(with_looks.steps[1:], without.steps[1:])], n=4)
        first, *later = [seconds / (usual * batch) for _, seconds in sorted(with_looks.looks.items())]
        looks = statistics.median(later)
        other = without.guards / sum(s * batch for s in without.steps[1:])
        print(
            f"{name:13s} {with_looks.steps[0] / usual:9.1f}x {first:9.1f}x {looks:11.1f}x"
            f" {median:7.3f} ({low:.2f}–{high:.2f})"
            f" {share_of_looks(1000, looks):14.2%} {share_of_looks(10_000, looks):13.2%} {other:7.2%}"
        )


if __name__ == "__main__":
    main()
