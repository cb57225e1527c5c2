"""All rows of one person, protected as one, from a column of a table to the statement of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.pipeline import parted_data
from lmdp.app.progress import Show
from lmdp.app.runs import Coins, RunFolder
from lmdp.data import Texts
from lmdp.data.examples import units, users_of
from lmdp.data.readers import READERS
from tests.app.test_text import TRAIN, WORDS

USERS, ROWS = 500, 2
COMMAND = ["--model", "tiny-encoder", "--method", "dpsgd", "--unit", "user:sender", "--user-rows", "2", *TRAIN]
COMMAND += ["--epochs", "0.3", "--holdout", "0.3", "--accountant", "rdp"]


def letters(path: Path, seed: int = 0) -> str:
    """ROWS letters of each of USERS people, who write of one thing only."""
    dice = random.Random(seed)
    rows = [
        {"text": " ".join(dice.choices(WORDS, k=8)), "label": ("ham", "spam")[user % 2], "sender": f"p{user}"}
        for user in range(USERS)
        for _ in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_says_whose_privacy_it_keeps_counts_people_and_refuses_to_go_on_with_rows_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = letters(tmp_path / "letters.jsonl")
    assert cli.main(["train", "--data", spec, *COMMAND, "--canaries", "300", "--out", "run"]) == 0
    stated = json.loads(Path("run/privacy.json").read_text())
    assert stated["certified"], stated["reasons"]
    assert (stated["unit"], stated["rows_per_unit"]) == ("user", 2)
    assert stated["neighbouring_relation"] == "add or remove one user"
    rows, coins = stated["examples"]["trained_on"], Coins.read(RunFolder("run"))
    assert coins is not None
    canaries = sum(inside for _, inside in coins.tossed)
    assert stated["dataset_size"] == (rows - canaries) / ROWS + canaries  # a canary is a user of its own
    assert "hash of the name of its user" in " ".join(stated["account"])
    lines = (tmp_path / "letters.jsonl").read_text().splitlines()
    swapped = [line.replace('"p1"', '"p3"') for line in lines]
    (tmp_path / "letters.jsonl").write_text("\n".join(swapped) + "\n")
    capsys.readouterr()
    assert cli.main(["train", "--data", spec, *COMMAND, "--canaries", "300", "--out", "run", "--resume"]) == 2
    assert "was begun with other training examples" in capsys.readouterr().err


def test_a_text_of_nobody_becomes_a_user_of_its_own_and_keeps_its_digest() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    labels = torch.zeros(2, dtype=torch.int64)
    letters = Texts(zeros, zeros + 1, labels, ("a", "a"))
    canaries = Texts(zeros + torch.tensor([[1], [2]]), zeros + 1, labels)
    both = letters.joined(canaries)
    assert units(both) == 3
    assert both.digests(b"key")[2:] == canaries.digests(b"key")
    assert both.digests(b"key")[0] != Texts(zeros, zeros + 1, labels, ("b", "b")).digests(b"key")[0]


def test_all_rows_of_a_person_are_in_one_part_of_the_data(tmp_path: Path) -> None:
    config = Config(model="tiny-encoder", data=letters(tmp_path / "letters.jsonl"), classes="ham,spam", holdout=0.3)
    config = config.changed(tokenizer="words", max_length=8, unit="user:sender")
    source = parted_data(config, Show(quiet=True))
    assert source.test is not None
    assert source.held_out is not None
    parts = [set(users_of(part)) for part in (source.train, source.test, source.held_out)]
    assert len(set().union(*parts)) == sum(map(len, parts)) == USERS
    assert units(source.train) == len(source.train) / ROWS


@pytest.mark.parametrize("kind", [name for name, reader in READERS.items() if not reader.users])
def test_data_without_a_column_of_people_is_refused_by_name(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = READERS[kind].spec
    assert cli.main(["train", "--data", spec, "--unit", "user:sender", "--out", "run"]) == 2
    assert "has no column 'sender' that could say whose a row is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "row", "told"),
    [
        (["--unit", "user:who"], {}, "no column 'who' for the user; it has text, label, sender"),
        (["--unit", "user:sender"], {"sender": " "}, "the user is ' '"),
        (["--unit", "user:sender"], {"sender": None}, "the user is None"),
        (["--unit", "sender"], {}, "unit is 'sender'; it must be user:COLUMN"),
        (["--unit", "user:sender", "--canaries", "300", "--canary-kind", "mislabelled"], {}, "plant noise, or a SPEC"),
        (["--unit", "user:sender", "--limit"], {}, "limit= lets rows of others in"),
    ],
)
def test_what_would_leave_people_unprotected_is_refused(
    words: list[str], row: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"text": "see you", "label": "ham", "sender": "p1", **row}
    (tmp_path / "letters.jsonl").write_text(json.dumps(line) + "\n")
    spec = "jsonl:letters.jsonl" + ("?limit=500" if "--limit" in words else "")
    words = [word for word in words if word != "--limit"]
    common = ["--model", "tiny-encoder", "--tokenizer", "words", "--classes", "ham,spam", "--out", "run"]
    assert cli.main(["train", "--data", spec, *words, *common]) == 2
    assert told in capsys.readouterr().err
