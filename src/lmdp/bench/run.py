"""`run`: measure, print a table of ratios, write JSON and a plot.

Absolute times on a shared machine mean nothing; the ratio within one run does. Every contender makes its steps in turn
with the others, and the median is compared with that of non-private SGD in the same memory format.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lmdp.bench.cases import CASES
from lmdp.bench.contenders import SGD, contenders
from lmdp.bench.measure import exactness, peak_memory, step_seconds
from lmdp.bench.plot import bars


def run(
    *,
    models: Sequence[str] = tuple(CASES),
    steps: int = 9,
    only: Sequence[str] = (),
    memory: bool = True,
    channels_last: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure and return everything; with `out`, also write bench.json and bench.svg there.

    models  of scnn, dcnn, resnet18, vgg16, transformer
    steps   how many steps of every contender are timed
    only    parts of contenders' names; SGD is always in
    """
    if unknown := [name for name in models if name not in CASES]:
        raise ValueError(f"models are {unknown}; they must be of {', '.join(CASES)}")
    if steps < 2:
        raise ValueError(f"steps is {steps}; a median with quartiles needs 2 or more")
    known, missing = contenders()
    for sentence in missing:
        say(sentence)
    names = [name for name in known if name == SGD or not only or any(part in name for part in only)]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "channels_last": channels_last,
        "missing": missing,
        "models": {},
    }
    for name in models:
        case = CASES[name]
        say(f"\n{case.title}: ratio to {SGD}, median of {steps} steps (quartiles); peak memory likewise")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seconds = step_seconds(case, names, steps, say, channels_last)
            peaks = {contender: peak_memory(name, contender) for contender in seconds} if memory else {}
            error = exactness(case)
        rows = _rows(seconds, peaks)
        found["models"][name] = {"title": case.title, "seconds": seconds, "rows": rows, "error": error}
        for contender, row in rows.items():
            held = "" if row["memory"] is None else f"   {row['memory']:5.2f}"
            say(f"  {contender:26s} {row['time']:5.2f}  ({row['low']:.2f} – {row['high']:.2f}){held}")
        say(f"  lmdp against one example at a time: largest relative error {error:.1e}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(found, indent=1))
        (out / "bench.svg").write_text(bars(found["models"]))
    return found


def table(found: dict[str, Any]) -> str:
    """Ratios to non-private SGD: time, and peak memory above baseline where it was measured."""
    names = list(dict.fromkeys(name for model in found["models"].values() for name in model["rows"]))
    lines = [f"{'ratio to ' + SGD + ': time (memory)':34}" + "".join(f"{name:>16}" for name in found["models"])]
    for name in names:
        cells = [_cell(model["rows"].get(name)) for model in found["models"].values()]
        lines.append(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join([*lines, *found["missing"]])


def _cell(row: dict[str, float | None] | None) -> str:
    if row is None:
        return "–"
    return f"{row['time']:.2f}" + ("" if row["memory"] is None else f" ({row['memory']:.2f})")


def _rows(seconds: dict[str, list[float]], peaks: dict[str, int | None]) -> dict[str, dict[str, float | None]]:
    base, base_peak = statistics.median(seconds[SGD]), peaks.get(SGD)
    rows: dict[str, dict[str, float | None]] = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles([v / base for v in values], n=4)
        peak = peaks.get(name)
        rows[name] = {
            "time": middle,
            "low": low,
            "high": high,
            "memory": peak / base_peak if peak is not None and base_peak else None,
        }
    return rows
