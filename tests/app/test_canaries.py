"""Canaries by whole runs: in the training or out of it, found again, private, reported beside ordinary examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdp.app import cli, training
from lmdp.app.config import Config
from lmdp.app.runs import Coins, Members, RunFolder
from lmdp.app.runs.canaries import FILE, FIRST_LINE
from lmdp.data import Images, load
from lmdp.data.request import anchored
from tests.app.test_cli import SMALL, make_npz
from tests.app.test_holdout import removed

TRAIN = ["train", *SMALL, "--epochs", "1", "--method", "dpsgd", "--quiet", "--holdout", "0.2", "--canaries", "300"]
KINDS = ("noise", "mislabelled", "npz:own.npz")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_npz(tmp_path / "private.npz", train=1000, test=100)
    make_npz(tmp_path / "own.npz", train=260, test=60, seed=8)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Images]:
    """The datasets that trainings were given."""
    given: list[Images] = []
    prepare = training.prepare

    def watched(config: Config, model: Any, private: Any, **options: Any) -> training.Job:
        given.append(private)
        return prepare(config, model, private, **options)

    monkeypatch.setattr(training, "prepare", watched)
    return given


def train(*words: str, out: str = "run", code: int = 0) -> dict[str, Any]:
    assert cli.main([*TRAIN, "--data", "npz:private.npz", "--out", out, *words]) == code
    path = Path(out) / "privacy.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.mark.parametrize("kind", KINDS)
def test_canaries_that_are_in_are_trained_on_and_the_others_are_not(kind: str, seen: list[Images]) -> None:
    statement = train("--canary-kind", kind)
    coins = Coins.read(RunFolder("run"))
    assert coins is not None
    trained = set(seen[0].digests(coins.key))
    assert {digest for digest, inside in coins.tossed if inside} <= trained
    assert not {digest for digest, inside in coins.tossed if not inside} & trained
    assert 100 < sum(inside for _, inside in coins.tossed) < len(coins.tossed) - 100
    assert statement["examples"]["trained_on"] == len(seen[0])
    assert statement["examples"]["canaries"] == len(coins.tossed)
    assert statement["expected_batch_size"] == pytest.approx(round(0.25 * len(seen[0])))
    assert statement["certified"] is True
    assert any(
        f"{len(coins.tossed)} canaries ({anchored(kind)}) were planted" in sentence for sentence in statement["account"]
    )
    if kind == "mislabelled":
        parted = load("npz:private.npz", size=14).keeping_out(0.2)
        true = dict(zip(parted.train.contents(), parted.train.labels.tolist()))
        held = list(zip(seen[0].contents(), seen[0].labels.tolist()))
        wrong = sum(true[content] != label for content, label in held)
        assert wrong == sum(inside for _, inside in coins.tossed)
        assert len(parted.train) == len(held) + sum(not inside for _, inside in coins.tossed)


def test_coins_are_private_in_name_and_first_line_and_in_no_other_file(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert cli.main(["audit", "run", "--quiet"]) == 0
    path = Path("run") / FILE
    assert path.parent.name == "private"
    assert path.stat().st_mode & 0o077 == 0
    assert path.read_text().splitlines()[0] == FIRST_LINE
    assert FIRST_LINE.startswith("PRIVATE")
    coins = Coins.read(RunFolder("run"))
    assert coins is not None
    secrets = [coins.key.hex().encode(), *(digest.encode() for digest, _ in coins.tossed)]
    for file in (p for p in Path("run").rglob("*") if p.is_file() and p.parent.name != "private"):
        raw = file.read_bytes()
        assert not any(secret in raw for secret in secrets), file
    for damage in ("", FIRST_LINE, path.read_text()[:-5], path.read_text() + "in nobody\n"):
        path.write_text(damage)
        with pytest.raises(ValueError, match="damaged"):
            Coins.read(RunFolder("run"))
    path.unlink()
    assert cli.main(["audit", "run", "--quiet"]) == 2
    assert "private/canaries.txt is gone" in capsys.readouterr().err


def test_the_audit_reports_both_and_bounds_the_epsilon_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    statement = train()
    capsys.readouterr()
    assert cli.main(["audit", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    canaries = report["canaries"]
    assert [layer["name"] for layer in canaries["layers"]] == [layer["name"] for layer in report["layers"]]
    assert canaries["inside"] + canaries["outside"] == statement["examples"]["canaries"]
    assert canaries["bound"]["claimed"] == statement["epsilon"]
    assert canaries["bound"]["lower"] <= statement["epsilon"]
    assert report["nonmembers"] == statement["examples"]["held_out"]
    assert report["members"] + report["left_out"] < statement["examples"]["trained_on"], "canaries are not ordinary"
    assert report["verdict"].startswith("The most vulnerable examples")
    page = Path("run/report.html").read_text()
    assert "The most vulnerable examples" in page
    assert "Ordinary examples" in page
    assert "noise, in this run" in page


def test_a_seed_gives_the_same_coins_and_nobody_gets_them_otherwise(seen: list[Images]) -> None:
    for out, words in (("a", ["--seed", "3"]), ("b", ["--seed", "3"]), ("c", []), ("d", [])):
        train(*words, out=out)
    tossed = {out: dict(Coins.read(RunFolder(out)).tossed) for out in "abcd"}  # type: ignore[union-attr]
    assert tossed["a"] == tossed["b"]
    assert seen[0].digests(b"x") == seen[1].digests(b"x")
    assert seen[2].digests(b"x") != seen[3].digests(b"x")
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_a_resumed_run_finds_its_canaries_again_and_refuses_other_data(
    seen: list[Images], capsys: pytest.CaptureFixture[str]
) -> None:
    before = train("--canary-kind", "mislabelled")
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 0
    assert seen[0].digests(b"x") == seen[1].digests(b"x")
    assert json.loads(Path("run/privacy.json").read_text()) == before
    coins, members = Coins.read(RunFolder("run")), Members.read(RunFolder("run"))
    assert coins is not None
    assert members is not None
    source = load("npz:private.npz", size=14)
    out = _content_of_an_outsider(source.train, members)
    removed(Path("private.npz"), list(source.train.contents()).index(out))
    assert cli.main(["audit", "run", "--quiet"]) == 2
    assert "the data has changed" in capsys.readouterr().err
    assert cli.main(["audit", "run", "--quiet", "--changed-data"]) == 0


def _content_of_an_outsider(pool: Images, members: Members) -> bytes:
    """Of a canary that is in no training: neither trained on under any label nor kept out."""
    parts = set(members.train) | set(members.held_out)
    for i, content in enumerate(pool.contents()):
        one = pool.take([i])
        called = [Images(one.pixels, one.labels * 0 + label).digests(members.key)[0] for label in range(3)]
        if not set(called) & parts:
            return content
    raise AssertionError("every canary is in")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--canaries", "50"], "must be 0 or at least 300"),
        (["--canaries", "600"], "at most half as many as examples"),
        (["--canaries", "500", "--canary-kind", "mislabelled"], "at most half as many as examples"),
        (["--canary-kind", "nothing"], "unknown data 'nothing'"),
        (["--canary-kind", "npz:private.npz"], "are among the data too"),
        (["--canary-kind", "digits"], "labels 0 to 9; with 3 classes"),
    ],
)
def test_canaries_that_would_show_nothing_are_refused_before_anything_is_written(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(*words, code=2)
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.slow
def test_compare_shows_canaries_by_method_with_the_same_coins(capsys: pytest.CaptureFixture[str]) -> None:
    make_npz(Path("public.npz"), seed=1)
    Path("mine.toml").write_text(
        'data = "npz:private.npz"\nshadow = "npz:public.npz"\nsample_rate = 0.25\nepochs = 1\nshadow_epochs = 1\n'
        "size = 14\nholdout = 0.2\ncanaries = 300\n"
    )
    assert cli.main(["compare", "--recipe", "mine.toml", "--methods", "sgd,dpsgd", "--out", "all", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "The most vulnerable examples (noise canaries): " in said
    assert "canaries: AUC (95 % interval)" in said
    results = json.loads(Path("all/results.json").read_text())["results"]
    assert all(np.isfinite(row["canaries"]["peak_auc"]) for row in results.values())
    assert results["dpsgd"]["canaries"]["epsilon_at_least"] <= results["dpsgd"]["epsilon"]
    sides = [dict(Coins.read(RunFolder(f"all/{m}")).tossed) for m in ("sgd", "dpsgd")]  # type: ignore[union-attr]
    assert sides[0] == sides[1]
