"""Shadow models and attacks are pieces of work that several processes may share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lmdp.app.together import shared
from lmdp.processes import Group
from tests.processes.conftest import trio as trio
from tests.processes.crew import Crew


def by(k: int) -> tuple[int, int]:
    """The piece, and who did it."""
    return k, dist.get_rank()


def seven() -> list[tuple[int, int]]:
    return shared(Group())([partial(by, k) for k in range(7)])


def test_every_process_does_its_share_and_has_all_results_in_their_order(trio: Crew) -> None:
    for answer in trio(seven):
        assert answer == [(k, k % 3) for k in range(7)]


def test_one_process_does_all() -> None:
    assert shared(Group())([lambda: "a", lambda: "b"]) == ["a", "b"]


def estimated(out: Path, processes: int) -> dict[str, Any]:
    settings = ["--model", "s-cnn", "--shadow", "mnist-5k", "--seed", "0", "--shadow-models", "2"]
    settings += ["--shadow-epochs", "1"]
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *start, "-m", "lmdp", "risk", *settings, "--out", str(out), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.mark.slow
def test_lmdp_risk_under_torchrun_writes_what_one_process_writes(tmp_path: Path) -> None:
    one, two = estimated(tmp_path / "one.json", 1), estimated(tmp_path / "two.json", 2)
    for told in (one, two):
        for name in ("train_seconds", "attack_seconds"):
            told["shadow"].pop(name)
    assert one == two
