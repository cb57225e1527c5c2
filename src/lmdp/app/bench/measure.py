"""The three measurements: seconds in turns, peak memory alone in a process, and the error against one by one."""

from __future__ import annotations

import copy
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.app.bench.cases import CASES, Case
from lmdp.app.bench.contenders import SGD, Step, contenders, hooked, mean_loss

Say = Callable[[str], None]
Key = TypeVar("Key")
STATUS = Path("/proc/self/status")


def step_seconds(
    case: Case, names: Iterable[str], repeats: int, say: Say
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per step of every contender, in turns; and why, for each that cannot run this model."""
    batch = case.batch()
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for name in names:
        say(f"  warm-up: {name}")
        try:
            steps[name] = warm(prepared(case, name, batch))
        except Exception as error:  # a peer may raise anything; without SGD there is nothing to compare with
            if name == SGD:
                raise
            failed[name] = reason(error)
            say(f"  {name} does not run here: {failed[name]}")
    say(f"  time: {repeats} steps of {len(steps)} contenders, in turns")
    return in_turns(steps, repeats), failed


def prepared(case: Case, name: str, batch: tuple[Tensor, Tensor]) -> Step:
    """A contender's step on a fresh model."""
    return contenders()[0][name](case.model(hooked=hooked(name)), *batch)


def warm(step: Step) -> Step:
    step()
    step()
    return step


def in_turns(steps: Mapping[Key, Step], repeats: int) -> dict[Key, list[float]]:
    """Seconds of each step. All make one step before any makes the next: a slow minute of the machine hits all."""
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    for _ in range(repeats):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[key].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def reason(error: BaseException) -> str:
    """The first line of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]


def peak_memory(case: str, contender: str, *, channels_last: bool = False) -> int:
    """Bytes above the idle process at the highest point of three steps, in a fresh process."""
    layout = ["channels_last"] if channels_last else []
    command = [sys.executable, "-W", "ignore", "-m", "lmdp.app.bench.measure", case, contender, *layout]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"peak memory: {said[-1][:100]}")
    return int(done.stdout.split()[-1])


def _peak_here(case: Case, contender: str) -> int:
    batch = case.batch()
    if hooked(contender):
        import opacus  # noqa: F401  (its own size is not counted)
    before = forget_peak()
    step = prepared(case, contender, batch)
    for _ in range(3):
        step()
    return peak() - before


def forget_peak() -> int:
    """Forget the peak so far where the system allows it. Returns what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak()
    return _status("VmRSS")


def peak() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def exactness(case: Case, examples: int = 4) -> dict[str, float]:
    """Largest error of a batch's gradient against one example at a time, relative to the largest entry of its layer.

    Of its layer and not of its tensor: the bias of keys in attention has a gradient of nothing but rounding.

    double  lmdp's clipped gradient without noise, in double precision: whether it computes the right thing
    single  the same in single precision
    sgd     SGD's own gradient in single precision: a batch and its examples alone round differently for anybody
    """
    return {
        "double": _error(case, torch.float64, 1.0, examples),
        "single": _error(case, torch.float32, 1.0, examples),
        "sgd": _error(case, torch.float32, None, examples),
    }


def _error(case: Case, dtype: torch.dtype, clip_norm: float | None, examples: int) -> float:
    x, y = case.batch(examples)
    x, model = x.to(dtype) if x.is_floating_point() else x, case.model().to(dtype)
    expected = _one_by_one(copy.deepcopy(model), x, y, math.inf if clip_norm is None else clip_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if clip_norm is not None:
        lmdp.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=examples),
            noise_multiplier=0.0,
            max_grad_norm=clip_norm,
            method="dpsgd",
            poisson_sampling=False,
        )
    mean_loss(model(x), y).backward()
    optimizer.step()
    errors = []
    for layer in lmdp.LayerMap.of(model):
        largest = max(float(expected[name].abs().max()) for name in layer.parameters)
        gradients = {name: model.get_parameter(name).grad for name in layer.parameters}
        off = [float((g.double() - expected[name]).abs().max()) for name, g in gradients.items() if g is not None]
        errors.append(max(off) / max(largest, 1e-30))
    return max(errors)


def _one_by_one(model: nn.Module, x: Tensor, y: Tensor, clip_norm: float) -> dict[str, Tensor]:
    """The mean of clipped gradients, each example by itself."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        mean_loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        gradient = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        for name, g in gradient.items():
            total[name] += g * min(1.0, clip_norm / norm) / len(x)
    return total


if __name__ == "__main__":
    measured = CASES[sys.argv[1]].laid_out(channels_last="channels_last" in sys.argv[3:])
    sys.stdout.write(f"{_peak_here(measured, sys.argv[2])}\n")
    sys.stdout.flush()
    os._exit(0)  # a peer's finaliser must not turn a measurement into a failure
