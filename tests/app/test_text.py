"""Texts from a file to a served model: trained, stopped and resumed, audited, embedded, exported, trained on."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import lmdp
from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.runs import Coins, Members, RunFolder
from lmdp.lineage import earlier
from tests.hub import saved_encoder

WORDS = ["mail", "meeting", "budget", "lunch", "report", "draft", "contract", "noon", "secret", "cheap", "win", "now"]
TRAIN = ["--tokenizer", "words", "--max-length", "8", "--classes", "ham,spam", "--batch-size", "120"]
TRAIN += ["--epochs", "2", "--delta", "1e-4", "--learning-rate", "0.5", "--quiet"]


def write_letters(path: Path, number: int = 1300, seed: int = 0) -> str:
    """Letters of one to nine words, about half of them spam: those have one of three words in them."""
    dice = random.Random(seed)
    lines = set()
    while len(lines) < number:
        spam = dice.random() < 0.5
        words = dice.choices(WORDS[:9], k=dice.randint(1, 8)) + ([dice.choice(WORDS[9:])] if spam else [])
        lines.add(json.dumps({"text": " ".join(words), "label": "spam" if spam else "ham"}))
    path.write_text("\n".join(sorted(lines)) + "\n")
    return f"jsonl:{path}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the built-in encoder, with canaries."""
    folder = tmp_path_factory.mktemp("letters")
    words = ["--model", "tiny-encoder", "--data", write_letters(folder / "letters.jsonl"), "--canaries", "300"]
    assert cli.main(["train", *words, "--holdout", "0.2", "--method", "lm", *TRAIN, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of adapters in a model of transformers, which was public before."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapted")
    saved_encoder(folder / "public", WORDS)
    words = ["--model", f"hf:{folder / 'public'}", "--task", "embed", "--lora", "2"]
    words += ["--data", write_letters(folder / "letters.jsonl", 700), "--method", "dpsgd", *TRAIN[2:]]
    assert cli.main(["train", *words, "--out", str(folder / "run")]) == 0
    return folder / "run"


def privacy(run: Path) -> Any:
    return json.loads((run / "privacy.json").read_text())


def test_a_run_on_texts_is_certified_and_says_what_its_canaries_are(trained: Path) -> None:
    stated = privacy(trained)
    assert stated["certified"] is True
    assert any("300 canaries (noise)" in said and "random words" in said for said in stated["account"])
    assert stated["examples"]["held_out"] > 150
    assert Config.load(trained / "config.toml").layers == "block"
    coins, members = Coins.read(RunFolder(trained)), Members.read(RunFolder(trained))
    assert coins is not None
    assert members is not None
    assert len(coins.tossed) == 300
    assert 100 < sum(inside for _, inside in coins.tossed) < 200


def test_an_audit_of_texts_attacks_every_block_and_the_canaries(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", str(trained), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in report["layers"]] == ["words", "blocks.0", "blocks.1", "head"]
    assert report["pooling"] == "mean"
    assert report["canaries"]["inside"] + report["canaries"]["outside"] == 300


def test_a_finished_run_is_used_without_its_data(trained: Path) -> None:
    shutil.copytree(trained, "run")
    shutil.rmtree("run/private")
    loaded = lmdp.load("run")
    assert loaded.classes == ("ham", "spam")
    assert loaded.layers == ("words", "blocks.0", "blocks.1", "head")
    assert loaded.statement.certified
    inputs = loaded.preprocess(["cheap lunch", "budget meeting at noon"])
    assert {name: (rows.dtype, tuple(rows.shape)) for name, rows in inputs.items()} == {
        "input_ids": (torch.int64, (2, 8)),
        "attention_mask": (torch.int64, (2, 8)),
    }
    assert loaded.model(**inputs).shape == (2, 2)
    assert not loaded.model.training
    one, both = loaded.embed("cheap lunch"), loaded.embed(["cheap lunch", "budget meeting at noon"])
    assert both.shape == (2, 64)
    np.testing.assert_allclose(one[0], both[0], rtol=1e-4, atol=1e-6)


def test_embeddings_in_a_file_tell_nobody_who_was_trained_on_but_an_audit_with_the_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Config.load(trained / "config.toml").data
    assert cli.main(["embed", str(trained), "--layer", "blocks.1", "--data", data, "--out", "e.npz", "--inputs"]) == 0
    arrays = np.load("e.npz")
    assert arrays["embeddings"].shape == (1300, 64)
    members = Members.read(RunFolder(trained))
    assert members is not None
    assert not {name for name in arrays.files if "member" in name}
    texts = [json.loads(line)["text"] for line in Path(data.removeprefix("jsonl:")).read_text().splitlines()]
    loaded = lmdp.load(trained)
    mine = {row.tobytes() for row in arrays["embeddings"].round(3)}
    assert sum(row.tobytes() in mine for row in loaded.embed(texts[:20], "blocks.1").round(3)) > 15
    capsys.readouterr()
    assert cli.main(["audit", "e.npz", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    inside = sum(digest in set(members.train) for digest in arrays["digests"].tolist())
    assert report["members"] == report["nonmembers"] == min(inside, 1300 - inside)
    assert [leak["name"] for leak in report["controls"]] == ["(input)"]
    shutil.move("e.npz", "f.npz")
    arrays = {**np.load("f.npz"), "run": np.array("nowhere")}
    np.savez("g.npz", **arrays)
    assert cli.main(["audit", "g.npz"]) == 2
    assert "--run DIR" in capsys.readouterr().err
    assert cli.main(["audit", "g.npz", "--run", str(trained), "--quiet"]) == 0


@pytest.mark.slow
def test_a_run_on_texts_goes_on_after_it_was_stopped_as_if_nothing_had_been(tmp_path: Path) -> None:
    from tests.record.folders import run

    spec = write_letters(tmp_path / "letters.jsonl", 500)
    words = ["train", "--model", "tiny-encoder", "--data", spec, "--method", "dpsgd", "--seed", "1", *TRAIN[:-1]]
    run(tmp_path, *words, "--out", "whole")
    run(tmp_path, *words, "--out", "parts", stop_after=3)
    run(tmp_path, "train", "--resume", "--out", "parts")
    whole, parts = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole[-1000:] == parts[-1000:]
    assert privacy(Path("whole"))["steps"] == privacy(Path("parts"))["steps"]
    lines = Path("letters.jsonl").read_text().splitlines(keepends=True)
    Path("letters.jsonl").write_text("".join(lines[1:]))
    assert cli.main(["train", "--resume", "--out", "parts"]) == 2


def test_public_weights_are_named_and_only_adapters_are_trained(adapted: Path) -> None:
    stated = privacy(adapted)
    assert stated["certified"] is True
    assert any("began with the weights of" in said and "public (SHA-256 " in said for said in stated["account"])
    assert {path.name for path in adapted.iterdir()} >= {"network", "tokenizer", "model.json"}


def test_a_run_of_adapters_is_exported_as_a_sentence_transformer_that_gives_the_same_embeddings(adapted: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    shutil.copytree(adapted, "run")
    loaded = lmdp.load("run")  # network and tokenizer are beside it
    letters = ["cheap lunch now", "draft contract"]
    assert cli.main(["export", "run", "--to", "served"]) == 0
    assert not {path.name for path in Path("served").iterdir()} & {
        "private",
        "checkpoints",
        "audit.json",
        "config.toml",
    }
    shas = {at: hashlib.sha256((at / "model.safetensors").read_bytes()).hexdigest() for at in (Path("served"), adapted)}
    served = {"sha256": {"model.safetensors": shas[Path("served")]}, "made_of": shas[adapted]}
    mine, stated = privacy(adapted) | served, privacy(Path("served"))
    assert {**stated, "account": None} == {**mine, "account": None}
    told = Path("served", "privacy-card.md").read_text()
    assert f"- SHA-256 of model.safetensors: {shas[Path('served')]}\n" in told
    assert f"- exported from the trained model.safetensors with SHA-256: {shas[adapted]}\n" in told
    assert "leave the house" not in told
    theirs = sentences.SentenceTransformer("served", device="cpu").encode(letters)
    np.testing.assert_allclose(theirs, loaded.embed(letters), rtol=1e-4, atol=1e-5)
    assert cli.main(["export", "run", "--to", "plain", "--form", "safetensors"]) == 0
    np.testing.assert_array_equal(lmdp.load("plain").embed(letters), loaded.embed(letters))
    written = [
        path for name in ("served", "plain") for path in Path(name).rglob("*") if path.suffix in (".json", ".md")
    ]
    assert [
        path for path in written if str(adapted.parent) in path.read_text() or str(Path.cwd()) in path.read_text()
    ] == []
    assert any("weights of public (SHA-256" in said for said in stated["account"])
    told = Path("served/README.md").read_text()
    assert f"epsilon {mine['epsilon']:.4g} at delta" in told
    assert told.count("(privacy-card.md)") == 1


@pytest.mark.parametrize("here", [True, False], ids=["on this machine", "on another"])
def test_an_exported_run_of_adapters_that_is_trained_on_composes(
    adapted: Path, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers")
    config = Config.load(adapted / "config.toml")
    assert cli.main(["export", str(adapted), "--to", "served"]) == 0
    if here:  # as another program would save it, without a header and without a statement
        weights = safetensors.torch.load_file("served/model.safetensors")
        safetensors.torch.save_file(weights, "served/model.safetensors", {"format": "pt"})
        Path("served/privacy.json").unlink()
    else:
        monkeypatch.setenv("LMDP_LINEAGE", "elsewhere")
    words = ["--task", "embed", "--data", config.data, "--method", "dpsgd", *TRAIN[2:], "--epochs", "0.3"]
    assert cli.main(["train", "--model", "hf:served", *words, "--out", "on"]) == 0
    stated = privacy(Path("on"))
    assert stated["certified"], stated["verdicts"]
    assert stated["epsilon"] > 1.05 * max(config.epsilon or 0.0, privacy(adapted)["epsilon"])
    assert any("weights that earlier trainings released (1," in said for said in stated["account"])
    if here:
        public = safetensors.torch.load_file(adapted.parent / "public" / "model.safetensors")
        assert not earlier(public)  # these stay public
        return
    weights = safetensors.torch.load_file("served/model.safetensors")
    safetensors.torch.save_file(weights, "served/model.safetensors", {"format": "pt"})
    assert cli.main(["train", "--model", "hf:served", *words, "--out", "untold"]) == 0
    assert "a privacy statement lies beside" in privacy(Path("untold"))["verdicts"]["account"]["how"]
    assert not privacy(Path("untold"))["certified"]


def test_weights_of_a_private_run_compose_and_frozen_ones_stay(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Config.load(trained / "config.toml").data
    words = ["--model", "tiny-encoder", "--data", spec, "--method", "dpsgd", *TRAIN, "--epochs", "1"]
    assert cli.main(["train", *words, "--init", str(trained), "--freeze", "words.*,blocks.0.*", "--out", "on"]) == 0
    before, after = privacy(trained), privacy(Path("on"))
    assert after["epsilon"] > max(before["epsilon"], 5.0)
    assert any("weights that earlier trainings released" in said for said in after["account"])
    first, second = (dict(lmdp.load(path).model.named_parameters()) for path in (trained, Path("on")))
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {name for name in first if name.startswith(("words.", "blocks.0."))}
    capsys.readouterr()
    assert cli.main(["train", *words, "--freeze", "wrds.*", "--out", "no"]) == 2
    assert "'wrds.*', which matches none of" in capsys.readouterr().err
    assert cli.main(["train", *words, "--init", "nothing.safetensors", "--out", "no"]) == 2
    assert "nothing.safetensors is not there" in capsys.readouterr().err
    assert cli.main(["train", *words, "--device", "nowhere", "--out", "no"]) == 2
    assert "device is 'nowhere'" in capsys.readouterr().err
    assert not Path("no").exists()


def test_a_run_in_bfloat16_is_certified_like_another(tmp_path: Path) -> None:
    spec = write_letters(tmp_path / "letters.jsonl", 400)
    words = ["--model", "tiny-encoder", "--data", spec, "--method", "dpsgd", *TRAIN, "--epochs", "1"]
    assert cli.main(["train", *words, "--precision", "bf16", "--out", "run"]) == 0
    assert privacy(Path("run"))["certified"] is True
    assert {p.dtype for p in lmdp.load("run").model.parameters()} == {torch.float32}


def test_an_unknown_option_gets_the_nearest_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for command, word, meant in [("train", "--lerning-rate", "--learning-rate"), ("embed", "--layers=x", "--layer")]:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, *(["run"] if command == "embed" else []), "--out", "x.npz", word, "1"])
        assert stopped.value.code == 2
        assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_run_trains_and_is_audited_where_it_is_told_to(pretend: torch.device, tmp_path: Path) -> None:
    spec = write_letters(tmp_path / "letters.jsonl", 500)
    words = [
        "--model",
        "tiny-encoder",
        "--data",
        spec,
        "--method",
        "dpsgd",
        *TRAIN,
        "--epochs",
        "1",
        "--batch-size",
        "20",
    ]
    assert cli.main(["train", *words, "--device", str(pretend), "--out", "run"]) == 0
    assert privacy(Path("run"))["certified"] is True
    assert cli.main(["audit", "run", "--quiet"]) == 0
    assert {p.device.type for p in lmdp.load("run").model.parameters()} == {"cpu"}


@pytest.mark.slow
def test_texts_are_compared_with_public_weights_and_attacked_in_every_way(tmp_path: Path) -> None:
    private = write_letters(tmp_path / "private.jsonl", 900)
    public = write_letters(tmp_path / "public.jsonl", 400, seed=7)
    seen = set(Path("private.jsonl").read_text().splitlines())
    others = [line for line in Path("public.jsonl").read_text().splitlines() if line not in seen]
    Path("public.jsonl").write_text("\n".join(others) + "\n")
    Path("mine.toml").write_text(
        f'model = "tiny-encoder"\ndata = "{private}"\nshadow = "{public}"\nclasses = "ham,spam"\ntokenizer = "words"\n'
        'max_length = 8\nbatch_size = 150\nepochs = 1\ndelta = 1e-4\nshadow_epochs = 2\nweights = "public"\n'
    )
    assert cli.main(["compare", "--recipe", "mine.toml", "--methods", "sgd,lm", "--out", "both", "--quiet"]) == 0
    assert privacy(Path("both/lm"))["weight_source"] == "public"
    assert privacy(Path("both/lm"))["certified"] is True
    profile = json.loads(Path("both/risk.json").read_text())
    assert [layer["name"] for layer in profile["layers"]] == ["words", "blocks.0", "blocks.1", "head"]
    attacked = ["--epsilon", "--runs", "8", "--references", "2", "--white-box"]
    assert cli.main(["audit", "both/lm", *attacked, "--quiet"]) == 0
    assert len(json.loads(Path("both/lm/epsilon.json").read_text())) == 3
    assert json.loads(Path("both/lm/audit.json").read_text())["references"] == 2


@pytest.mark.slow
def test_the_demo_on_texts_ends_with_a_report() -> None:
    words = ["--epochs", "1", "--shadow-epochs", "1", "--methods", "dpsgd,lm"]
    assert cli.main(["demo", "--text", *words, "--out", "demo", "--quiet"]) == 0
    assert privacy(Path("demo/lm"))["certified"] is True
    assert Path("demo/report.html").exists()


def test_a_risk_of_the_private_texts_themselves_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = write_letters(tmp_path / "letters.jsonl", 400), tmp_path / "public.jsonl"
    write_letters(public, 400, seed=7)
    mine = set((tmp_path / "letters.jsonl").read_text().splitlines())
    public.write_text("".join(f"{line}\n" for line in public.read_text().splitlines() if line not in mine))
    words = ["--model", "tiny-encoder", "--tokenizer", "words", "--max-length", "8", "--quiet"]
    for name, spec, code in (("own", private, 2), ("other", f"jsonl:{public}", 0)):
        risk = ["--shadow", spec, "--shadow-epochs", "1", "--out", f"{name}.json"]
        assert cli.main(["risk", *words, *risk]) == 0
        train = ["train", "--data", private, "--model", "tiny-encoder", *TRAIN, "--method", "lm", "--holdout", "0"]
        assert cli.main([*train, "--risk", f"{name}.json", "--out", name]) == code
    assert "on examples that are in the private data" in capsys.readouterr().err
