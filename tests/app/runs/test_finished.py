"""A statement speaks of the weights that its training left, and of no others."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import lmdp
from lmdp.app import cli, training
from lmdp.app.reports import story, summary
from lmdp.app.runs import RunFolder, foreign, leave, privacy_of
from lmdp.lineage import earlier
from lmdp.report import card, headline, render
from lmdp.report.release import NOT_RECORDED, facts
from tests.app.test_cli import SMALL, make_npz


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certified run with averaged weights, and one without privacy on the same data; both attacked."""
    top = tmp_path_factory.mktemp("runs")
    spec = make_npz(top / "private.npz")
    for name, words in {"dpsgd": ["--ema", "0.9"], "sgd": []}.items():
        words = ["train", *SMALL, *words, "--method", name, "--data", spec, "--out", str(top / name), "--quiet"]
        assert cli.main(words) == 0
        assert cli.main(["audit", str(top / name), "--quiet"]) == 0
    assert summary(RunFolder(top / "dpsgd"))["certified"] is True
    return top


def _told(folder: RunFolder) -> tuple[str, str, str]:
    told = story([folder], "lmdp audit", None)
    return headline(told), render(told), card(told)


def _noisy(file: Path) -> None:
    """The weights of a file + 0.01 · noise, its header kept."""
    with safetensors.safe_open(file, framework="pt") as held:
        header = held.metadata()
    weights = {name: w + 0.01 * torch.randn_like(w) for name, w in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(weights, file, header)


@pytest.fixture(params=["of SGD", "with noise", "average"])
def tampered(request: pytest.FixtureRequest, runs: Path, tmp_path: Path) -> RunFolder:
    """The certified run with other weights."""
    folder = RunFolder(shutil.copytree(runs / "dpsgd", tmp_path / "run"))
    if request.param == "of SGD":
        shutil.copyfile(runs / "sgd" / "model.safetensors", folder / "model.safetensors")
    else:
        _noisy(folder / ("average.safetensors" if request.param == "average" else "model.safetensors"))
    return folder


def test_statement_and_audit_name_the_weights_by_their_sha(runs: Path) -> None:
    for name in ("dpsgd", "sgd"):
        content = json.loads((runs / name / "privacy.json").read_text())
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (runs / name).glob("*.safetens*")}
        assert content["sha256"] == files
        assert json.loads((runs / name / "audit.json").read_text())["sha256"] == files["model.safetensors"]
        told_story = story([RunFolder(runs / name)], "", None)
        identity = dict(facts(told_story.trained[0], told_story).identity)
        assert identity["trained by"].startswith("lmdp ")
        assert identity["trained on (date)"] == content["trained"]
        assert NOT_RECORDED not in identity.values()


def test_other_weights_are_not_certified_on_page_and_card(tampered: RunFolder) -> None:
    assert "is not the file that was trained" in foreign(tampered)
    assert privacy_of(tampered)["certified"] is False
    assert summary(tampered)["certified"] is False
    said, page, told = _told(tampered)
    assert "NOT certified" in said
    assert "this holds against any attack" not in said
    for each in (page, told):
        assert "is not the file that was trained" in each
        assert "Certified by this program" not in each


def test_other_weights_are_not_exported_and_loading_and_attacking_them_warns(
    tampered: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(tampered.path), "--to", str(tmp_path / "out")]) == 2
    assert "is not the file that was trained" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.warns(lmdp.NotCertifiedWarning, match="is not the file that was trained"):
        assert not lmdp.load(tampered.path).statement.certified
    assert cli.main(["audit", str(tampered.path), "--quiet"]) == 0
    assert "is not the file that was trained" in capsys.readouterr().out
    assert "Certified by this program" not in (tampered / "privacy-card.md").read_text()


def test_an_audit_of_other_weights_is_not_shown(runs: Path, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(runs / "sgd", tmp_path / "run"))
    assert "peak_layer" in summary(folder)
    _noisy(folder / "model.safetensors")
    assert "peak_layer" not in summary(folder)
    _, page, told = _told(folder)
    for each in (page, told):
        assert "audit.json is of another model.safetensors" in each
        assert "it was not attacked" in each


def test_a_run_of_an_earlier_version_is_read_and_says_that_its_weights_were_not_recorded(
    runs: Path, tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(runs / "dpsgd", tmp_path / "run"))
    for name in ("privacy.json", "audit.json"):
        content = json.loads((folder / name).read_text())
        for key in ("sha256", "versions", "trained"):
            content.pop(key, None)
        (folder / name).write_text(json.dumps(content))
    assert summary(folder)["certified"] is True
    assert lmdp.load(folder.path).statement.certified
    _, page, told = _told(folder)
    assert NOT_RECORDED in page
    assert NOT_RECORDED in told


def test_a_statement_that_names_its_weights_by_something_else_is_not_certified(runs: Path, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(runs / "dpsgd", tmp_path / "run"))
    content = json.loads((folder / "privacy.json").read_text())
    for wrong in ("x", {}, {"model.safetensors": 3}):
        (folder / "privacy.json").write_text(json.dumps({**content, "sha256": wrong}))
        assert privacy_of(folder)["certified"] is False


def test_an_export_of_the_weights_as_they_are_is_that_of_its_statement_and_lists_no_files_of_the_run(
    runs: Path, tmp_path: Path
) -> None:
    assert cli.main(["export", str(runs / "dpsgd"), "--to", str(tmp_path / "out"), "--quiet"]) == 0
    assert lmdp.load(tmp_path / "out").statement.certified
    told, before = ((at / "privacy-card.md").read_text() for at in (tmp_path / "out", runs / "dpsgd"))
    sha = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert f"- SHA-256 of model.safetensors: {sha}\n" in told
    assert "leave the house" in before
    assert "leave the house" not in told
    assert "## Decision" in before
    assert "## Decision" not in told


@pytest.mark.parametrize("name, told", [("sgd", "The model is of no use."), ("dpsgd", "says of privacy holds")])
def test_a_run_that_exploded_says_so_in_its_own_words_on_page_and_card_and_when_it_is_exported(
    name: str, told: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(shutil.copytree(runs / name, tmp_path / "run"))
    model = folder / "model.safetensors"
    safetensors.torch.save_file({k: w * 1e9 for k, w in safetensors.torch.load_file(model).items()}, model)
    content = json.loads((folder / "privacy.json").read_text())
    content["sha256"]["model.safetensors"] = hashlib.sha256(model.read_bytes()).hexdigest()
    (folder / "privacy.json").write_text(json.dumps(content))
    _, page, on_card = _told(folder)
    assert all("the training has exploded" in each and told in each for each in (page, on_card))
    assert cli.main(["export", str(folder.path), "--to", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("WARNING: the training has exploded")
    assert told in said


def _restated(runs: Path, to: Path, change: dict[str, object]) -> RunFolder:
    """The certified run with another statement; None takes a key out."""
    folder = RunFolder(shutil.copytree(runs / "dpsgd", to))
    content = json.loads((folder / "privacy.json").read_text()) | change
    kept = {name: value for name, value in content.items() if value is not None}
    (folder / "privacy.json").write_text(json.dumps(kept))
    return folder


OLD: dict[str, object] = {"sha256": None, "versions": None, "trained": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sha256": {}}, "speaks of none|names none"),
        ({"sha256": None}, "is damaged: it names no weights, and once did"),
        (OLD | {"steps": 1}, "speaks of 1 steps, and the header of model.safetensors of"),
        (OLD | {"noise_multiplier": 99.0}, "and the header of model.safetensors of"),
    ],
)
def test_a_statement_of_the_middle_of_a_training_is_not_that_of_its_end(
    runs: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    folder = _restated(runs, tmp_path / "run", change)
    assert re.search(said, foreign(folder))
    assert privacy_of(folder)["certified"] is False
    with pytest.warns(lmdp.NotCertifiedWarning):
        assert not lmdp.load(folder.path).statement.certified


def test_a_statement_of_an_earlier_version_that_agrees_with_its_weights_is_read_as_it_is(
    runs: Path, tmp_path: Path
) -> None:
    assert foreign(_restated(runs, tmp_path / "run", OLD)) == ""


def test_a_training_that_is_stopped_leaves_a_statement_of_no_weights(tmp_path: Path) -> None:
    words = [
        "train",
        *SMALL,
        "--method",
        "dpsgd",
        "--data",
        make_npz(tmp_path / "d.npz"),
        "--out",
        str(tmp_path / "run"),
    ]
    seen = []

    def looked(folder: RunFolder, *rest: object) -> None:
        seen.append(json.loads((folder / "privacy.json").read_text())["sha256"])
        leave(folder, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "leave", looked)
        assert cli.main([*words, "--quiet"]) == 0
    assert seen == [{}]


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_another_machine_are_known_once_they_are_loaded(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: bool
) -> None:
    monkeypatch.setenv("LMDP_LINEAGE", str(tmp_path / "another"))
    model = lmdp.load(runs / "dpsgd", average=average).model
    (spent,) = earlier({name: p.detach() for name, p in model.named_parameters()})
    assert spent.steps == json.loads((runs / "dpsgd" / "privacy.json").read_text())["steps"]
