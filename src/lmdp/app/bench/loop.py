"""What surrounds a step: the rest of a real training's loop, and the start of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmdp.app.bench.measure import Say, spread


def rest_of_the_loop(examples: int, batch: int, say: Say) -> dict[str, Any]:
    """One epoch of `lmdp train` on D-CNN with a stopwatch: seconds per step, by part, and their shares of the step.

    Evaluation on test data is not counted. Epsilon is asked for by the progress and the metrics, and counted once.
    """
    say(f"loop: lmdp train, D-CNN, {examples} examples from arrays, batches of about {batch}")
    with tempfile.TemporaryDirectory() as folder:
        calls = _watched_training(Path(folder), examples, batch)
    steps = len(calls["release"])  # batches that are only looked at make none
    seconds = {part: sum(values) / steps for part, values in calls.items()}
    logging = seconds["logging"] - seconds["evaluation"]
    whole = seconds["stepping"] + logging
    parts = {
        "sampling and loading": seconds["loading"],
        "noise": seconds["noise"],
        "accountant": seconds["ledger"] + seconds["epsilon"],
        "progress, metrics, checkpoints": logging - seconds["epsilon"],
    }
    return {
        "examples": examples,
        "batch": batch,
        "steps": steps,
        "seconds_per_step": whole,
        "seconds": parts,
        "shares": {name: part / whole for name, part in parts.items()},
        "share": sum(parts.values()) / whole,
    }


def _watched_training(folder: Path, examples: int, batch: int) -> dict[str, list[float]]:
    draw = np.random.default_rng(0)
    tests = 10
    np.savez(
        folder / "data.npz",
        num_classes=10,
        x_train=draw.integers(0, 256, (examples, 32, 32, 3), np.uint8),
        y_train=np.arange(examples) % 10,
        x_test=draw.integers(0, 256, (tests, 32, 32, 3), np.uint8),
        y_test=np.arange(tests) % 10,
    )
    options = {
        "model": "d-cnn",
        "data": f"npz:{folder / 'data.npz'}",
        "method": "lm",
        "weights": "private",
        "sample-rate": str(batch / examples),
        "epochs": "1",
        "out": str(folder / "run"),
    }
    command = [sys.executable, "-m", "lmdp.app.bench.watch", str(folder / "seconds.json"), "train"]
    done = subprocess.run(
        [*command, *(word for name, value in options.items() for word in (f"--{name}", value))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    if done.returncode != 0:
        raise RuntimeError(f"lmdp train failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    seconds: dict[str, list[float]] = json.loads((folder / "seconds.json").read_text())
    return seconds


IMPORTS = ("import torch", "import lmdp", "lmdp.PrivacyEngine")
TIMED = """
import sys, time
for words in sys.argv[1:]:
    begin = time.perf_counter()
    exec(words)
    print(time.perf_counter() - begin)
"""


def start_up(launches: int, say: Say) -> dict[str, dict[str, float]]:
    """Seconds of `lmdp --help`; and of importing torch and, after it, of lmdp and of what training needs."""
    say(f"start: {launches} fresh processes each")
    seconds: dict[str, list[float]] = {name: [] for name in ("lmdp --help", *IMPORTS)}
    for _ in range(launches):
        begin = time.perf_counter()
        _python("-m", "lmdp", "--help")
        seconds["lmdp --help"].append(time.perf_counter() - begin)
        for name, printed in zip(IMPORTS, _python("-c", TIMED, *IMPORTS).split()):
            seconds[name].append(float(printed))
    return {name: spread(values) for name, values in seconds.items()}


def _python(*words: str) -> str:
    return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout
