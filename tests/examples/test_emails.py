"""examples/emails from a folder of the corpus to a search: on made-up mails, with a tiny encoder of random weights."""

from __future__ import annotations

import copy
import gzip
import importlib
import json
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import lmdp

SCRIPTS = Path(__file__).parents[2] / "examples" / "emails"
WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":"]


def run(script: str, *given: object) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def corpus(folder: Path, number: int) -> Path:
    """A folder as the npm package has it: groups of JSON files, of which one is a list."""
    random_words, letters = random.Random(0), "abcdefghij"
    for i in range(number):
        spam = i % 3 == 0
        words = [random_words.choice(WORDS[:30] if spam else WORDS[20:]) for _ in range(24)]
        group = folder / ("spam-1" if spam else "easy-ham-1")
        group.mkdir(parents=True, exist_ok=True)
        body = f"<p class='x'>{' '.join(words)}</p><style>none</style>"
        raw = f"Subject: {letters[i % 10]}\nContent-Type: text/html\n\n{body}"
        (group / f"{i:04d}.json").write_text(json.dumps({"text": raw, "group": group.name}))
    (folder / "spam-1" / "file_list.json").write_text("[]")
    return folder


def encoder(folder: Path) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Made:
    mails: Path
    model: Path

    def train(self, out: Path, *given: object) -> str:
        data = ("--model", self.model, "--data", self.mails, "--quick", "--blocks", 1)
        return run("train.py", *data, "--out", out, *given)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("mails")
    mails = folder / "mails.jsonl.gz"
    assert "900 mails, 300 of them spam" in run("make_emails.py", corpus(folder / "data", 900), mails)
    return Made(mails, encoder(folder / "model"))


def test_mails_are_texts_without_markup_or_copies_in_an_order_of_their_own(tmp_path: Path) -> None:
    folder, out = corpus(tmp_path / "data", 60), tmp_path / "mails.jsonl.gz"
    (folder / "easy-ham-1" / "copy.json").write_text((folder / "easy-ham-1" / "0001.json").read_text())
    assert "60 mails, 20 of them spam" in run("make_emails.py", folder, out)
    with gzip.open(out, "rt") as file:
        rows = [json.loads(line) for line in file]
    assert all("<" not in row["text"] and "none" not in row["text"] for row in rows)
    assert {row["label"] for row in rows[:20]} == {0, 1}


@pytest.mark.slow
def test_from_a_probe_over_lora_to_an_audit_embeddings_and_a_search(made: Made, tmp_path: Path) -> None:
    probe, tuned, out = tmp_path / "probe", tmp_path / "lora", tmp_path / "embeddings.npz"
    made.train(probe, "--tune", "head", "--epsilon", 3)
    assert "certified" in made.train(tuned, "--tune", "lora", "--method", "lm", "--init", probe, "--canaries", 300)
    alone, both = (json.loads((each / "privacy.json").read_text()) for each in (probe, tuned))
    assert alone["certified"]
    assert both["certified"]
    assert both["epsilon"] > 7.2 > alone["epsilon"]  # what the probe spent is in it
    run("audit.py", tuned, "--quick")
    report = json.loads((tuned / "audit.json").read_text())
    assert [layer["name"] for layer in report["layers"]][-1] == "head"
    assert report["canaries"]["layers"]
    run("embed.py", tuned, out)
    with np.load(out) as arrays:
        assert np.allclose(np.linalg.norm(arrays["member"], axis=1), 1, atol=1e-5)
        assert len(arrays["member"]) + len(arrays["nonmember"]) == 900
    assert lmdp.audit_embeddings(out).members
    assert run("search.py", tuned, out, "w1 w2 w3", "--top", 2).count("\n") == 3


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_lora_by_the_tangent_of_a_probe_states_what_both_spent(made: Made, tmp_path: Path, loop: str) -> None:
    probe, tuned = tmp_path / "probe", tmp_path / "tangent"
    made.train(probe, "--tune", "head", "--epsilon", 3)
    assert "test accuracy" in made.train(tuned, "--tune", "tangent", "--init", probe, "--method", "lm", "--loop", loop)
    statement = json.loads((tuned / "privacy.json").read_text())
    assert statement["certified"], statement
    assert statement["epsilon"] > 7.1
    with pytest.raises(AssertionError, match="begin with one of --tune head"):
        made.train(tmp_path / "more", "--init", tuned)


def test_what_the_tangent_says_of_a_small_change_is_what_the_network_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    pytest.importorskip("peft")
    mails, tangent = (importlib.import_module(name) for name in ("mails", "tangent"))
    settings = mails.Settings(model=str(encoder(tmp_path)), data="", tune="tangent", blocks=2, length=6)
    words = torch.randint(6, 60, (40, 6), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tangent, "public_texts", lambda _: words[:20])
    monkeypatch.setattr(tangent, "bf16", nullcontext)
    model = mails.build(settings)
    torch.nn.init.normal_(model.head.weight)
    around = tangent.Tangent(model, settings)
    seen = around.seen(TensorDataset(model.below(words), torch.zeros(40))).tensors[0]
    steered = tangent.Steered(copy.deepcopy(model.head), around.sizes)
    for term in steered.terms.values():
        torch.nn.init.normal_(term.weight, std=1e-4)
    with torch.no_grad():
        before, told = (logits.diff(dim=1) for logits in (model(words), steered(seen)))
        around.write(steered)
        moved, expected = model(words).diff(dim=1) - before, told - before
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("given", [("--tune", "full", "--loop", "trainer"), ("--method", "sgd")], ids=str)
def test_a_whole_block_by_the_trainer_and_without_privacy(made: Made, tmp_path: Path, given: tuple[str, ...]) -> None:
    assert "test accuracy" in made.train(tmp_path, *given)
    assert (tmp_path / "privacy.json").exists() == ("sgd" not in given)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_a_run_that_was_stopped_goes_on_and_spends_what_one_does_that_was_not(
    made: Made, tmp_path: Path, loop: str
) -> None:
    given = ("--loop", loop, "--method", "lm")
    with pytest.raises(AssertionError, match="the same command goes on"):
        made.train(tmp_path, *given, "--pieces", 1)
    assert not (tmp_path / "result.json").exists()
    made.train(tmp_path, *given)
    statement = json.loads((tmp_path / "privacy.json").read_text())
    assert statement["certified"], statement
    assert statement["steps"] == 8
    assert statement["epsilon"] == pytest.approx(7.2, abs=0.01)
