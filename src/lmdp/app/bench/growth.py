"""`growth`: what happens to the price of privacy as batches, models and sequences grow, and what surrounds a step.

batch       seconds per example of D-CNN from small to large batches: flat, if nothing grows faster than the batch
depth       milliseconds that a private step adds per layer, on deep models whose layers do next to nothing
length      a transformer's ratio to SGD on longer and longer sequences: attention is quadratic for both
loop        everything in a training besides the step itself
start       seconds until `lmdp --help` and `import lmdp` are done
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lmdp.app.bench.cases import CASES, Case, Transformer
from lmdp.app.bench.contenders import OURS, SGD
from lmdp.app.bench.loop import rest_of_the_loop, start_up
from lmdp.app.bench.measure import Say, in_turns, prepared, spread, warm
from lmdp.app.bench.run import check_steps, surroundings

SHORT = 5
"""Models whose step takes milliseconds are timed this many times as often."""


@dataclass(frozen=True)
class Sizes:
    """What is measured. Tests take less."""

    batches: Sequence[int] = (64, 128, 256, 512, 1024)
    layers: int = 64
    blocks: int = 24
    lengths: Sequence[int] = (128, 256, 512, 1024)
    examples: int = 10_000
    batch: int = 256
    launches: int = 5


def growth(
    *, steps: int = 9, sizes: Sizes | None = None, out: Path | None = None, say: Say = lambda line: None
) -> dict[str, Any]:
    """Measure and return everything; with `out`, also write growth.json there. `growth_text` prints it."""
    check_steps(steps)
    sizes = sizes or Sizes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = surroundings(steps) | {
            "contender": OURS,
            "batch": by_batch(sizes.batches, steps, say),
            "depth": by_depth(sizes.layers, sizes.blocks, SHORT * steps, say),
            "length": by_length(sizes.lengths, steps, say),
            "loop": rest_of_the_loop(sizes.examples, sizes.batch, say),
            "start": start_up(sizes.launches, say),
        }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "growth.json").write_text(json.dumps(measured, indent=1))
    return measured


def by_batch(batches: Sequence[int], steps: int, say: Say) -> dict[str, Any]:
    """Seconds per example at every size; `flatness` is the dearest example over the cheapest."""
    case = CASES["dcnn"]
    say(f"batch: D-CNN, batches of {', '.join(map(str, batches))}")
    seconds = _both({size: (case, size) for size in batches}, steps)
    measured: dict[str, Any] = {"seconds_per_example": {}, "flatness": {}}
    for name in (SGD, OURS):
        rows = [{"batch": size} | spread([s / size for s in seconds[size, name]]) for size in batches]
        medians = [row["median"] for row in rows]
        measured["seconds_per_example"][name] = rows
        measured["flatness"][name] = max(medians) / min(medians)
    measured["ratio"] = [{"batch": size} | _ratio(seconds[size, OURS], seconds[size, SGD]) for size in batches]
    return measured


def by_depth(layers: int, blocks: int, steps: int, say: Say) -> list[dict[str, Any]]:
    """Milliseconds per module with parameters that a private step takes longer than a plain one.

    The wide transformer has fifteen times the parameters of the narrow one: what it adds beyond that is noise for them
    and their per-example gradients, not overhead.
    """
    mlp = Case(f"MLP of {layers} layers, width 64, batch 32", lambda: _mlp(layers), (32, 64))
    cases = {"mlp": mlp, "narrow": _encoder(blocks, 16), "wide": _encoder(blocks, 64)}
    say(f"depth: {'; '.join(case.title for case in cases.values())}")
    seconds = _both({name: (case, None) for name, case in cases.items()}, steps)
    rows = []
    for name, case in cases.items():
        added = [1e3 * (ours - plain) for ours, plain in zip(seconds[name, OURS], seconds[name, SGD])]
        count = _layers(case.model())
        row = {
            "model": case.title,
            "layers": count,
            "milliseconds": {who: spread([1e3 * s for s in seconds[name, who]]) for who in (SGD, OURS)},
            "added_per_layer": spread([ms / count for ms in added]),
        }
        rows.append(row | ({"added_per_block": spread([ms / blocks for ms in added])} if case is not mlp else {}))
    return rows


def by_length(lengths: Sequence[int], steps: int, say: Say) -> dict[str, Any]:
    """Ratio to SGD at every length; `growth` is the largest ratio over that of the shortest sequence."""
    say(f"length: transformer of 2 blocks, width 128, batch 8, sequences of {', '.join(map(str, lengths))}")
    cases = {n: (Case(f"{n} tokens", lambda: Transformer(128, 2), (8, n, 128)), None) for n in lengths}
    seconds = _both(cases, steps)
    rows = [{"tokens": n} | _ratio(seconds[n, OURS], seconds[n, SGD]) for n in lengths]
    sgd_seconds = [spread(seconds[n, SGD])["median"] for n in lengths]
    growth = max(row["median"] for row in rows) / rows[0]["median"]
    return {"ratio": rows, "sgd_seconds": sgd_seconds, "growth": growth}


def _ratio(ours: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """Of steps made in the same turn."""
    return spread([a / b for a, b in zip(ours, plain)])


def _both(cases: Mapping[Any, tuple[Case, int | None]], steps: int) -> dict[tuple[Any, str], list[float]]:
    """Seconds of SGD's and our step on every case with its batch size, all in turns."""
    ready = {
        (key, name): warm(prepared(case, name, case.batch(size)))
        for key, (case, size) in cases.items()
        for name in (SGD, OURS)
    }
    return in_turns(ready, steps)


def _mlp(layers: int) -> nn.Module:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def _encoder(blocks: int, width: int) -> Case:
    title = f"transformer of {blocks} blocks, width {width}, 16 tokens, batch 8"
    return Case(title, lambda: Transformer(width, blocks), (8, 16, width))


def _layers(model: nn.Module) -> int:
    """Modules with parameters of their own."""
    return sum(1 for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
