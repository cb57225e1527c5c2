"""What `run` measured, as text: contenders down, models across."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from lmdp.app.bench.contenders import SGD

NAME, CELL, ACROSS = 25, 21, 5
ERRORS = {"lmdp, double precision": "double", "lmdp, single precision": "single", "SGD, single precision": "sgd"}
Model = dict[str, Any]


def table(measured: dict[str, Any]) -> str:
    """Time, peak memory where it was measured, and exactness, each against non-private SGD in the same format."""
    models: list[Model] = list(measured["models"].values())
    failures = [f"{name} fails on {model['title']}: {why}" for model in models for name, why in model["failed"].items()]
    groups = (_group(measured, models[i : i + ACROSS]) for i in range(0, len(models), ACROSS))
    return "\n".join(
        [*(line for group in groups for line in group), measured["loops"], *failures, *measured["missing"]]
    )


def _group(measured: dict[str, Any], models: list[Model]) -> list[str]:
    """The lines of as many models as fit beside each other."""
    names = list(dict.fromkeys(name for model in models for name in [*model["rows"], *model["failed"]]))
    lines = [
        f"time of a step as a ratio to {SGD} in the same turn: median (quartiles) of {measured['steps']},"
        f" {_threads(measured)}",
        *_header(models),
        *(_line(name, [_time(model, name) for model in models]) for name in names),
        _line("one SGD step", [_seconds(statistics.median(model["seconds"][SGD])) for model in models]),
    ]
    if any(model["peak_bytes"] for model in models):
        lines += [
            "",
            f"peak memory above the idle process, as a ratio to {SGD}",
            *(_line(name, [_memory(model, name) for model in models]) for name in names),
            _line("SGD's peak", [_megabytes(model["peak_bytes"].get(SGD)) for model in models]),
        ]
    return [
        *lines,
        "",
        "a batch's gradient without noise against one example at a time: largest error, relative to its layer",
        *(_line(name, [f"{model['error'][key]:.1e}" for model in models]) for name, key in ERRORS.items()),
        "",
    ]


def _threads(measured: dict[str, Any]) -> str:
    return "1 thread" if measured["threads"] == 1 else f"{measured['threads']} threads"


def _header(models: Iterable[Model]) -> list[str]:
    models = list(models)
    parts: list[Callable[[Model], str]] = [
        lambda model: model["title"].partition(", ")[0],
        lambda model: model["title"].partition(", ")[2],
        lambda model: model["memory_format"],
    ]
    return [_line("", [part(model) for model in models]) for part in parts]


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:{NAME}}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def _time(model: Model, name: str) -> str:
    row = model["rows"].get(name)
    if row is None:
        return "fails" if name in model["failed"] else "–"
    return f"{row['time']:.2f} ({row['low']:.2f}–{row['high']:.2f})"


def _memory(model: Model, name: str) -> str:
    row = model["rows"].get(name)
    if row is None or row["memory"] is None:
        return "fails" if name in model["failed"] else "–"
    return f"{row['memory']:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**20:.0f} MB"


def growth_text(measured: dict[str, Any]) -> str:
    """What `growth` measured, as text."""
    return "\n\n".join(part(measured) for part in (_batch, _depth, _length, _loop, _start))


def _batch(measured: dict[str, Any]) -> str:
    rows, flatness = measured["batch"]["seconds_per_example"], measured["batch"]["flatness"]
    ratios = measured["batch"]["ratio"]
    return "\n".join(
        [
            f"D-CNN, milliseconds per example: median (quartiles) of {measured['steps']} steps, {_threads(measured)}",
            _line("batch", [*rows, "ratio"]),
            *(
                _line(str(ratio["batch"]), [*(_spread(of[i], 1e3) for of in rows.values()), _spread(ratio)])
                for i, ratio in enumerate(ratios)
            ),
            _line("largest / smallest", [f"{flatness[name]:.2f}" for name in rows]),
        ]
    )


def _depth(measured: dict[str, Any]) -> str:
    lines = ["milliseconds that a private step adds per layer: median (quartiles)"]
    for row in measured["depth"]:
        block = f", {_spread(row['added_per_block'])} per block" if "added_per_block" in row else ""
        times = ", ".join(f"{name} {ms['median']:.1f}" for name, ms in row["milliseconds"].items())
        lines.append(f"  {row['model']}; {row['layers']} layers (steps: {times})")
        lines.append(f"    {_spread(row['added_per_layer'])} per layer{block}")
    return "\n".join(lines)


def _length(measured: dict[str, Any]) -> str:
    rows, contender = measured["length"]["ratio"], measured["contender"]
    return "\n".join(
        [
            f"transformer of 2 blocks, width 128, batch 8: {contender} as a ratio to {SGD}, median (quartiles)",
            _line("tokens", ["ratio", "one SGD step"]),
            *(
                _line(str(row["tokens"]), [_spread(row), _seconds(plain)])
                for row, plain in zip(rows, measured["length"]["sgd_seconds"])
            ),
            _line("largest / first", [f"{measured['length']['growth']:.2f}"]),
        ]
    )


def _loop(measured: dict[str, Any]) -> str:
    loop = measured["loop"]
    where = f"D-CNN, {loop['examples']} examples, batches of about {loop['batch']}, {loop['steps']} steps"
    lines = [f"the rest of the loop in lmdp train ({where}): milliseconds and share of a step"]
    lines += [f"  {name:32}{1e3 * s:8.2f} ms {loop['shares'][name]:8.2%}" for name, s in loop["seconds"].items()]
    total = sum(loop["seconds"].values())
    lines.append(f"  {'together':32}{1e3 * total:8.2f} ms {loop['share']:8.2%}")
    return "\n".join([*lines, f"  {'a whole step':32}{1e3 * loop['seconds_per_step']:8.2f} ms"])


def _start(measured: dict[str, Any]) -> str:
    lines = ["start-up, seconds in a fresh process: median (quartiles)"]
    return "\n".join([*lines, *(f"  {name:26}{_spread(row)}" for name, row in measured["start"].items())])


def _spread(row: dict[str, float], unit: float = 1.0) -> str:
    return f"{unit * row['median']:.2f} ({unit * row['low']:.2f}–{unit * row['high']:.2f})"
