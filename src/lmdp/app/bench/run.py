"""`run`: measure, and return all of it; write JSON and a plot.

Absolute times on a shared machine mean nothing; the ratio within one run does. Every contender makes its steps in turn
with the others, and each is compared with the step that non-private SGD made in the same turn and memory format.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmdp.app.bench.cases import CASES, case_name
from lmdp.app.bench.contenders import SGD, attached, chosen, contenders
from lmdp.app.bench.measure import Say, exactness, peak_memory, spread, step_seconds
from lmdp.app.bench.plot import bars


def run(
    *,
    models: Sequence[str] = tuple(CASES),
    steps: int = 9,
    only: Sequence[str] = (),
    memory: bool = True,
    channels_last: bool = False,
    out: Path | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure and return everything; with `out`, also write bench.json and bench.svg there. `table` prints it.

    models  names of `CASES`
    steps   how many steps of every contender are timed
    only    parts of contenders' names; SGD is always in
    """
    cases = list(dict.fromkeys(case_name(name) for name in models))
    check_steps(steps)
    names = chosen(only)
    missing = contenders()[1]
    for sentence in missing:
        say(sentence)
    measured = surroundings(steps) | {"missing": missing, "models": {}}
    for name in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured["models"][name] = _measured(name, names, steps, memory, channels_last, say)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(measured, indent=1))
        (out / "bench.svg").write_text(bars(measured["models"]))
    return measured


def plans(models: Sequence[str] = ("dcnn", "transformer"), *, channels_last: bool = False) -> dict[str, str]:
    """`engine.plan()` of these models after one step: which rule every module uses, and why, on data made up."""
    texts = {}
    for name in dict.fromkeys(case_name(name) for name in models):
        case = CASES[name].laid_out(channels_last=channels_last)
        engine, step = attached(case.model(), *case.batch(), "lm", "private")
        step()
        texts[name] = f"{case.title}, {case.memory_format}\n{engine.plan(numbers=True)}"
    return texts


def check_steps(steps: int) -> None:
    if steps < 2:
        raise ValueError(f"steps is {steps}; a median with quartiles needs 2 or more")


def surroundings(steps: int) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "loops": _loops(),
        "steps": steps,
    }


def _loops() -> str:
    """Whether lmdp's inner loops are compiled here, as any plan says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, _ = attached(nn.Linear(1, 1), torch.zeros(1, 1), torch.zeros(1), "dpsgd", "private")
    return engine.plan().loops


def _measured(
    name: str, names: Sequence[str], steps: int, memory: bool, channels_last: bool, say: Say
) -> dict[str, Any]:
    """Everything about one model."""
    case = CASES[name].laid_out(channels_last=channels_last)
    say(f"{case.title}, {case.memory_format}")
    seconds, failed = step_seconds(case, names, steps, say)
    peaks: dict[str, int] = {}
    for contender in seconds if memory else ():
        say(f"  peak memory: {contender}")
        try:
            peaks[contender] = peak_memory(name, contender, channels_last=channels_last)
        except RuntimeError as error:
            failed[contender] = str(error)
            say(f"  {contender} fails: {error}")
    return {
        "title": case.title,
        "memory_format": case.memory_format,
        "seconds": seconds,
        "peak_bytes": peaks,
        "rows": _rows(seconds, peaks),
        "failed": failed,
        "error": exactness(case),
    }


def _rows(seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, dict[str, float | None]]:
    """Ratios to SGD; of SGD itself to its median, which shows how much the machine drifted.

    Turn by turn: on a machine that others use as well, a turn may take twice as long as the next.
    """
    rows: dict[str, dict[str, float | None]] = {}
    usual = statistics.median(seconds[SGD])
    for name, values in seconds.items():
        base = [usual] * len(values) if name == SGD else seconds[SGD]
        time = spread([value / plain for value, plain in zip(values, base)])
        memory = peaks[name] / peaks[SGD] if name in peaks and peaks.get(SGD) else None
        rows[name] = {"time": time["median"], "low": time["low"], "high": time["high"], "memory": memory}
    return rows
