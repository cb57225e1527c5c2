"""`torchrun … -m lmdp train`: the same run folder as of one process, written by the first; killed, it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from lmdp.app import cli
from lmdp.app.cli import main
from lmdp.app.progress import Interrupted
from tests.processes.crew import Crew

ARGUMENTS = (
    "train --data digits --method lm --emphasis 0 --epsilon 4 --delta 1e-4 --epochs 1 --batch-size 200 --size 28 "
    "--quiet --holdout 0 --out"
)


def torchrun(*words: str, processes: int = 2) -> subprocess.Popen[str]:
    """In a session of its own, so that all of it can be ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, "-m", "lmdp", *words], env=environment, start_new_session=True, **pipes)


def away(one: Path, other: Path) -> float:
    mine, others = (load_file(run / "model.safetensors") for run in (one, other))
    return max(float((mine[name] - others[name]).norm() / others[name].norm()) for name in mine)


def in_a_crew(words: list[str]) -> int:
    """What torchrun sets, in processes that are there already."""
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    return main(words)


def by_a_crew(words: list[str], folder: Path) -> None:
    crew = Crew(2, folder)
    try:
        assert crew(in_a_crew, words) == [0, 0]
    finally:
        crew.close()


def by_torchrun(words: list[str], _: Path) -> None:
    started = torchrun(*words, "--json")
    out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    privacy = json.loads((Path(words[words.index("--out") + 1]) / "privacy.json").read_text())
    assert json.loads(out)["privacy"] == privacy  # printed by one process alone


@pytest.mark.parametrize("start", [by_a_crew, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_several_processes_leave_the_run_of_one(start: Callable[[list[str], Path], None], tmp_path: Path) -> None:
    assert main([*ARGUMENTS.split(), str(tmp_path / "one"), "--seed", "3", "--max-physical-batch-size", "100"]) == 0
    start([*ARGUMENTS.split(), str(tmp_path / "two"), "--seed", "3"], tmp_path)
    privacy = json.loads((tmp_path / "two" / "privacy.json").read_text())
    assert privacy["processes"] == 2
    alone = json.loads((tmp_path / "one" / "privacy.json").read_text())
    same = ("epsilon", "steps", "noise_multiplier", "sample_rate", "expected_batch_size", "dataset_size", "reasons")
    assert {name: privacy[name] for name in same} == {name: alone[name] for name in same}
    assert away(tmp_path / "two", tmp_path / "one") <= 1e-5
    assert {p.name for p in (tmp_path / "two").iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}


def test_commands_that_run_in_one_process_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for words in (["doctor"], ["audit", "nowhere", "--epsilon"]):
        assert main(words) == 2
        assert "runs in one process" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("told", "begins"),
    [
        ({}, "lmdp train"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, "torchrun --nproc-per-node 3 -m lmdp train"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
            "torchrun --nnodes 2 --nproc-per-node 2 -m lmdp train",
        ),
    ],
)
def test_a_run_that_was_stopped_says_how_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: dict[str, str], begins: str
) -> None:
    def stopped(*_: Any) -> Any:
        raise Interrupted("stopped after step 3 of 9")

    monkeypatch.setitem(cli.COMMANDS, "train", stopped)
    for name, value in ({"RANK": "0"} | told).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--out", "run"]) == 130
    assert f"3 of 9. Continue with: {begins} --out run --resume\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_without_privacy_is_refused_in_words_once(tmp_path: Path) -> None:
    words = [*ARGUMENTS.split(), str(tmp_path / "run"), "--method", "sgd"]
    started = torchrun(*words)
    _, err = started.communicate(timeout=300)
    assert started.returncode != 0
    assert err.count("lmdp: error: method is 'sgd', which is not private, and trains in one process only") == 1


@pytest.mark.slow
@pytest.mark.parametrize("resumed_by", [1, 2, 3])
def test_a_run_of_which_a_process_was_killed_goes_on_with_any_number(tmp_path: Path, resumed_by: int) -> None:
    run = tmp_path / "run"
    words = [*ARGUMENTS.split(), str(run), "--seed", "3", "--epochs", "6"]
    started = torchrun(*words)
    deadline = time.monotonic() + 200
    while not list(run.glob("checkpoints/step-0000000[1-9]*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True)
    workers = sorted(int(pid) for pid in children.stdout.split())
    begin = time.monotonic()
    os.kill(workers[-1], signal.SIGKILL)
    _, err = started.communicate(timeout=100)
    assert time.monotonic() - begin < 60
    assert started.returncode != 0
    assert err.count("another process of this training is gone") == 1, err
    if resumed_by == 1:
        assert main([*words, "--resume"]) == 0
    else:
        again = torchrun(*words, "--resume", processes=resumed_by)
        _, err = again.communicate(timeout=300)
        assert again.returncode == 0, err
    whole = tmp_path / "whole"
    assert main([*words[:-5], str(whole), *words[-4:], "--max-physical-batch-size", "100"]) == 0
    steps = [json.loads((folder / "privacy.json").read_text())["steps"] for folder in (run, whole)]
    assert steps[0] == steps[1]
    assert away(run, whole) <= 1e-4
