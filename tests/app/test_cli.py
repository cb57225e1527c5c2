"""The command line, end to end in a temporary folder, and everything a user can get wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.runs import RunFolder

SMALL = ["--model", "s-cnn", "--size", "14", "--sample-rate", "0.25", "--epochs", "2", "--accountant", "rdp"]


def make_npz(path: Path, train: int = 240, test: int = 200, side: int = 14, classes: int = 3, seed: int = 0) -> str:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, train + test)
    images = generator.integers(0, 120, (train + test, side, side)) + 40 * labels[:, None, None]
    images = images.astype(np.uint8)
    parts = {"x_train": images[:train], "y_train": labels[:train], "x_test": images[train:], "y_test": labels[train:]}
    np.savez(path, **parts, num_classes=np.int64(classes))
    return f"npz:{path}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMDP_DATA", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its private data beside it."""
    folder = tmp_path_factory.mktemp("trained")
    spec = make_npz(folder / "private.npz")
    out = folder / "run"
    assert cli.main(["train", *SMALL, "--data", spec, "--method", "dpsgd", "--out", str(out), "--quiet"]) == 0
    return out


def test_risk_then_train_then_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = make_npz(tmp_path / "private.npz"), make_npz(tmp_path / "public.npz", seed=1)
    arguments = ["risk", "--model", "s-cnn", "--shadow", public, "--data", private, "--shadow-epochs", "2"]
    assert cli.main([*arguments, "--size", "14", "--out", "risk.json"]) == 0
    *_, told, _, where = capsys.readouterr().out.splitlines()
    assert told.startswith("Nothing was measured: ")
    assert "--shadow-epochs 100" in told
    assert where == "risk profile: risk.json"
    train = ["train", *SMALL, "--data", private, "--risk", "risk.json", "--out", "run"]
    assert cli.main(train) == 0
    said = capsys.readouterr()
    assert "note: the risk profile does not tell layers apart, so that all count alike. Nothing was" in said.err
    assert "certified" in said.out
    assert "epsilon" in said.err
    assert {path.name for path in Path("run").iterdir()} >= {
        "config.toml", "metrics.jsonl", "model.safetensors", "privacy.json", "report.html", "checkpoints", "figures"
    }  # fmt: skip
    assert cli.main(["audit", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in report["layers"]] == ["conv1", "conv2", "fc1", "fc2"]
    assert "not covered by any epsilon" in report["warning"]
    assert 0.01 < report["tpr_limit_at_1pct"] < 0.3  # by epsilon 5 alone it would be 0.99
    page = Path("run/report.html").read_text()
    assert f"<td>{report['tpr_limit_at_1pct']:.3f}</td>" in page
    assert "lmdp audit run --json" in page


def test_the_limit_of_a_model_on_which_more_was_spent_follows_from_epsilon_alone(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdp.app import reports
    from lmdp.report.roc import Limit

    folder = RunFolder(trained)
    stated = json.loads((trained / "privacy.json").read_text())
    by_curve = reports.tpr_limit(folder)
    monkeypatch.setattr(reports, "spent_for", lambda path: ("the run's own", "an earlier one"))
    by_epsilon = reports.tpr_limit(folder)
    assert by_epsilon == Limit(stated["epsilon"], stated["delta"]).tpr(0.01)
    assert by_curve is not None
    assert by_curve < by_epsilon / 2


def test_layers_are_weighed_by_a_risk_that_is_noise_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = make_npz(tmp_path / "private.npz"), make_npz(tmp_path / "public.npz", seed=1)
    risk = ["risk", "--model", "s-cnn", "--shadow", public, "--shadow-epochs", "1", "--size", "14", "--quiet"]
    assert cli.main([*risk, "--out", "risk.json"]) == 0
    first = {}
    for name, words in {"alike": [], "measured": ["--risk-as-measured"]}.items():
        train = ["train", *SMALL, "--data", private, "--risk", "risk.json", "--weights", "fixed", "--out", name]
        assert cli.main([*train, *words]) == 0
        assert ("all count alike" in capsys.readouterr().err) == (name == "alike")
        row = json.loads(Path(name, "metrics.jsonl").read_text().splitlines()[0])
        first[name] = row["layer_weights"]
    assert first["alike"] == pytest.approx([0.5] * 4)
    rates = np.array([layer["error_rate"] for layer in json.loads(Path("risk.json").read_text())["layers"]]).clip(
        0, 0.5
    )
    assert first["measured"] == pytest.approx((rates / np.linalg.norm(rates)).tolist())
    assert first["measured"] != pytest.approx([0.5] * 4, rel=1e-3)


def test_a_run_of_an_earlier_version_goes_on_with_the_risk_as_measured(trained: Path) -> None:
    import shutil

    shutil.copytree(trained, "copy")
    folder, path = RunFolder("copy"), Path("copy/config.toml")
    begun = folder.config()
    assert not folder.resumed(begun).risk_as_measured
    assert folder.resumed(begun.changed(risk_as_measured=True)) != begun  # refused, as any other change
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("risk_as_measured")))
    assert folder.resumed(begun).risk_as_measured


def test_a_run_says_what_was_spent_and_never_what_it_saw(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8]
    assert set(rows[0]) == {
        "step", "epoch", "epsilon", "test_accuracy", "test_examples", "layer_weights", "seconds"
    }  # fmt: skip
    privacy = json.loads((trained / "privacy.json").read_text())
    assert privacy["steps"] == 8
    assert privacy["epsilon"] == rows[-1]["epsilon"] <= 5
    assert privacy["certified"] is True


def test_compare_trains_audits_and_reports_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = make_npz(tmp_path / "private.npz"), make_npz(tmp_path / "public.npz", seed=1)
    Path("mine.toml").write_text(
        f'model = "s-cnn"\ndata = "{private}"\nshadow = "{public}"\nsample_rate = 0.25\nepochs = 1\nshadow_epochs = 2\n'
    )
    arguments = ["compare", "--recipe", "mine.toml", "--methods", "sgd,lm,lm-optimal", "--out", "both", "--json"]
    assert cli.main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["results"]) == ["sgd", "lm", "lm-optimal"]
    assert said["results"]["sgd"]["epsilon"] == "inf"
    assert said["results"]["sgd"]["certified"] is False
    assert said["results"]["lm"]["certified"] is said["results"]["lm-optimal"]["certified"] is True
    assert Path("both/report.html").stat().st_size < 6e6
    before = Path("both/lm/model.safetensors").read_bytes()
    assert cli.main([*arguments, "--resume"]) == 0
    assert Path("both/lm/model.safetensors").read_bytes() == before


def test_the_same_configuration_and_seed_give_the_same_model(tmp_path: Path) -> None:
    private = make_npz(tmp_path / "private.npz")
    first = ["train", *SMALL, "--data", private, "--seed", "3", "--method", "autos", "--quiet", "--out"]
    assert cli.main([*first, "a"]) == 0
    assert cli.main(["train", "--recipe", "a/config.toml", "--quiet", "--out", "b"]) == 0
    assert Config.load("a/config.toml") == Config.load("b/config.toml")
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert json.loads(Path("a/privacy.json").read_text())["certified"] is False


def test_embeddings_of_a_service_are_audited_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    member, nonmember = generator.normal(0.5, 1, (300, 4)), generator.normal(0, 1, (300, 4))
    np.savez("embeddings.npz", member=member, nonmember=nonmember)
    assert cli.main(["audit", "embeddings.npz"]) == 0
    said = capsys.readouterr().out
    assert "gives membership away" not in said
    assert "may be a difference between the groups" in said
    assert "no other layer" in said
    page = Path("embeddings.audit.html").read_text()
    assert "Add arrays member_inputs and nonmember_inputs" in page
    member[7, 2] = np.nan
    np.savez("broken.npz", member=member, nonmember=nonmember)
    assert cli.main(["audit", "broken.npz"]) == 2
    assert "1 of 300 rows of 'member' (rows 7) and 0 of 300 rows of 'nonmember'" in capsys.readouterr().err
    assert not Path("broken.audit.json").exists()


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    private = make_npz(tmp_path / "private.npz")
    arguments = ["train", *SMALL, "--epochs", "3000", "--data", private, "--method", "dpsgd", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lmdp", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in said.splitlines()[-1]
    assert "Traceback" not in said
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert not (tmp_path / "run/model.safetensors").exists()
    assert json.loads((tmp_path / "run/privacy.json").read_text())["steps"] == steps[-1] > 0


def test_an_interrupted_run_is_continued_to_its_end_and_counts_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmdp.app import training

    private = make_npz(tmp_path / "private.npz")
    train = ["train", *SMALL, "--data", private, "--out", "run", "--quiet"]
    calls = []

    def interrupting(job: training.Job) -> bool:
        calls.append(job.steps)
        if job.steps == 3:
            signal.raise_signal(signal.SIGINT)
        return job.steps == job.total

    monkeypatch.setattr(training, "evaluation_due", interrupting)
    assert cli.main(train) == 130
    assert capsys.readouterr().err.strip().endswith(f"--data {private} --out run --quiet --resume")
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 0
    assert calls == list(range(1, 9))
    assert json.loads(Path("run/privacy.json").read_text())["steps"] == 8


def test_a_copy_of_a_run_folder_is_charged_with_the_steps_that_the_run_has_made_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdp.app import training

    private, calls = make_npz(tmp_path / "private.npz"), []

    def interrupting(job: training.Job) -> bool:
        calls.append(job.steps)
        if job.steps in (3, 5):
            signal.raise_signal(signal.SIGINT)
        return job.steps == job.total

    monkeypatch.setattr(training, "evaluation_due", interrupting)
    assert cli.main(["train", *SMALL, "--data", private, "--out", "run", "--quiet"]) == 130
    shutil.copytree("run", "copy")
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 130
    assert cli.main(["train", "--out", "copy", "--resume", "--quiet"]) == 0
    assert calls == list(range(1, 9))  # three by the copy
    assert json.loads(Path("copy/privacy.json").read_text())["steps"] == 8


def test_batches_in_parts_are_one_step_each(tmp_path: Path) -> None:
    private = make_npz(tmp_path / "private.npz")
    arguments = ["train", *SMALL, "--data", private, "--max-physical-batch-size", "7", "--quiet", "--out", "run"]
    assert cli.main(arguments) == 0
    assert json.loads(Path("run/privacy.json").read_text())["steps"] == 8


@pytest.mark.slow
def test_the_demo_makes_do_with_digits_where_the_extra_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "mlxtend" else find_spec(name))
    short = ["--epochs", "1", "--shadow-epochs", "1", "--methods", "lm", "--size", "14", "--sample-rate", "0.2"]
    assert cli.main(["demo", *short]) == 0
    assert "pip install 'lmdp[demo]'" in capsys.readouterr().err
    assert Config.load("runs/demo/config.toml").data == "digits?half=1"
    assert cli.main(["demo", *short, "--quiet"]) == 0
    assert Path("runs/demo-2/report.html").exists()


def test_event_files_hold_released_quantities_only(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    private = make_npz(tmp_path / "private.npz")
    assert cli.main(["train", *SMALL, "--data", private, "--quiet", "--out", "run"]) == 0
    events = accumulator.EventAccumulator("run/tensorboard")
    events.Reload()
    weights = {f"layer_weights/{index}" for index in range(4)}
    assert set(events.Tags()["scalars"]) == {"epsilon", "test_accuracy"} | weights
    assert [event.step for event in events.Scalars("epsilon")] == [4, 8]


def test_bench_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--models", "scnn", "--steps", "2", "--only", "dpsgd", "--no-memory", "--quiet"]) == 0
    assert "lmdp dpsgd" in capsys.readouterr().out


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; from lmdp.app.cli import parser; parser().format_help(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


TRAIN = ["train", *SMALL, "--data", "npz:good.npz", "--quiet"]
BAD: dict[str, tuple[list[str], str]] = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["trian"], "invalid choice"),
    "unknown option": ([*TRAIN, "--out", "x", "--epsilonn", "3"], "unrecognized arguments"),
    "option cut short": ([*TRAIN, "--out", "x", "--eps", "3"], "unrecognized arguments"),
    "no out": (TRAIN, "required: --out"),
    "negative epsilon": ([*TRAIN, "--out", "x", "--epsilon", "-1"], "--epsilon is -1.0"),
    "epsilon in words": ([*TRAIN, "--out", "x", "--epsilon", "five"], "--epsilon is 'five'"),
    "epsilon not a number": ([*TRAIN, "--out", "x", "--epsilon", "nan"], "--epsilon is nan"),
    "infinite epsilon": ([*TRAIN, "--out", "x", "--epsilon", "inf"], "--epsilon is inf"),
    "delta of 1": ([*TRAIN, "--out", "x", "--delta", "1"], "--delta is 1.0"),
    "delta of 0": ([*TRAIN, "--out", "x", "--delta", "0"], "--delta is 0.0"),
    "delta of 1 / examples": ([*TRAIN, "--out", "x", "--delta", str(1 / 240)], "not below 1 / 240 examples"),
    "classes that only labels tell": ([*TRAIN, "--out", "x", "--data", "npz:bare.npz"], "add classes = 3"),
    "too few classes": ([*TRAIN, "--out", "x", "--classes", "2"], "has 3 classes; classes declares 2"),
    "a class twice": ([*TRAIN, "--out", "x", "--classes", "a,b,a"], "classes is 'a,b,a'"),
    "unknown splits": ([*TRAIN, "--out", "x", "--splits", "luck"], "--splits is 'luck'"),
    "neither true nor false": ([*TRAIN, "--out", "x", "--public-size", "maybe"], "must be true or false"),
    "q above 1": ([*TRAIN, "--out", "x", "--sample-rate", "1.5"], "--sample-rate is 1.5"),
    "q of 0": ([*TRAIN, "--out", "x", "--sample-rate", "0"], "--sample-rate is 0.0"),
    "no epochs": ([*TRAIN, "--out", "x", "--epochs", "0"], "--epochs is 0.0"),
    "unknown method": ([*TRAIN, "--out", "x", "--method", "magic"], "--method is 'magic'"),
    "unknown weights": ([*TRAIN, "--out", "x", "--weights", "magic"], "--weights is 'magic'"),
    "optimal without gradients": ([*TRAIN, "--out", "x", "--method", "lm-optimal"], "needs public"),
    "unknown accountant": ([*TRAIN, "--out", "x", "--accountant", "gdp"], "--accountant is 'gdp'"),
    "half a seed": ([*TRAIN, "--out", "x", "--seed", "1.5"], "--seed is '1.5'"),
    "two channels": ([*TRAIN, "--out", "x", "--channels", "2"], "channels is 2"),
    "negative clip norm": ([*TRAIN, "--out", "x", "--clip-norm", "-1"], "--clip-norm is -1.0"),
    "negative learning rate": ([*TRAIN, "--out", "x", "--learning-rate", "-1"], "--learning-rate is -1.0"),
    "empty parts": ([*TRAIN, "--out", "x", "--max-physical-batch-size", "0"], "is 0"),
    "unknown model": ([*TRAIN, "--out", "x", "--model", "s-cmn"], "Did you mean 's-cnn'"),
    "module that is not there": ([*TRAIN, "--out", "x", "--model", "no_such:make"], "no_such"),
    "factory that is not there": ([*TRAIN, "--out", "x", "--model", "json:make"], "no callable 'make'"),
    "factory that makes no model": ([*TRAIN, "--out", "x", "--model", "builtins:dict"], "made a dict"),
    "images too small": ([*TRAIN, "--out", "x", "--size", "8"], "at least 14x14"),
    "unknown data": ([*TRAIN, "--out", "x", "--data", "mnits"], "mnits"),
    "missing npz": ([*TRAIN, "--out", "x", "--data", "npz:none.npz"], "none.npz"),
    "npz that is none": ([*TRAIN, "--out", "x", "--data", "npz:junk.bin"], "junk.bin"),
    "npz without labels": ([*TRAIN, "--out", "x", "--data", "npz:nolabels.npz"], "y_train"),
    "npz with code in it": ([*TRAIN, "--out", "x", "--data", "npz:pickled.npz"], "pickled.npz"),
    "wrong shape": ([*TRAIN, "--out", "x", "--data", "npz:shape.npz"], "shape.npz"),
    "labels of another length": ([*TRAIN, "--out", "x", "--data", "npz:length.npz"], "length.npz"),
    "no examples, no classes": ([*TRAIN, "--out", "x", "--data", "npz:empty.npz"], "empty.npz"),
    "missing folder": ([*TRAIN, "--out", "x", "--data", "folder:none"], "none"),
    "folder without classes": ([*TRAIN, "--out", "x", "--data", "folder:hollow"], "hollow"),
    "unknown data option": ([*TRAIN, "--out", "x", "--data", "digits?sise=3"], "sise"),
    "missing risk file": ([*TRAIN, "--out", "x", "--risk", "none.json"], "none.json"),
    "risk file that is none": ([*TRAIN, "--out", "x", "--risk", "junk.bin"], "junk.bin is not a risk profile"),
    "risk of another model": ([*TRAIN, "--out", "x", "--risk", "other.json"], "another architecture"),
    "unknown recipe": (["train", "--recipe", "imagenet", "--out", "x"], "celeba, cifar10"),
    "recipe with unknown key": (["train", "--recipe", "typo.toml", "--out", "x"], "Did you mean 'method'"),
    "recipe that is no TOML": (["train", "--recipe", "broken.toml", "--out", "x"], "broken.toml is not TOML"),
    "missing recipe file": (["train", "--recipe", "none.toml", "--out", "x"], "none.toml"),
    "out is a file": ([*TRAIN, "--out", "junk.bin"], "junk.bin is a file"),
    "out holds a run": ([*TRAIN, "--out", "taken"], "holds a run already"),
    "resume nothing": (["train", "--out", "x", "--resume"], "no run to resume"),
    "resume another configuration": ([*TRAIN, "--out", "taken", "--resume", "--epsilon", "1"], "differ"),
    "public data of more classes": (
        [*TRAIN, "--out", "x", "--weights", "public", "--public", "digits"],
        "public data 'digits' has labels up to 9",
    ),
    "public data that is private": (
        [*TRAIN, "--out", "x", "--weights", "public", "--public", "npz:good.npz"],
        "in both the",
    ),
    "risk on private data": (
        ["risk", "--shadow", "npz:good.npz", "--data", "npz:good.npz", "--size", "14", "--out", "r.json"],
        "in both the",
    ),
    "risk over a file": (["risk", "--shadow", "digits", "--out", "junk.bin"], "junk.bin exists"),
    "risk into nowhere": (["risk", "--shadow", "digits", "--out", "no/where.json"], "not a folder"),
    "risk of too few": (
        ["risk", "--shadow", "npz:few.npz", "--size", "14", "--shadow-epochs", "1", "--out", "r.json"],
        "needs",
    ),
    "audit of nothing": (["audit", "none"], "does not exist"),
    "audit of a folder without run": (["audit", "hollow"], "not a run folder"),
    "audit of an unfinished run": (["audit", "taken"], "unfinished"),
    "embeddings without members": (["audit", "good.npz"], "'member' and 'nonmember'"),
    "embeddings that are none": (["audit", "junk.bin"], "junk.bin"),
    "bench of nothing known": (["bench", "--models", "alexnet"], "alexnet"),
    "bench of one step": (["bench", "--steps", "1"], "steps is 1"),
    "epsilon of a file": (["audit", "good.npz", "--epsilon"], "run folder"),
    "epsilon by few runs": (["audit", "taken", "--epsilon", "--runs", "3"], "at least 8"),
    "unknown methods": (["compare", "--recipe", "demo", "--methods", "lm,magic", "--out", "x"], "magic"),
    "no methods": (["compare", "--recipe", "demo", "--methods", ",", "--out", "x"], "--methods is ','"),
}


@pytest.fixture
def _surroundings(tmp_path: Path) -> None:
    make_npz(tmp_path / "good.npz")
    make_npz(tmp_path / "few.npz", train=20, test=10)
    images, labels = np.zeros((5, 14, 14), np.uint8), np.zeros(5, np.int64)
    np.savez(tmp_path / "bare.npz", x_train=images, y_train=labels + 2)
    np.savez(tmp_path / "nolabels.npz", x_train=images)
    np.savez(tmp_path / "pickled.npz", x_train=np.array([{"a": 1}] * 5, dtype=object), y_train=labels)
    np.savez(tmp_path / "shape.npz", x_train=np.zeros((5, 2, 3, 4, 5, 6), np.uint8), y_train=labels)
    np.savez(tmp_path / "length.npz", x_train=images, y_train=labels[:3])
    np.savez(tmp_path / "empty.npz", x_train=images[:0], y_train=labels[:0])
    (tmp_path / "junk.bin").write_bytes(b"\x00\xffjunk")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.toml").write_text(Config(data="npz:good.npz").to_toml())
    (tmp_path / "typo.toml").write_text('metod = "lm"\n')
    (tmp_path / "broken.toml").write_text("model = \n")
    layer = {
        "name": "nosuchlayer", "error_rate": 0.4, "error_rate_interval": [0.3, 0.5], "accuracy": 0.6, "auc": 0.6,
        "interval": [0.5, 0.7], "tpr_at_1pct": 0.02, "tpr_at_01pct": None, "attack": "probe",
    }  # fmt: skip
    shadow = {
        "models": 1, "examples": 9, "train_accuracy": 1, "test_accuracy": 1, "epochs": 1, "train_seconds": 1,
        "attack_seconds": 1,
    }  # fmt: skip
    profile = {"format": 1, "protocol": "heldout", "layers": [layer], "controls": [], "shadow": shadow, "seed": 0}
    (tmp_path / "other.json").write_text(json.dumps(profile))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("_surroundings")
@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_in_one_line_and_overwrites_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = BAD[case]
    before = contents(tmp_path)
    try:
        code = cli.main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    complaint = err.strip().splitlines()[-1]
    assert complaint.startswith("lmdp")
    assert said in complaint
    assert "Traceback" not in err
    assert not out
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name for name in after if not name.endswith(".lock")} == set(before)
    assert not (tmp_path / "x").exists()


def test_an_unreadable_checkpoint_and_model_are_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(trained, "copy")
    Path("copy/model.safetensors").write_bytes(b"junk")
    assert cli.main(["audit", "copy", "--quiet"]) == 2
    assert "copy/model.safetensors is not a readable model" in capsys.readouterr().err
    Path("copy/model.safetensors").unlink()
    for path in Path("copy/checkpoints").iterdir():
        path.write_bytes(b"junk")
    assert cli.main(["train", "--out", "copy", "--resume", "--quiet"]) == 2
    assert "no checkpoint is readable" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    make_npz(tmp_path / "good.npz")
    assert cli.main([*TRAIN, "--out", "locked/run"]) == 2
    assert "locked/run" in capsys.readouterr().err


def test_a_folder_under_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_npz(tmp_path / "good.npz")
    assert cli.main([*TRAIN, "--out", "good.npz/run"]) == 2
    assert "good.npz" in capsys.readouterr().err


def test_the_epsilon_of_a_run_is_bounded_from_below_and_drawn(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(trained, "copy")
    assert cli.main(["audit", "copy", "--epsilon", "--runs", "8", "--json"]) == 0
    bounds = json.loads(capsys.readouterr().out)["epsilon_bounds"]
    assert [bound["canary"] for bound in bounds] == ["dirac", "tipping", "mislabelled"]
    assert all(bound["lower"] <= bound["claimed"] for bound in bounds)
    assert abs(bounds[-1]["claimed"] - 5) < 0.2  # the run's own training, with its own epsilon
    assert "Lower bounds on epsilon" in Path("copy/report.html").read_text()
    assert Path("copy/figures/epsilon-bounds.svg").exists()


def test_secure_noise_is_stated_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdp.app import training

    private = make_npz(tmp_path / "private.npz")
    train = ["train", *SMALL, "--data", private, "--noise", "secure", "--out", "run", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluation_due", lambda job: job.steps == 3 and not signal.raise_signal(signal.SIGINT))
        assert cli.main(train) == 130
    assert cli.main([*train, "--resume"]) == 0
    privacy = json.loads(Path("run/privacy.json").read_text())
    assert privacy["certified"] is True
    assert "AES-256-CTR" in privacy["noise_source"]
    assert privacy["steps"] == 8
