"""Runs of the command line in a child process that can be killed at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from lmdp.app import cli
from tests.app.test_cli import make_npz

EPOCHS, STEPS = 6, 24


def arguments(spec: str, out: Path, method: str, *more: str) -> list[str]:
    shape = ["--model", "s-cnn", "--size", "14", "--sample-rate", "0.25", "--epochs", str(EPOCHS), "--momentum", "0.5"]
    return ["train", *shape, "--data", spec, "--method", method, "--out", str(out), "--quiet", *more]


def make_data(folder: Path) -> str:
    return make_npz(folder / "private.npz", train=120, test=60)


def start(command: list[str]) -> int:
    """The process id of a fork that runs the command; its modules and caches are those of this process."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = cli.main(command)
        finally:
            os._exit(code)
    return child


def killed_after(command: list[str], seconds: float) -> bool:
    """Start, wait, kill. False if it was done before."""
    child = start(command)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def seen_steps(run: Path) -> int:
    """The newest step of which anything can be seen: in a checkpoint, even an unfinished one, or a row of metrics."""
    names = [path.name for path in (run / "checkpoints").iterdir()] if (run / "checkpoints").is_dir() else []
    steps = [int(re.findall(r"step-(\d+)", name)[0]) for name in names]
    metrics = run / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return max([0, *steps, *(json.loads(row)["step"] for row in rows)])


def stated_steps(run: Path) -> int:
    path = run / "privacy.json"
    return int(json.loads(path.read_text())["steps"]) if path.exists() else 0
