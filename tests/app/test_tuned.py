"""`--tune head` and `--tune tangent`, from a file of texts to a served model: cost, weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lmdp
from lmdp.accounting import composed_epsilon
from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.network import Network
from lmdp.app.pipeline import parted_data
from lmdp.app.progress import Show
from lmdp.app.staged import computed, said_of_stage, taken_over
from lmdp.methods import METHODS, SOURCES
from lmdp.models import Probe, Tangent, merged
from tests.app.test_text import WORDS, write_letters
from tests.app.test_together import by_a_crew
from tests.app.test_users import letters
from tests.hub import saved_encoder
from tests.record.folders import run

pytest.importorskip("transformers")
OTHERS = [f"word{i}" for i in range(500)]
"""So that canaries of random words are like no letter."""
HEAD = ["--tune", "head", "--epochs", "4", "--epsilon", "4", "--learning-rate", "0.1"]
REST = ["--max-length", "8", "--classes", "ham,spam", "--batch-size", "200", "--delta", "1e-4", "--optimizer", "adamw"]
DPSGD = ["--method", "dpsgd", "--quiet"]


def public_letters(path: Path, private: str) -> str:
    """Letters of the same words, none of which is among the private ones."""
    spec, seen = write_letters(path, 300, seed=7), Path(private.removeprefix("jsonl:")).read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if line not in set(seen)))
    return spec


class Home:
    """A folder with an encoder, letters, and the finished run of a probe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = [
            "--model",
            f"hf:{saved_encoder(path / 'public', [*WORDS, *OTHERS], hidden_size=32)}",
            "--task",
            "embed",
        ]
        self.data = write_letters(path / "letters.jsonl")
        self.public = public_letters(path / "public.jsonl", self.data)
        self.probe = path / "probe"
        self.best = path / "best"

    def train(self, *words: str) -> list[str]:
        return ["train", *self.model, "--data", self.data, *REST, *words]

    def tangent(self, *words: str) -> list[str]:
        tangent = ["--tune", "tangent", "--init", str(self.probe), "--public", self.public]
        return self.train(*tangent, "--epochs", "3", "--epsilon", "5", *words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    made = Home(tmp_path_factory.mktemp("home"))
    assert cli.main(made.train(*HEAD, *DPSGD, "--out", str(made.probe))) == 0
    words = made.tangent("--learning-rate", "0.0001", "--clip-norm", "0.3", "--canaries", "300", *DPSGD)
    assert cli.main([*words, "--out", str(made.best)]) == 0
    return made


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def privacy(folder: Path) -> Any:
    return json.loads((folder / "privacy.json").read_text())


def last(folder: Path) -> Any:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_both_are_certified_and_the_second_states_what_both_have_spent(home: Home) -> None:
    first, second = privacy(home.probe), privacy(home.best)
    assert first["certified"], first["verdicts"]
    assert second["certified"], second["verdicts"]
    assert 3.5 < first["epsilon"] <= 4.0
    assert max(5.0, first["epsilon"]) < second["epsilon"] < 5.0 + first["epsilon"]
    trainings = [(each["noise_multiplier"], each["sample_rate"], each["steps"]) for each in (first, second)]
    assert second["epsilon"] == pytest.approx(composed_epsilon(trainings, delta=1e-4), rel=1e-3)
    assert any("adapters write where the released head and 500 texts of jsonl:" in s for s in second["account"])
    assert "tune = " in (home.best / "config.toml").read_text()


def test_a_probe_without_privacy_is_no_public_one(home: Home) -> None:
    words = home.train(*HEAD[:4], "--method", "sgd", "--quiet", "--out", "plain")
    assert cli.main(words) == 0
    assert cli.main([*home.tangent(*DPSGD, "--init", "plain"), "--out", "run"]) == 0
    stated = privacy(Path("run"))
    assert not stated["certified"]
    assert stated["epsilon"] in (None, "inf", float("inf"))


def test_only_the_head_or_the_terms_are_trained_and_the_encoder_stays(home: Home) -> None:
    public = load_file(home.path / "public" / "model.safetensors")
    probe, best = (load_file(folder / "model.safetensors") for folder in (home.probe, home.best))
    for name, tensor in public.items():
        if not name.startswith("pooler."):
            assert torch.equal(probe[f"encoder.{name}"], tensor)
    assert torch.equal(best["head.base_layer.weight"], probe["head.weight"])
    terms = {name: tensor for name, tensor in best.items() if name.endswith(".term.weight")}
    assert len(terms) == 7
    assert all(tensor.any() for tensor in terms.values())


def test_what_is_told_of_a_run_is_the_accuracy_of_the_model_that_is_served(home: Home) -> None:
    for folder in (home.probe, home.best):
        source = parted_data(Config.load(folder / "config.toml"), Show(quiet=True))
        assert source.test is not None
        loaded = lmdp.load(folder)
        right = loaded.model(**source.test.tensors()[0]).argmax(1) == source.test.labels
        assert float(right.float().mean()) == pytest.approx(last(folder)["test_accuracy"])


@pytest.mark.parametrize("name", ["probe", "best"])
def test_a_run_is_audited_embedded_exported_and_served(
    home: Home, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    shutil.copytree(getattr(home, name), "run")
    assert cli.main(["audit", "run", "--quiet"]) == 0
    report = json.loads(Path("run/audit.json").read_text())
    blocks = [f"encoder.encoder.layer.{i}" for i in range(2)]
    assert [layer["name"] for layer in report["layers"]] == ["encoder.embeddings", *blocks, "head"]
    assert ("canaries" in report and report["canaries"] is not None) == (name == "best")
    assert cli.main(["embed", "run", "--data", home.data, "--out", "e.npz", "--quiet"]) == 0
    assert cli.main(["audit", "e.npz", "--run", "run", "--quiet"]) == 0
    some, loaded = ["cheap lunch now", "draft contract"], lmdp.load("run")
    assert loaded.embed(some, blocks[1]).shape == (2, 32)
    capfd.readouterr()
    assert cli.main(["export", "run", "--to", "served", "--quiet"]) == 0
    assert "MISSING" not in "".join(capfd.readouterr())
    theirs = sentences.SentenceTransformer("served", device="cpu").encode(some)
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, rtol=1e-5)
    model: Any = loaded.model
    with torch.no_grad():
        mine = model.embed(**loaded.preprocess(some)).numpy()
    np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-5)
    merged(model)
    stated, trained = privacy(Path("served")), privacy(Path("run"))
    assert stated["made_of"] == trained["sha256"]["model.safetensors"]
    of_places = {"account": None, "sha256": None, "made_of": None}  # whose sentences name files by their last part
    assert stated | of_places == trained | of_places
    assert cli.main(["export", "run", "--to", "plain", "--form", "safetensors", "--quiet"]) == 0
    np.testing.assert_array_equal(lmdp.load("plain").embed(some), lmdp.load("run").embed(some))


@pytest.mark.slow
def test_what_is_exported_and_trained_on_composes(home: Home) -> None:
    pytest.importorskip("sentence_transformers")
    assert cli.main(["export", str(home.best), "--to", "served", "--quiet"]) == 0
    words = ["train", "--model", "hf:served", "--task", "embed", "--data", home.data, *REST, *HEAD, *DPSGD]
    assert cli.main([*words, "--out", "on"]) == 0
    assert privacy(Path("on"))["epsilon"] > privacy(home.best)["epsilon"] + 0.1


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_rows_are_those_of_each_text_alone(home: Home, precision: str) -> None:
    config = Config.load(home.best / "config.toml").changed(precision=precision)
    source = parted_data(config, Show(quiet=True))
    model, texts = Network.of(config, source).untrained(), source.train.take(range(130))
    assert isinstance(model, Tangent)
    rows = computed(config, model, texts)
    assert rows.pixels.shape == (130, model.width)
    assert f"({rows.pixels.nbytes >> 20} MB)" in said_of_stage(config, model, texts)
    assert computed(config, model, rows) is rows
    assert computed(config, model, texts, exactly=True) is texts
    same_places = texts.take([*range(50), 129, 128, *range(52, 129)])
    assert torch.equal(computed(config, model, same_places).pixels[:50], rows.pixels[:50])
    few = computed(config, model, texts.take(range(60))).pixels  # the last are filled up
    assert torch.equal(few, rows.pixels[:60])


def test_a_probe_is_tested_by_rows_as_exact_as_its_texts(home: Home) -> None:
    config = Config.load(home.probe / "config.toml").changed(precision="bf16")
    source = parted_data(config, Show(quiet=True))
    model, texts = Network.of(config, source).untrained(), source.train.take(range(70))
    assert isinstance(model, Probe)
    exact = computed(config, model, texts, exactly=True).pixels
    torch.testing.assert_close(exact, model.eval().embed(**texts.tensors()[0]))
    assert not torch.equal(exact, computed(config, model, texts).pixels)


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["head", "tangent"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(home: Home, tune: str, tmp_path: Path) -> None:
    make = home.tangent if tune == "tangent" else home.train
    words = make(*(HEAD if tune == "head" else []), "--method", "dpsgd", "--seed", "1")
    run(tmp_path, *words, "--out", "whole")
    run(tmp_path, *words, "--out", "parts", stop_after=5)
    run(tmp_path, "train", "--resume", "--out", "parts")
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert privacy(tmp_path / "whole")["epsilon"] == privacy(tmp_path / "parts")["epsilon"]


@pytest.mark.parametrize("weights", SOURCES)
def test_layers_are_weighed_by_risk_wherever_weights_come_from(home: Home, weights: str) -> None:
    names = ["encoder.encoder.layer.0", "encoder.encoder.layer.1", "head"]
    method = next(name for name, method in METHODS.items() if weights in method.sources)
    words = home.tangent("--method", method, "--weights", weights, "--shadow", home.public, "--quiet")
    assert cli.main([*words, "--layers", "block", "--out", "run"]) == 0
    stated = privacy(Path("run"))
    assert stated["certified"] == (not SOURCES[weights].refuted), stated["verdicts"]
    told = last(Path("run"))["layer_weights"]  # of one batch they are private, and not told
    assert told is None if SOURCES[weights].refuted else len(told) == len(names)


@pytest.mark.slow
def test_risk_is_measured_with_shadow_models_of_the_same_kind(home: Home) -> None:
    for tune, layers in (("head", ["head"]), ("tangent", 3)):
        words = [
            "risk",
            *home.model,
            *REST[:2],
            "--tune",
            tune,
            "--shadow",
            home.public,
            "--shadow-epochs",
            "2",
            "--quiet",
        ]
        words += ["--init", str(home.probe), "--public", home.public] if tune == "tangent" else []
        assert cli.main([*words, "--out", f"{tune}.json"]) == 0
        names = [layer["name"] for layer in json.loads(Path(f"{tune}.json").read_text())["layers"]]
        assert names == layers or len(names) == layers


def test_private_texts_do_not_say_where_adapters_write(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*home.tangent(*DPSGD, "--public", home.data), "--out", "never"]) == 2
    assert "are in both the public data and the private data" in capsys.readouterr().err


class Scaled(torch.nn.Module):
    """An encoder that divides by the largest number of the batch."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.inside, self.config = encoder, encoder.config

    def forward(self, **texts: torch.Tensor) -> Any:
        given = self.inside(**texts)
        return SimpleNamespace(last_hidden_state=torch.tanh(given.last_hidden_state / given.last_hidden_state.max()))


def test_an_encoder_in_which_texts_meet_makes_no_rows(home: Home) -> None:
    config = Config.load(home.probe / "config.toml")
    source = parted_data(config, Show(quiet=True))
    model = Network.of(config, source).untrained()
    assert isinstance(model, Probe)
    model.encoder = Scaled(model.encoder)
    with pytest.raises(ValueError, match="lets the texts of a batch meet"):
        computed(config, model, source.train)


@pytest.mark.parametrize("name", ["head.base_layer.weight", "encoder.encoder.layer.1.output.dense.direction"])
def test_a_run_does_not_go_on_with_rows_of_another_beginning(home: Home, name: str) -> None:
    config = Config.load(home.best / "config.toml")
    model = Network.of(config, parted_data(config, Show(quiet=True))).untrained()
    saved = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    saved["head.term.weight"] += 1  # is trained
    taken_over(model, saved)
    assert torch.equal(model.state_dict()["head.term.weight"], saved["head.term.weight"])
    with pytest.raises(ValueError, match="begun with other weights or other public texts"):
        taken_over(model, saved | {name: saved[name] * 1.1})


def test_people_of_one_column_are_not_those_of_another(home: Home) -> None:
    lines = [
        json.loads(line) for line in Path(letters(Path("a.jsonl")).removeprefix("jsonl:")).read_text().splitlines()
    ]
    both = [json.dumps({**row, "reader": f"q{i % 500}"}) for i, row in enumerate(lines)]
    Path("both.jsonl").write_text("".join(f"{line}\n" for line in both))
    words = ["train", *home.model, "--data", "jsonl:both.jsonl", *REST[:4], "--delta", "1e-4", *HEAD, *DPSGD]
    words += ["--user-rows", "2", "--batch-size", "100"]
    for name, certified in (("sender", True), ("reader", False)):
        begun = [] if certified else ["--init", "sender"]
        assert cli.main([*words, "--unit", f"user:{name}", *begun, "--out", name]) == 0
        assert privacy(Path(name))["certified"] == certified
    assert "privacy of one user:sender" in privacy(Path("reader"))["verdicts"]["account"]["how"]


def test_people_are_protected_as_one(home: Home) -> None:
    spec = letters(Path("people.jsonl"))
    words = ["train", *home.model, "--data", spec, *REST[:4], "--delta", "1e-4", *HEAD, *DPSGD]
    assert cli.main([*words, "--unit", "user:sender", "--user-rows", "2", "--batch-size", "100", "--out", "run"]) == 0
    stated = privacy(Path("run"))
    assert stated["certified"], stated["verdicts"]
    assert (stated["unit"], stated["rows_per_unit"]) == ("user", 2)


@pytest.mark.parametrize("tune", [pytest.param("head", marks=pytest.mark.slow), "tangent"])
def test_two_processes_leave_the_run_of_one(home: Home, tune: str, tmp_path: Path) -> None:
    make = home.tangent if tune == "tangent" else home.train
    words = make(*(HEAD if tune == "head" else []), *DPSGD, "--seed", "1", "--holdout", "0", "--out")
    assert cli.main([*words, "one"]) == 0
    by_a_crew([*words, str(tmp_path / "two")], tmp_path)
    one, two = (load_file(folder / "model.safetensors") for folder in (Path("one"), tmp_path / "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)
    assert privacy(tmp_path / "two")["epsilon"] == privacy(Path("one"))["epsilon"]


def test_what_cannot_be_tuned_is_refused_with_a_remedy(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    three = write_letters(Path("three.jsonl"), 300)
    lines = Path("three.jsonl").read_text().splitlines()
    Path("three.jsonl").write_text("\n".join([*lines, json.dumps({"text": "noon secret", "label": "other"})]) + "\n")
    never = ["--out", "never"]
    zero = load_file(home.probe / "model.safetensors")
    save_file(zero | {"head.weight": torch.zeros_like(zero["head.weight"])}, "zero.safetensors")
    silent = ["--init", "zero.safetensors", *never]
    cases = [
        (home.tangent(*DPSGD, *silent), "the head says nothing"),
        (home.tangent(*DPSGD, "--public", "sklearn-docs", *never), "public texts are all alike to the encoder"),
        (home.tangent(*DPSGD, "--public", "digits", *never), "public is 'digits', which holds no texts"),
        (home.tangent(*DPSGD, "--data", three, "--classes", "ham,spam,other", *never), "for 2 classes; classes says 3"),
    ]
    for words, said in cases:
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
        assert not Path("never").exists()
