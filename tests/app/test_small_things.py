"""Small things that stop people: each is said in one line, before time is lost, and nothing is written elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lmdp.app import beforehand, cli, doctor
from lmdp.app.arguments import EXAMPLES, parser
from lmdp.app.config import SETTINGS, Config
from lmdp.app.doctor import Finding, Findings, exactness, examine, text_of
from lmdp.app.runs import RunFolder, save_model
from lmdp.data import load
from lmdp.data.readers import READERS
from lmdp.data.request import anchored
from tests.app.test_cli import SMALL, make_npz


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMDP_DATA", str(tmp_path / "cache"))


def test_an_empty_out_is_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--data", "digits", "--out", ""])
    assert "names no folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, said",
    [
        (["train", "--ouy", "x"], "required: --out; --ouy is unknown; did you mean --out?"),
        (["embed", "run", "--oot=x.npz"], "required: --out; --oot=x.npz is unknown; did you mean --out?"),
        (["trian", "--out", "x"], "did you mean train?"),
        (["embed", "run", "--out", "x.npz", "--pooling", "meen"], "did you mean mean?"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_that_there_is(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert said in capsys.readouterr().err


def test_a_mistyped_recipe_or_option_of_data_gets_the_nearest_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--recipe", "mnst", "--out", "x"]) == 2
    assert "recipe is 'mnst'; did you mean 'mnist'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown option 'corp' for folder; did you mean 'crop'"):
        load("folder:photos?corp=1")


@pytest.mark.parametrize("model", ["rosnet18", "nowhere:net"])
@pytest.mark.parametrize("command", ["train", "risk"])
def test_a_mistyped_model_is_found_before_a_photo_is_decoded(
    model: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "broken.png").write_bytes(b"not a picture")
    data = ["--data", "folder:photos", "--shadow", "folder:photos"]
    assert cli.main([command, "--model", model, *data, "--out", "there"]) == 2
    said = capsys.readouterr().err
    assert f"model {'is' if ':' not in model else 'names the module'}" in said
    assert "data:" not in said
    assert not (tmp_path / "there").exists()


def test_a_missing_risk_profile_is_found_before_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--data", "npz:nowhere.npz", "--risk", "nowhere.json", "--out", "run"]) == 2
    assert "nowhere.json', which is not a file; lmdp risk makes one" in capsys.readouterr().err


@pytest.mark.parametrize("shadow", ["npz:nowhere.npz", "folder:nowhere", "jsonl:nowhere.jsonl"])
def test_public_data_that_are_not_there_are_missed_before_the_private_are_read(
    shadow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_npz(Path("mine.npz"))
    assert cli.main(["risk", "--model", "s-cnn", "--data", "npz:mine.npz", "--shadow", shadow, "--out", "r.json"]) == 2
    said = capsys.readouterr().err
    assert "is not there" in said
    assert "data:" not in said


def test_a_package_that_is_missing_is_missed_before_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beforehand.importlib.util, "find_spec", lambda name: None)
    for kind, (package, extra) in beforehand.NEEDS.items():
        with pytest.raises(ImportError, match=rf"{package}, which is missing: pip install 'lmdp\[{extra}\]'"):
            beforehand.look_ahead(Config(shadow={"hf": "hf:name"}.get(kind, kind)))


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    command = [sys.executable, "-m", "lmdp", "doctor", "--quick", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_epsilon_that_protects_nobody_is_said_to() -> None:
    assert "protects nobody" in beforehand.look_ahead(Config(epsilon=5000.0))[0]
    assert beforehand.look_ahead(Config(epsilon=8.0)) == []
    assert beforehand.look_ahead(Config(method="sgd", epsilon=5000.0)) == []


def test_paths_are_kept_as_seen_from_where_one_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_npz(tmp_path / "private.npz")
    assert cli.main(["train", *SMALL, "--data", "npz:private.npz", "--method", "dpsgd", "--out", "run", "--quiet"]) == 0
    monkeypatch.chdir(tmp_path.parent)
    config = RunFolder(tmp_path / "run").config()
    assert config.data == f"npz:{tmp_path / 'private.npz'}"
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0


@pytest.mark.parametrize("name", READERS)
def test_a_spec_seen_from_a_folder_means_the_same_and_twice_is_once(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    spec = f"{name}:some/where?limit=3" if reader.path else f"{name}?limit=3"
    seen = anchored(spec, tmp_path)
    assert seen == (spec.replace("some/where", f"{tmp_path}/some/where") if reader.path == "PATH" else spec)
    assert anchored(seen) == seen
    assert anchored("folder:a?landmarks=b&size=8", tmp_path) == f"folder:{tmp_path}/a?landmarks={tmp_path}/b&size=8"


def test_a_run_of_old_with_relative_paths_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.begin(Config(data="npz:private.npz"))
    folder.check(Config(data="npz:private.npz").anchored(), resume=True)


def test_a_configuration_names_only_data_that_were_used() -> None:
    elsewhere = Config(shadow="fashion-mnist", risk="elsewhere.json").to_dict()
    assert not [key for key in elsewhere if key.startswith("shadow") or key == "protocol"]
    assert Config(weights="public").to_dict()["shadow"] == "digits"
    assert Config(weights="public", shadow="svhn", risk="r.json").to_dict()["shadow"] == "svhn"
    config, said = beforehand.without_unused_shadow(Config(shadow="svhn"), given=True)
    assert "shadow" not in config.to_dict()
    assert "--risk" in said[0]


def test_a_run_says_where_its_risk_came_from_and_names_no_data_that_it_did_not_come_from(tmp_path: Path) -> None:
    public, private = make_npz(tmp_path / "public.npz", seed=1), make_npz(tmp_path / "private.npz")
    words = ["--model", "s-cnn", "--size", "14", "--channels", "1"]
    measured = ["risk", *words, "--data", private, "--shadow", public, "--shadow-epochs", "1", "--out", "risk.json"]
    assert cli.main(measured) == 0
    Path("mine.toml").write_text('shadow = "digits"\nmethod = "lm"\n')
    trained = ["train", "--recipe", "mine.toml", *words, "--data", private, "--risk", "risk.json", "--epochs", "1"]
    assert cli.main([*trained, "--classes", "3", "--delta", "1e-3", "--out", "run"]) == 0
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert saved["risk"] == str(tmp_path / "risk.json")
    assert not [key for key in saved if key.startswith("shadow")]
    assert "digits" not in Path("run/config.toml").read_text()
    assert json.loads(Path("run/risk.json").read_text()) == json.loads(Path("risk.json").read_text())
    assert json.loads(Path("run/risk.json").read_text())["shadow"]["of"].startswith("s-cnn on npz:")


def test_bytes_saved_as_floats_are_refused_with_what_to_do(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8)).astype(np.float32)
    labels = np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels)
    with pytest.raises(ValueError, match=r"bytes saved as floats.*uint8.*/ 255 - 0.5\) / 0.5"):
        load("npz:a.npz")
    np.savez(tmp_path / "b.npz", x_train=(images / 255 - 0.5) / 0.5, y_train=labels)
    np.savez(tmp_path / "c.npz", x_train=images.astype(np.uint8), y_train=labels)
    kept, bytes_ = load("npz:b.npz").train.tensors()[0], load("npz:c.npz").train.tensors()[0]
    torch.testing.assert_close(kept, bytes_[:, 0])


def test_one_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_npz(tmp_path / "one.npz", classes=1)
    assert cli.main(["train", *SMALL, "--data", spec, "--out", "run"]) == 2
    assert "has 1 class" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_class_folders_one_level_too_deep_are_named(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / "animals" / kind).mkdir(parents=True)
        for i in range(4):
            Image.new("L", (8, 8), i).save(tmp_path / "photos" / "animals" / kind / f"{i}.png")
    with pytest.raises(ValueError, match="write folder:photos/animals"):
        load("folder:photos")
    assert load("folder:photos/animals").classes == ("cat", "dog")


@pytest.mark.parametrize("weight, told", [(1e28, "1e+28"), (float("nan"), "not finite"), (3.0, "")])
def test_weights_that_exploded_are_said_to(weight: float, told: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, weight)
    save_model(tmp_path / "model.safetensors", model, ())
    said = beforehand.explosion(tmp_path / "model.safetensors")
    assert told in said
    assert bool(said) == bool(told)


def test_help_has_every_setting_in_a_group_and_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["compare", "--help"])
    told = capsys.readouterr().out
    assert all(f"--{key.replace('_', '-')}" in told for key in SETTINGS if key != "method")
    assert all(f"\n{title}:\n" in told for title in ("model", "data", "privacy", "training", "risk on shadow data"))
    assert "overrides the recipe" not in told
    assert {"train", "embed", "export"} <= set(EXAMPLES)
    assert "jsonl:" in "".join(EXAMPLES["train"])
    assert "mps" not in SETTINGS["device"].help  # it is refused
    for command, lines in EXAMPLES.items():
        for line in lines:
            words = line.replace("\\\n", " ").split()
            assert parser().parse_args(words[1:]).command == command


def test_help_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert told.count(f"\n  lmdp {command} ") == 1
        assert f"\n    {command} " not in told


def test_the_doctor_finds_this_machine_well() -> None:
    told = text_of(examine(quick=True))
    assert f"torch {torch.__version__}" in told
    assert "nothing was tested" in told
    assert "float32" in exactness()


def test_the_doctor_finds_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = doctor._bounded
    monkeypatch.setattr(doctor, "_bounded", lambda *given: 1.001 * bounded(*given))
    with pytest.raises(AssertionError, match="differ from a plain loop's"):
        exactness()
    assert not Findings((Finding("noise", "…", False),)).well


def test_a_doctor_who_finds_something_wrong_exits_with_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdp.app.doctor.examine", lambda **_: Findings((Finding("noise", "…", False),)))
    assert cli.main(["doctor"]) == 2


def test_a_run_of_too_few_steps_is_advised_to_make_more_and_not_to_call_what_it_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_npz(tmp_path / "data.npz")
    words = ["train", *SMALL[:2], *SMALL[4:], "--data", spec, "--method", "dpsgd", "--out", "run"]
    assert cli.main([*words, "--sample-rate", "1", "--epochs", "1"]) == 0
    stated = json.loads(Path("run/privacy.json").read_text())
    assert (stated["steps"], stated["certified"]) == (1, False)
    assert "train again with more --epochs" in str(stated["reasons"])
    assert "engine.looking()" not in capsys.readouterr().out + json.dumps(stated)
