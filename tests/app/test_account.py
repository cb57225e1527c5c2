"""What a person would do next: other examples, other classes, another training on top, several models on the table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lmdp import lineage
from lmdp.app import cli
from lmdp.app.account import SIZE_IS_PUBLIC
from lmdp.app.runs import Members, RunFolder, spent_for
from lmdp.app.runs.members import FILE, FIRST_LINE
from lmdp.audit import AuditReport
from lmdp.data import Images, load
from tests.app.test_cli import SMALL, make_npz
from tests.data.files import random_images, save

SPLIT = ["a", "b", "c"]
FACTORY = """
import os
from safetensors.torch import load_file
from lmdp.models import build

def make(shape, classes):
    model = build("s-cnn", shape, classes)
    model.load_state_dict(load_file(os.environ["BEGIN_WITH"]))
    return model
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMDP_DATA", str(tmp_path / "cache"))


def photos(root: Path, each: int = 24) -> list[str]:
    """Class folders without a test part, and the options that declare what is public of them."""
    for number, name in enumerate(SPLIT):
        for i in range(each):
            save(root / name / f"{i:03}.png", random_images(14, 14, seed=1000 * number + i) // 3 + 40 * number)
    return ["--data", f"folder:{root}", "--classes", ",".join(SPLIT), "--channels", "1"]


def train(*words: str, out: str = "run", code: int = 0) -> dict[str, Any]:
    assert cli.main(["train", *SMALL, "--method", "dpsgd", "--epochs", "1", "--quiet", "--out", out, *words]) == code
    path = Path(out) / "privacy.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_a_declared_class_without_examples_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez("one.npz", x_train=random_images(60, 14, 14), y_train=np.zeros(60, np.int64))
    train("--data", "npz:one.npz", "--classes", "2", code=2)
    assert "no example of class '1', which is declared; there are examples of 0." in capsys.readouterr().err
    words = photos(Path("photos").absolute(), each=6)
    train(*words, "--classes", ",".join([*SPLIT[:-1], "misspelt"]), code=2)
    said = capsys.readouterr().err
    assert f"no example of class 'misspelt', which is declared; there are examples of {', '.join(SPLIT[:-1])}" in said
    assert f"its folders are {', '.join(sorted(SPLIT))}. Correct" in said
    assert not Path("run").exists()


@pytest.mark.parametrize("method", ["dpsgd", "sgd"])
def test_a_private_method_asks_for_what_the_labels_would_tell(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"x_train": random_images(60, 14, 14), "y_train": np.arange(60) % 3}
    np.savez("bare.npz", **arrays)
    words = ["--data", "npz:bare.npz", "--method", method]
    if method == "sgd":
        assert train(*words)["epsilon"] == "inf"
        return
    train(*words, code=2)
    said = capsys.readouterr().err
    assert "if it is public that there are 3 classes, add classes = 3 (--classes 3)" in said
    assert not Path("run").exists()
    assert train(*words, "--classes", "3")["certified"] is True
    assert Path("run/config.toml").read_text().count('classes = "3"') == 1
    Path("mine.toml").write_text('classes = ["x", "y", "z"]\n')
    assert train(*words, "--recipe", "mine.toml", out="named")["certified"] is True


def test_a_folder_asks_for_its_classes_and_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = photos(tmp_path / "photos")
    train(*options[:2], code=2)
    said = capsys.readouterr().err
    assert 'add classes = "a,b,c" (--classes "a,b,c")' in said
    assert "add channels = 1" in said
    assert train(*options)["certified"] is True


def test_the_digests_of_examples_are_private_in_name_and_first_line(tmp_path: Path) -> None:
    train(*photos(tmp_path / "photos"))
    path = Path("run") / FILE
    assert path.parent.name == "private"
    assert path.read_text().splitlines()[0] == FIRST_LINE
    assert FIRST_LINE.startswith("PRIVATE")
    assert path.stat().st_mode & 0o077 == 0
    members = Members.read(RunFolder("run"))
    assert members is not None
    source = load(f"folder:{tmp_path / 'photos'}", classes=SPLIT, channels=1, size=14)
    assert list(members.train) == source.train.digests(members.key)
    published = [p for p in Path("run").rglob("*") if p.is_file() and p.parent.name != "private"]
    assert not any(members.train[0].encode() in p.read_bytes() for p in published)
    assert not any(members.key.hex().encode() in p.read_bytes() for p in published)
    for damage in ("", FIRST_LINE, path.read_text()[:-5], path.read_text() + "train nobody\n"):
        path.write_text(damage)
        with pytest.raises(ValueError, match="damaged"):
            Members.read(RunFolder("run"))


def test_resume_is_refused_when_a_photo_was_swapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(*photos(tmp_path / "photos"))
    members = Members.read(RunFolder("run"))
    source = load(f"folder:{tmp_path / 'photos'}", classes=SPLIT, channels=1, size=14)
    assert members is not None
    assert not members.train_changes(source.train)
    path = _of_training(tmp_path / "photos", members)
    raw = path.read_bytes()
    path.unlink()
    before = Path("run/privacy.json").read_bytes()
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 2
    assert "begun with other training examples: compared with them, 1 is gone (at " in capsys.readouterr().err
    assert Path("run/privacy.json").read_bytes() == before
    path.write_bytes(raw)
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 0


def _of_training(root: Path, members: Members) -> Path:
    """A photo that was trained on."""
    for path in sorted(root.rglob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path)))[None, None]
        if members.trained_on(Images(pixels, torch.tensor([SPLIT.index(path.parent.name)])))[0]:
            return path
    raise AssertionError("nobody was trained on")


@pytest.mark.slow
def test_an_audit_after_deletions_is_refused_or_about_those_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = photos(tmp_path / "photos" / "train", each=50)
    photos(tmp_path / "photos" / "test", each=50)
    for path in (tmp_path / "photos" / "test").rglob("*.png"):
        save(path, 255 - np.array(Image.open(path)))
    train("--data", f"folder:{tmp_path / 'photos'}", *spec[2:])
    for name in SPLIT:
        (tmp_path / "photos" / "train" / name / "007.png").unlink()
        save(tmp_path / "photos" / "train" / name / "new.png", random_images(14, 14, seed=9999))
    assert cli.main(["audit", "run", "--quiet"]) == 2
    changes = "compared with its training examples, 3 are gone (at 7, 57, 107) and 3 are new (at 49, 99, 149)"
    assert changes in capsys.readouterr().err
    assert not Path("run/audit.json").exists()
    assert cli.main(["audit", "run", "--quiet", "--changed-data"]) == 0
    assert changes in capsys.readouterr().out
    audit = json.loads(Path("run/audit.json").read_text())
    assert "these were left out" in audit["warning"]
    assert (audit["members"], audit["nonmembers"]) == (147, 147)
    assert "the data has changed" in Path("run/report.html").read_text().lower()


def test_copies_of_training_examples_among_the_test_examples_are_left_out_of_an_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = photos(tmp_path / "photos" / "train", each=50)
    photos(tmp_path / "photos" / "test", each=50)
    copies = sorted((tmp_path / "photos" / "train").rglob("*.png"))[:3]
    for path in (tmp_path / "photos" / "test").rglob("*.png"):
        if path.relative_to(tmp_path / "photos" / "test") not in [c.relative_to(c.parents[1]) for c in copies]:
            save(path, 255 - np.array(Image.open(path)))
    train("--data", f"folder:{tmp_path / 'photos'}", *spec[2:], "--holdout", "0")
    assert cli.main(["audit", "run"]) == 0
    assert "3 of 150 test examples are copies of training examples; these were left out" in capsys.readouterr().err
    audit = json.loads(Path("run/audit.json").read_text())
    assert (audit["members"], audit["nonmembers"]) == (147, 147)
    (copies[0]).unlink()
    assert cli.main(["audit", "run", "--quiet"]) == 2
    assert "1 is gone" in capsys.readouterr().err


def test_members_that_were_not_trained_on_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, other = make_npz(tmp_path / "mine.npz"), make_npz(tmp_path / "other.npz", seed=5)
    train("--data", spec)
    for words in (["--members", other], ["--nonmembers", spec]):
        assert cli.main(["audit", "run", "--quiet", *words]) == 2
        assert "was trained: compared with" in capsys.readouterr().err


def test_an_audit_of_chosen_examples_stands_beside_the_runs_own_and_says_what_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, other, third = (
        make_npz(tmp_path / f"{name}.npz", seed=i) for i, name in enumerate(("mine", "other", "third"))
    )
    train("--data", spec)
    Path("run/audit.json").write_text("the run's own")
    mine = {name: Path("run", name).read_bytes() for name in ("audit.json", "report.html")}
    capsys.readouterr()
    written = []
    for nonmembers in (other, third):
        assert cli.main(["audit", "run", "--quiet", "--nonmembers", nonmembers]) == 0
        said = capsys.readouterr().out
        assert nonmembers in said
        paths = [Path(line.partition(": ")[2]) for line in said.splitlines()[-2:]]
        assert "as it was" in paths[1].read_text()
        written.append(paths[0])
    first, second = (json.loads(path.read_text())["used"] for path in written)
    assert first["members"] | {"digest": ""} == {"spec": spec, "part": "train", "taken": 240, "of": 240, "digest": ""}
    assert first["members"]["digest"] == second["members"]["digest"] != first["nonmembers"]["digest"]
    assert first["nonmembers"]["digest"] != second["nonmembers"]["digest"]
    assert AuditReport.load(written[0]).nonmembers == 240
    assert cli.main(["audit", "run", "--json", "--members", spec, "--nonmembers", other]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["used"] == first  # the same examples, said or not
    assert Path(both["report"]).exists()
    assert len(list(Path("run").glob("audit-*.json"))) == 3  # no choice takes the place of another
    assert {name: Path("run", name).read_bytes() for name in mine} == mine


@pytest.fixture
def trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A finished private run, and a factory that begins with its weights."""
    spec = make_npz(tmp_path / "private.npz")
    train("--data", spec, "--epsilon", "8", out="first")
    (tmp_path / "going_on.py").write_text(FACTORY)
    monkeypatch.setenv("BEGIN_WITH", str(tmp_path / "first" / "model.safetensors"))
    return spec


def test_a_factory_that_goes_on_from_private_weights_states_the_composition(trained_on: str) -> None:
    again = train("--data", trained_on, "--epsilon", "8", "--model", "going_on:make", out="second")
    first = json.loads(Path("first/privacy.json").read_text())
    assert first["epsilon"] <= 8
    assert again["epsilon"] > 9
    assert again["epsilon"] <= first["epsilon"] + 8
    assert again["certified"] is True
    assert any("epsilon is that of all of them together" in item for item in again["account"])
    chain = spent_for(Path("second/model.safetensors"))
    assert lineage.epsilon_of(chain, delta=again["delta"], accountant=again["accountant"]) == pytest.approx(
        again["epsilon"]
    )
    assert len(chain) == 2
    rows = [json.loads(line) for line in Path("second/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["epsilon"] == again["epsilon"]
    assert cli.main(["train", "--out", "second", "--resume", "--quiet"]) == 0
    assert json.loads(Path("second/privacy.json").read_text()) == again


def test_a_checkpoint_that_was_gone_on_from_counts_too(trained_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = sorted(Path("first/checkpoints").iterdir())[-1:]
    Path("going_on.py").write_text(
        FACTORY.replace("load_file(os.environ", "held(os.environ")
        + (
            "\ndef held(path):\n"
            "    return {k.removeprefix('model/'): v for k, v in load_file(path).items() if k.startswith('model/')}\n"
        )
    )
    monkeypatch.setenv("BEGIN_WITH", str(path.absolute()))
    monkeypatch.delitem(__import__("sys").modules, "going_on", raising=False)
    assert train("--data", trained_on, "--model", "going_on:make", out="second")["epsilon"] > 8


def test_without_the_index_nothing_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_npz(tmp_path / "private.npz")
    monkeypatch.setenv("LMDP_LINEAGE", "0")
    statement = train("--data", spec)
    assert statement["certified"] is False
    assert any("LMDP_LINEAGE" in reason for reason in statement["reasons"])


def test_a_large_delta_is_refused_without_a_switch_that_the_statement_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_npz(tmp_path / "private.npz")
    train("--data", spec, "--delta", "0.5", code=2)
    assert "delta is 0.5, not below 1 / 240 examples" in capsys.readouterr().err
    assert not Path("run").exists()
    for words in (["--allow-large-delta"], ["--allow-large-delta", "true"]):
        shutil.rmtree("run", ignore_errors=True)
        statement = train("--data", spec, "--delta", "0.5", *words)
        assert statement["certified"] is False
        assert any("allow_large_delta" in reason for reason in statement["reasons"])
    shutil.rmtree("run")
    train("--data", spec, "--delta", "0.5", "--method", "sgd")


def test_the_statement_says_whether_the_number_of_examples_is_public(tmp_path: Path) -> None:
    spec = make_npz(tmp_path / "private.npz")
    assert SIZE_IS_PUBLIC in train("--data", spec)["account"]
    said = " ".join(train("--data", f"{spec}?limit=400", out="limited")["account"])
    assert "lets another one in (limit)" in said
    statement = train("--data", spec, "--public-size", "false", out="secret")
    assert statement["certified"] is False
    assert any("public_size = false" in reason for reason in statement["reasons"])


@pytest.mark.slow
def test_a_comparison_says_what_all_of_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = make_npz(tmp_path / "private.npz"), make_npz(tmp_path / "public.npz", seed=1)
    Path("mine.toml").write_text(
        f'data = "{private}"\nshadow = "{public}"\nsample_rate = 0.25\nepochs = 1\nshadow_epochs = 1\nsize = 14\n'
    )
    assert cli.main(["compare", "--recipe", "mine.toml", "--methods", "sgd,dpsgd,lm", "--out", "all", "--quiet"]) == 0
    said = capsys.readouterr().out
    held = json.loads(Path("all/results.json").read_text())
    cost = held["together"]
    alone = [held["results"][name]["epsilon"] for name in ("dpsgd", "lm")]
    assert cost["models"] == ["DP-SGD", "LM-DP-SGD"]
    assert max(alone) < cost["epsilon"] <= sum(alone)
    sentence = "Releasing all of DP-SGD and LM-DP-SGD, or choosing among them by these results, costs epsilon"
    assert sentence in said
    assert sentence in Path("all/report.html").read_text()
    assert cli.main(["compare", "--recipe", "mine.toml", "--methods", "sgd,dpsgd", "--out", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["together"] is None
