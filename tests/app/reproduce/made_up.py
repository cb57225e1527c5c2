"""Results that nobody measured, to draw and to judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdp.app.cells.cell import RISK, STEP, Cell
from lmdp.app.cells.store import Store
from lmdp.app.reproduce.grid import Grid
from lmdp.app.reproduce.scales import SCALES

LAYERS = ("conv1", "conv2", "fc1", "fc2")


def grid(scale: str = "smoke", seeds: int = 3) -> Grid:
    return Grid(SCALES[scale], ("mnist",), seeds)


def result(cell: Cell, leak: float = 0.55, accuracy: float = 0.9, bias: float = 1.0) -> dict[str, Any]:
    """Plausible, and a little different for every seed: the same difference for all methods."""
    off = 0.003 * cell.seed
    if cell.kind == STEP:
        names = ("non-private SGD", "lmdp dpsgd", "lmdp lm (private)")
        return {
            "title": "made up",
            "turns": {name: [1.0 + 0.01 * i + 0.001 * k for k in range(5)] for i, name in enumerate(names)},
            "peak_bytes": {name: 100 + i for i, name in enumerate(names)},
            "failed": {},
        }
    leaks = {
        name: {
            "auc": leak + off + 0.01 * i,
            "interval": [leak - 0.02, leak + 0.02],
            "accuracy": 0.5 + (leak - 0.5) / 2,
            "error_rate": 0.45 - 0.01 * i + off,
            "tpr_at_1pct": 0.02,
        }
        for i, name in enumerate(LAYERS)
    }
    both = {name: [0.9 - 0.1 * i + off, 0.88 - 0.1 * i + off] for i, name in enumerate(LAYERS)}
    common = {"heldout": leaks, "in_sample": both, "controls": {}, "seconds": 1.0}
    if cell.kind == RISK:
        return {**common, "weight_rates": dict.fromkeys(LAYERS, 0.4), "examples": 100}
    return {
        **common,
        "canaries": leaks,
        "accuracy": accuracy + off,
        "curve": [(float(i), accuracy + off - 0.01 * (6 - i)) for i in range(1, 7)],
        "bias": [] if cell["method"] == "sgd" else [(float(i), bias * (1 + off) / i) for i in range(1, 9)],
        "epsilon": cell["epsilon"],
    }


def stored(out: Path, cells: Sequence[Cell], **values: float) -> Store:
    store = Store(out)
    for cell in cells:
        store.put(cell, result(cell, **values))
    return store
