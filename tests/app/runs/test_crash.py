"""A run may be killed at any moment: it resumes, counts every step that was seen, and under a seed ends the same."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lmdp.app import cli, training
from tests.app.runs.killing import STEPS, arguments, killed_after, make_data, seen_steps, stated_steps


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("data"))


def whole(spec: str, folder: Path, method: str, *more: str) -> tuple[bytes, float]:
    """The model of an uninterrupted run, and how long it took once everything is imported and calibrated."""
    assert cli.main(arguments(spec, folder / "warm", method, *more)) == 0
    start = time.monotonic()
    assert cli.main(arguments(spec, folder / "whole", method, *more)) == 0
    return (folder / "whole" / "model.safetensors").read_bytes(), time.monotonic() - start


def kill_and_resume(spec: str, folder: Path, method: str, kills: int, *more: str) -> list[Path]:
    """Runs that are killed at random moments until they are done, `kills` in total; nothing is ever understated."""
    chance, runs = random.Random(kills), []
    model, seconds = whole(spec, folder, method, "--seed", "3", *more)
    while kills:
        run = folder / f"run{len(runs)}"
        runs.append(run)
        command = [*arguments(spec, run, method, "--seed", "3", *more), "--resume"]
        while kills and killed_after(command, chance.uniform(0, seconds)):
            kills -= 1
            assert stated_steps(run) >= seen_steps(run)
        assert cli.main(command) == 0
        assert (run / "model.safetensors").read_bytes() == model
        assert stated_steps(run) == seen_steps(run) == STEPS
        assert not list(run.rglob("*.part"))
    return runs


@pytest.mark.parametrize(("method", "kills"), [("lm", 6), ("sgd", 2)])
def test_killed_at_random_moments_a_seeded_run_ends_with_the_same_bytes(
    method: str, kills: int, spec: str, tmp_path: Path
) -> None:
    kill_and_resume(spec, tmp_path, method, kills)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kills", "more"),
    [
        ("lm", 20, ()),
        ("dpsgd", 10, ("--max-physical-batch-size", "7")),
        ("lm", 10, ("--weights", "public", "--public", "npz:public.npz")),
        ("sgd", 10, ()),
    ],
)
def test_fifty_kills(
    method: str, kills: int, more: tuple[str, ...], spec: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    from tests.app.test_cli import make_npz

    make_npz(tmp_path / "public.npz", train=90, test=30, seed=5)
    kill_and_resume(spec, tmp_path, method, kills, *more)


def test_without_a_seed_a_killed_run_ends_with_every_planned_step_charged(spec: str, tmp_path: Path) -> None:
    _, seconds = whole(spec, tmp_path, "dpsgd")
    command = [*arguments(spec, tmp_path / "run", "dpsgd"), "--resume"]
    chance = random.Random(1)
    for _ in range(4):
        killed_after(command, chance.uniform(0, seconds))
        assert stated_steps(tmp_path / "run") >= seen_steps(tmp_path / "run")
    assert cli.main(command) == 0
    assert stated_steps(tmp_path / "run") == STEPS
    assert json.loads((tmp_path / "run/privacy.json").read_text())["certified"] is True


@pytest.mark.parametrize(
    ("method", "more"), [("lm", ("--max-physical-batch-size", "7")), ("sgd", ()), ("lm", ("--weights", "public"))]
)
def test_interrupted_in_mid_epoch_a_seeded_run_ends_with_the_same_bytes(
    method: str, more: tuple[str, ...], spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.app.test_cli import make_npz

    public = ("--public", make_npz(tmp_path / "public.npz", train=90, test=30, seed=5)) if "public" in more else ()
    model, _ = whole(spec, tmp_path, method, "--seed", "3", *more, *public)
    command = [*arguments(spec, tmp_path / "run", method, "--seed", "3", *more, *public), "--resume"]
    due = training.evaluation_due
    for stop in (3, 5, 14):

        def interrupting(job: training.Job, stop: int = stop) -> bool:
            if job.steps == stop:
                signal.raise_signal(signal.SIGINT)
            return due(job)

        monkeypatch.setattr(training, "evaluation_due", interrupting)
        assert cli.main(command) == 130
        assert stated_steps(tmp_path / "run") == seen_steps(tmp_path / "run") == stop
    monkeypatch.setattr(training, "evaluation_due", due)
    assert cli.main(command) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


class Fault:
    """Lets a function of `os` fail at its n-th call, as a full disk does, and counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int | None) -> None:
        self.calls, real = 0, getattr(os, name)

        def faulty(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, faulty)


@pytest.mark.parametrize("name", ["fsync", pytest.param("replace", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_write_loses_nothing(
    name: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = 1 if name == "fsync" else 2
    short = ("--seed", "3", "--epochs", str(epochs))
    model, _ = whole(spec, tmp_path, "dpsgd", *short)
    with pytest.MonkeyPatch.context() as patch:
        counter = Fault(patch, name, None)
        assert cli.main(arguments(spec, tmp_path / "counted", "dpsgd", *short)) == 0
    assert counter.calls > 10
    for at in range(1, counter.calls + 1):
        run = tmp_path / f"run{at}"
        command = arguments(spec, run, "dpsgd", *short)
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, name, at)
            capsys.readouterr()
            assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert "No space left on device" in said
        assert str(run) in said
        assert "Traceback" not in said
        assert stated_steps(run) >= seen_steps(run)
        assert not list(tmp_path.rglob("*.part"))
        assert cli.main([*command, "--resume"]) == 0
        assert (run / "model.safetensors").read_bytes() == model
        assert stated_steps(run) == 4 * epochs


def unfinished_run(spec: str, run: Path, stop: int, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[str]:
    """A run stopped after a step; returns the command that continues it."""
    due = training.evaluation_due

    def stopping(job: training.Job) -> bool:
        if job.steps == stop:
            signal.raise_signal(signal.SIGTERM)
        return due(job)

    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluation_due", stopping)
        assert cli.main(arguments(spec, run, "dpsgd", *more)) == 130
    return [*arguments(spec, run, "dpsgd", *more), "--resume"]


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "truncated":
        raw = raw[: len(raw) // 2]
    elif how == "flipped":
        raw[len(raw) // 3] ^= 4
    path.write_bytes(raw)
    if how == "deleted":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("count", [1, 3])
def test_steps_of_damaged_checkpoints_stay_charged_and_the_run_ends_within_its_budget(
    how: str, count: int, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = unfinished_run(spec, tmp_path / "run", 9, monkeypatch, "--keep-checkpoints", "4")
    newest = sorted((tmp_path / "run/checkpoints").iterdir())[::-1]
    assert [path.name[5:13] for path in newest] == ["00000009", "00000008", "00000004", "00000000"]
    for path in newest[:count]:
        damage(path, how)
    begun = []
    step = training.Job.step
    monkeypatch.setattr(training.Job, "step", lambda job, *batch: begun.append(job.steps) or step(job, *batch))
    assert cli.main(command) == 0
    assert sorted(set(begun)) == list(range(9, STEPS))  # 9 are charged, however many of them are lost
    privacy = json.loads((tmp_path / "run/privacy.json").read_text())
    assert privacy["steps"] == STEPS
    assert privacy["epsilon"] <= 5


def test_a_charge_outlives_a_second_crash(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that told of a lost step are rewritten on resuming; by then the charge is on record elsewhere."""
    run = tmp_path / "run"
    command = unfinished_run(spec, run, 9, monkeypatch)
    (run / "checkpoints/step-00000009.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(training.Job, "restore", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli.main(command) == 130
    begun = []
    step = training.Job.step
    monkeypatch.setattr(training.Job, "step", lambda job, *batch: begun.append(job.steps) or step(job, *batch))
    assert cli.main(command) == 0
    assert sorted(set(begun)) == list(range(9, STEPS))


@pytest.mark.parametrize(("seed", "charged"), [((), 9), (("--seed", "3"), 8)])
def test_a_checkpoint_that_was_being_written_is_used_if_whole_and_charged_if_not(
    seed: tuple[str, ...], charged: int, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a seed its steps will be made anew, with other noise; with one they only show the same again."""
    for part_of_it, expected in ((1.0, 9), (0.5, charged)):
        run = tmp_path / f"run{part_of_it}"
        command = unfinished_run(spec, run, 9, monkeypatch, *seed)
        last = run / "checkpoints/step-00000009.safetensors"
        raw = last.read_bytes()
        (run / "checkpoints/.step-00000009.safetensors.4711.part").write_bytes(raw[: int(part_of_it * len(raw))])
        last.unlink()
        (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(True)[:-1]))
        begun: list[int] = []
        with monkeypatch.context() as patch:
            step = training.Job.step
            patch.setattr(training.Job, "step", lambda job, *batch: begun.append(job.steps) or step(job, *batch))
            assert cli.main(command) == 0
        assert begun[0] == expected
        assert stated_steps(run) == STEPS
        assert not list(run.rglob("*.part"))


def test_a_link_out_of_the_run_folder_is_refused(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "precious").write_text("precious")
    for name, target in (("checkpoints", "elsewhere"), ("figures", "elsewhere"), (".lock", "precious")):
        run = tmp_path / f"run-{name}"
        run.mkdir()
        (run / name).symlink_to(tmp_path / target)
        assert cli.main(arguments(spec, run, "sgd")) == 2
        assert "is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "precious").read_text() == "precious"
