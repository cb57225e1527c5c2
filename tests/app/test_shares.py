"""Shadow models, references and attacks are pieces of work that several processes may share, with the same results."""

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

from lmdp.app.cli import main
from lmdp.app.shares import AT_ONCE, handed_out, shared
from lmdp.app.together import follow, led
from lmdp.membership.instrument import attack_layers, unheard
from lmdp.membership.workers import Share, side_by_side
from lmdp.processes import Group
from tests.app.test_cli import SMALL, make_npz
from tests.membership.test_workers import layers
from tests.processes.conftest import trio as trio
from tests.processes.crew import Crew, Failed


def by(k: int) -> tuple[int, int]:
    """The piece, and who did it."""
    return k, dist.get_rank()


def seven() -> list[tuple[int, int]]:
    return list(shared(Group())([partial(by, k) for k in range(7)]))


def told_by_the_first(pieces: int) -> list[tuple[int, int]]:
    """The first process alone knows of the work."""
    with led() as group:
        if group.rank:
            follow(group)
            return []
        return list(handed_out(group)([partial(by, k) for k in range(pieces)]))


def test_every_process_does_its_share_and_has_all_results_in_their_order(trio: Crew) -> None:
    for answer in trio(seven):
        assert answer == [(k, k % 3) for k in range(7)]


def test_what_the_first_process_hands_out_is_done_by_all_and_comes_back_in_its_order(trio: Crew) -> None:
    for pieces in (0, 1, 3 * AT_ONCE + 2):
        first, *others = trio(told_by_the_first, pieces)
        assert first == [(k, k % 3) for k in range(pieces)]
        assert others == [[], []]


@pytest.mark.parametrize("share", [shared, handed_out])
def test_one_process_does_all(share: Any) -> None:
    assert list(share(Group())([lambda: "a", lambda: "b"])) == ["a", "b"]


def fails(k: int) -> None:
    if k == 1:
        raise ValueError("piece 1 cannot be done")


def told_to_fail() -> None:
    with led() as group:
        if group.rank:
            follow(group)
        else:
            list(handed_out(group)([partial(fails, k) for k in range(3)]))


def test_a_piece_that_fails_on_one_process_ends_all_with_its_words(trio: Crew) -> None:
    trio.begin(told_to_fail)
    answers = trio.answers()
    assert all(isinstance(answer, Failed) for answer in answers)
    assert all("piece 1 cannot be done" in answer.message for answer in answers)


def scores(share: Share) -> list[tuple[str, list[float]]]:
    collected, member = layers()
    results = attack_layers(collected, member, 0, lambda _: None, unheard, share)
    return [(result.attack, result.scores.tolist()) for result in results.values()]


def attacked_by_all() -> list[tuple[str, list[float]]]:
    with led() as group:
        if group.rank:
            follow(group)
            return []
        return scores(handed_out(group))


def test_attacks_by_several_processes_find_what_one_finds_to_the_last_bit(trio: Crew) -> None:
    assert trio(attacked_by_all)[0] == scores(side_by_side)


def by_torchrun(*words: str, processes: int = 2) -> None:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, "-m", "lmdp", *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def told_in(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    for name in ("train_seconds", "attack_seconds"):
        content.get("shadow", {}).pop(name, None)
    content.pop("seconds", None)
    return content


@pytest.mark.slow
def test_lmdp_audit_under_torchrun_writes_what_one_process_writes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    data = make_npz(tmp_path / "private.npz", train=400)
    for run in (one, two):
        given = ["--data", data, "--method", "dpsgd", "--seed", "3", "--holdout", "0.3", "--out", str(run), "--quiet"]
        assert main(["train", *SMALL, *given]) == 0
    options = ["--references", "3", "--white-box"]
    assert main(["audit", str(one), *options, "--quiet"]) == 0
    by_torchrun("audit", str(two), *options)
    assert told_in(one / "audit.json") == told_in(two / "audit.json")
    assert {p.name for p in (two / "references").iterdir()} == {p.name for p in (one / "references").iterdir()}


@pytest.mark.slow
def test_lmdp_compare_under_torchrun_measures_what_one_process_measures(tmp_path: Path) -> None:
    """Models that were trained together differ from those of one process by rounding, and so do their audits."""
    one, two = tmp_path / "one", tmp_path / "two"
    private, public = make_npz(tmp_path / "private.npz", train=400), make_npz(tmp_path / "public.npz", seed=1)
    words = ["compare", "--recipe", "demo", *SMALL, "--data", private, "--shadow", public, "--shadow-models", "2"]
    words += ["--seed", "3", "--delta", "1e-3", "--holdout", "0.3", "--canaries", "0", "--shadow-epochs", "2"]
    words += ["--methods", "sgd,dpsgd"]
    assert main([*words, "--out", str(one), "--quiet"]) == 0
    by_torchrun(*words, "--out", str(two))
    for name in ("risk.json", "sgd/audit.json"):
        assert told_in(one / name) == told_in(two / name)
    alone, together = (json.loads((run / "dpsgd/privacy.json").read_text()) for run in (one, two))
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert [alone[name] for name in ("epsilon", "steps")] == [together[name] for name in ("epsilon", "steps")]
    assert told_in(one / "results.json").keys() == told_in(two / "results.json").keys()


@pytest.mark.slow
def test_lmdp_risk_under_torchrun_writes_what_one_process_writes(tmp_path: Path) -> None:
    words = ["risk", "--model", "s-cnn", "--shadow", "mnist-5k", "--seed", "0", "--shadow-models", "2"]
    words += ["--shadow-epochs", "1"]
    assert main([*words, "--out", str(tmp_path / "one.json"), "--quiet"]) == 0
    by_torchrun(*words, "--out", str(tmp_path / "two.json"))
    assert told_in(tmp_path / "one.json") == told_in(tmp_path / "two.json")
