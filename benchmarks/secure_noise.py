"""`python benchmarks/secure_noise.py`: what the defence against attacks on floating-point noise costs, in one run.

Fast and secure take turns: first the noise of D-CNN alone, then whole private steps on a batch of 256.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.app.bench.cases import CASES
from lmdp.private.noise import Entropy, Secure


def in_turns(work: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, act in work.items():
            start = time.perf_counter()
            act()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def private_step(secure: bool, batch: int) -> Callable[[], None]:
    case = CASES["dcnn"]
    x, y = case.batch(batch)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lmdp.PrivacyEngine(secure_mode=secure).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    parameters = list(CASES["dcnn"].model().parameters())
    sources = {"fast": Entropy().noise(0), "secure": Secure().noise(0)}
    noise = in_turns({name: lambda s=s: s.like(parameters, 1.0) for name, s in sources.items()}, options.repeats)
    steps = {name: private_step(name == "secure", options.batch) for name in ("fast", "secure")}
    whole = in_turns(steps, options.repeats)
    count = sum(p.numel() for p in parameters)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.repeats} repeats, ratios of medians")
    for title, medians in (
        (f"noise for {count} parameters", noise),
        (f"private step of D-CNN, batch {options.batch}", whole),
    ):
        print(
            f"{title:40} fast 1.00   secure {medians['secure'] / medians['fast']:.2f}   (fast {medians['fast']:.4f} s)"
        )


if __name__ == "__main__":
    main()
