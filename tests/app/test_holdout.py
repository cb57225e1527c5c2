"""A part of the pool stays out of training: by whole runs, resumed, audited, changed in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.runs import Members, RunFolder
from lmdp.data import load
from tests.app.test_cli import SMALL, make_npz

TRAIN = ["train", *SMALL, "--epochs", "1", "--method", "dpsgd", "--quiet"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """A finished run on 600 examples, of which some 240 were kept out; its statement."""
    spec = make_npz(tmp_path / "private.npz", train=600, test=120)
    assert cli.main([*TRAIN, "--data", spec, "--holdout", "0.4", "--out", "run"]) == 0
    return dict(json.loads(Path("run/privacy.json").read_text()))


def removed(path: Path, position: int) -> None:
    """The same file without one of its training examples."""
    with np.load(path) as arrays:
        held = dict(arrays)
    held["x_train"], held["y_train"] = (np.delete(held[name], position, 0) for name in ("x_train", "y_train"))
    np.savez(path, **held)


def position_of(part: str) -> int:
    """Where in the data an example of this part is."""
    members, source = Members.read(RunFolder("run")), load("npz:private.npz", size=14)
    assert members is not None
    inside = members.trained_on(source.train)
    assert inside.count(False) == len(members.held_out)
    return inside.index(part == "train")


def test_size_rate_and_steps_are_those_of_what_was_trained_on(run: dict[str, Any]) -> None:
    members = Members.read(RunFolder("run"))
    assert members is not None
    trained, out = run["examples"]["trained_on"], run["examples"]["held_out"]
    assert (trained, out) == (len(members.train), len(members.held_out))
    assert trained + out == 600
    assert 180 < out < 300
    assert run["expected_batch_size"] == pytest.approx(round(0.25 * trained))
    assert run["sample_rate"] == pytest.approx(round(0.25 * trained) / trained)
    assert run["certified"] is True
    assert any(f"{out} private examples were kept out" in sentence for sentence in run["account"])
    assert not set(members.train) & set(members.held_out)


def test_the_audit_compares_with_those_kept_out(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nonmembers"] == run["examples"]["held_out"]
    assert report["nonmembers"] > 120, "the test set is smaller"


@pytest.mark.parametrize("part", ["train", "holdout"])
def test_a_removed_example_is_noticed_in_either_part(
    part: str, run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    removed(Path("private.npz"), position_of(part))
    resumed = cli.main(["train", "--out", "run", "--resume"])
    said = capsys.readouterr().err
    if part == "train":
        assert resumed == 2
        assert "begun with other training examples: compared with them, 1 is gone" in said
    else:
        assert resumed == 0, "nobody who is trained on has changed"
        assert "note: the examples kept out of training have changed: compared with those so far, 1 is gone" in said
    assert cli.main(["audit", "run", "--quiet"]) == 2
    assert "the data has changed" in capsys.readouterr().err
    assert cli.main(["audit", "run", "--quiet", "--changed-data"]) == 0


def test_a_resumed_run_keeps_its_part_out_and_refuses_another(
    run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert Config.load("run/config.toml").holdout == 0.4
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 0
    assert json.loads(Path("run/privacy.json").read_text()) == run
    assert cli.main(["train", "--out", "run", "--resume", "--quiet", "--holdout", "0.2"]) == 2
    assert "'holdout': (0.4, 0.2)" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "0.1"])
def test_nothing_is_kept_out_where_it_is_switched_off_or_of_too_few(
    share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_npz(tmp_path / "few.npz", train=300, test=30)
    words = [word for word in TRAIN if word != "--quiet"]
    assert cli.main([*words, "--data", spec, "--holdout", share, "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert ("holdout = 0.5 or more keeps some out" in said) is (share != "0")
    members = Members.read(RunFolder("run"))
    assert members is not None
    assert (len(members.train), members.held_out) == (300, ())
    assert "examples" not in json.loads(Path("run/privacy.json").read_text())


def test_shadow_data_may_not_hold_those_kept_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_npz(tmp_path / "private.npz", train=600, test=120)
    source = load("npz:private.npz", size=14).keeping_out(0.4)
    assert source.held_out is not None
    pixels = source.held_out.pixels.squeeze(1).numpy()
    labels = source.held_out.labels.numpy()
    np.savez("public.npz", x_train=pixels, y_train=labels, num_classes=np.int64(3))
    words = ["--data", "npz:private.npz", "--holdout", "0.4", "--weights", "public", "--public", "npz:public.npz"]
    assert cli.main(["train", *SMALL, "--quiet", *words, "--out", "run"]) == 2
    assert "in both the" in capsys.readouterr().err
