"""What standardised filters cost: D-CNN plain and private, with and without them, in turns, CPU time of one thread.

OMP_NUM_THREADS=1 python benchmarks/standardised.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.models import build

BATCH, TURNS, FIRST = 32, 8, 2


def step_of(*, standardised: bool, private: bool) -> Callable[[], None]:
    model = build("d-cnn", (3, 32, 32), 10, standardised=standardised)
    data = TensorDataset(torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10)
    loader = DataLoader(data, batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if private:
        model, optimizer, loader = lmdp.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="dpsgd",
            poisson_sampling=False,
        )
    batches = (batch for _ in itertools.count() for batch in loader)

    def step() -> None:
        x, y = next(batches)
        images: Tensor = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        F.cross_entropy(model(images), y).backward()
        optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = list(itertools.product((False, True), (False, True)))
    steps = {kind: step_of(standardised=kind[0], private=kind[1]) for kind in kinds}
    taken: dict[tuple[bool, bool], list[float]] = {kind: [] for kind in kinds}
    for _ in range(TURNS):
        for kind, step in steps.items():
            begun = time.process_time()
            step()
            taken[kind].append((time.process_time() - begun) / BATCH * 1e3)
    for (standardised, private), each in taken.items():
        name = f"{'standardised' if standardised else 'as usual':14s}{'private' if private else 'plain':9s}"
        print(f"{name}{statistics.median(each[FIRST:]):6.2f} ms an example")


if __name__ == "__main__":
    main()
