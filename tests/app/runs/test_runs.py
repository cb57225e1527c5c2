"""Run folders: damage is noticed, steps that were seen stay charged, and a second process is kept out."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lmdp.app.config import Config
from lmdp.app.runs import Checkpoint, RunFolder, load_model, save_model, write, write_json
from lmdp.app.runs.checkpoint import decode, encode


def checkpoint(step: int = 3) -> Checkpoint:
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    engine = {"steps": step, "source": {"mean": [0.1, 0.2]}}
    return Checkpoint(step, model.state_dict(), optimizer.state_dict(), engine, [{"step": step, "epsilon": 0.5}])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def test_a_checkpoint_comes_back_as_it_was() -> None:
    before = checkpoint()
    after = decode(encode(before), "x")
    assert after.step == before.step
    assert same(dict(after.model), dict(before.model))
    assert same(after.engine, before.engine)
    assert list(after.metrics) == list(before.metrics)
    optimizer = torch.optim.Adam(nn.Linear(3, 2).parameters())
    optimizer.load_state_dict(dict(after.optimizer))
    for index, slots in before.optimizer["state"].items():
        assert all(torch.equal(optimizer.state_dict()["state"][index][k], v) for k, v in slots.items())


RAW = encode(checkpoint())


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(RAW) * 8 - 1))
def test_one_flipped_bit_anywhere_is_noticed(at: int) -> None:
    damaged = bytearray(RAW)
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(ValueError, match="step-3"):
        decode(bytes(damaged), "step-3")


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=300) | st.integers(0, len(RAW) - 1).map(lambda n: RAW[:n]))
def test_bytes_that_are_no_checkpoint_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="junk"):
        decode(raw, "junk")


def folder_with(tmp_path: Path, *steps: int) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.begin(Config())
    for step in steps:
        folder.publish(checkpoint(step), keep=3)
    return folder


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1, 2, 3, 4, 5)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        f"step-0000000{n}.safetensors" for n in (3, 4, 5)
    ]
    latest = folder.latest(lambda _: None)
    assert latest is not None
    assert latest.step == 5


def test_steps_of_a_damaged_checkpoint_are_lost_and_stay_charged(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 10, 20)
    path = folder / "checkpoints" / "step-00000020.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    said: list[str] = []
    latest = folder.latest(said.append)
    assert latest is not None
    assert same(dict(latest.model), dict(checkpoint(10).model))
    assert latest.step == latest.engine["steps"] == 20
    assert "step-00000020" in said[0]
    assert "10 steps after the checkpoint are lost" in said[1]


def test_a_deleted_checkpoint_whose_metrics_were_seen_stays_charged(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 10, 20)
    (folder / "checkpoints" / "step-00000020.safetensors").unlink()
    latest = folder.latest(lambda _: None)
    assert latest is not None
    assert latest.step == 20


def test_charges_survive_going_back_twice(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 10, 20)
    (folder / "checkpoints" / "step-00000020.safetensors").write_bytes(b"")
    for _ in range(2):
        latest = folder.latest(lambda _: None)
        assert latest is not None
        assert latest.step == 20


def test_without_any_readable_checkpoint_nothing_is_trained_for_free(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 10)
    (folder / "checkpoints" / "step-00000010.safetensors").unlink()
    with pytest.raises(ValueError, match="10 steps were made"):
        folder.latest(lambda _: None)


def test_what_the_statement_counts_stays_charged_whatever_else_is_deleted(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 10, 20)
    write_json(folder / "privacy.json", {"steps": 20})
    (folder / "checkpoints" / "step-00000020.safetensors").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 10}\n')
    assert folder.latest(lambda _: None, noted=None).step == 10
    latest = folder.latest(lambda _: None)
    assert latest is not None
    assert latest.step == 20
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="20 steps were made"):
        folder.latest(lambda _: None)
    (folder / "privacy.json").unlink()
    save_model(folder / "model.safetensors", nn.Linear(1, 1))
    with pytest.raises(ValueError, match="all steps were made"):
        folder.latest(lambda _: None)


def test_a_new_run_does_not_overwrite_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with pytest.raises(ValueError, match="holds a run already"):
        folder.check(Config(), resume=False)
    with pytest.raises(ValueError, match="epsilon"):
        folder.check(Config(epsilon=7.0), resume=True)
    folder.check(Config(), resume=True)


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privacy.json"
    write(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"privacy\.json could not be written"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    code = "import sys; from lmdp.app.runs import RunFolder\nwith RunFolder(sys.argv[1]).claim(): pass"
    with RunFolder(tmp_path).claim():
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    with RunFolder(tmp_path).claim():
        pass


def test_a_folder_in_which_nothing_was_done_is_not_left_behind(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").claim():
        pass
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_architecture_is_refused_with_the_difference(tmp_path: Path) -> None:
    save_model(tmp_path / "m.safetensors", nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'weight' is \(2, 3\) there and \(2, 4\) here"):
        load_model(tmp_path / "m.safetensors", nn.Linear(4, 2))
    (tmp_path / "m.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable model"):
        load_model(tmp_path / "m.safetensors", nn.Linear(3, 2))


def test_tied_weights_are_saved_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, again = tied(), tied()
    save_model(tmp_path / "m.safetensors", model)
    load_model(tmp_path / "m.safetensors", again)
    assert again[0].weight is again[1].weight
    assert torch.equal(again[0].weight, model[0].weight)
