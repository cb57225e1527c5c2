"""The three measurements: seconds in turns, peak memory alone in a process, and the error against one by one."""

from __future__ import annotations

import copy
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.bench.cases import CASES, Case
from lmdp.bench.contenders import contenders

STATUS = Path("/proc/self/status")


def step_seconds(
    case: Case, names: Iterable[str], repeats: int, say: Callable[[str], None], channels_last: bool = False
) -> dict[str, list[float]]:
    """Seconds per step of every contender, in turns, after two steps to warm up. One that fails is said, not hidden."""
    x, y = case.batch()
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    known, steps = contenders()[0], {}
    for name in names:
        model = case.model()
        if channels_last and x.dim() == 4:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            step = known[name](model, x, y)
            step()
            step()
            steps[name] = step
        except (RuntimeError, ValueError, TypeError) as error:
            say(f"  {name} does not run on {case.title}: {str(error).splitlines()[0][:100]}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_memory(case: str, contender: str) -> int | None:
    """Bytes above the idle process at the highest point of three steps, in a fresh process; None if it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "lmdp.bench.measure", case, contender]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def _peak_here(case: Case, contender: str) -> int:
    prepare = contenders()[0][contender]
    x, y = case.batch()
    if contender.startswith("opacus"):
        import opacus  # noqa: F401  (its own size is not counted)
    before = _reset_peak()
    step = prepare(case.model(), x, y)
    for _ in range(3):
        step()
    return _peak() - before


def _reset_peak() -> int:
    """Forget the peak so far where the system allows it. Returns what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def exactness(case: Case, examples: int = 4) -> float:
    """Largest error of a clipped, un-noised gradient against one example at a time, relative to its largest entry."""
    x, y = case.batch(examples)
    model = case.model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    lmdp.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=examples),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        method="dpsgd",
        poisson_sampling=False,
    )
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in plain.named_parameters()}
    for i in range(examples):
        gradient = _one(plain, x[i : i + 1], y[i : i + 1])
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        for name, g in gradient.items():
            total[name] += g * min(1.0, 1.0 / norm) / examples
    return max(_relative(p.grad, total[name]) for name, p in model.named_parameters() if p.grad is not None)


def _one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


if __name__ == "__main__":
    sys.stdout.write(f"{_peak_here(CASES[sys.argv[1]], sys.argv[2])}\n")
    sys.stdout.flush()
    os._exit(0)  # a peer's finaliser must not turn a measurement into a failure
