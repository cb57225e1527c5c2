"""Optimizers and schedules of a run: what torch makes of the same numbers; a resumed run misses nothing."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lmdp
from lmdp.app import cli, training
from lmdp.app.arguments import config_of, parser
from lmdp.app.config import OPTIMIZERS, SCHEDULES, Config
from lmdp.app.descent import optimizer_for, peak_rate, set_rate, share_of_rate
from lmdp.methods import METHODS
from lmdp.models import build, fresh
from tests.app.runs.killing import arguments, make_data


def rates(total: int, **values: object) -> list[float]:
    return [share_of_rate(Config(**values), step, total) for step in range(total)]  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(total=st.integers(1, 400), warmup=st.none() | st.floats(0, 1), schedule=st.sampled_from(SCHEDULES[1:]))
def test_a_rate_rises_then_falls_and_is_never_zero_nor_above_its_peak(
    total: int, warmup: float | None, schedule: str
) -> None:
    shares = rates(total, schedule=schedule, warmup=warmup)
    assert all(0 < share <= 1 for share in shares)
    peak = shares.index(max(shares))
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    if schedule == "warmup":
        assert shares[peak:] == [shares[peak]] * (total - peak)


def test_cosine_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs, shares = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50), []
    for _ in range(50):
        shares.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(50, schedule="cosine") == pytest.approx(shares, abs=1e-12)
    assert set(rates(50)) == {1.0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_torchs_own_with_the_configured_numbers(name: str) -> None:
    momentum = 0.9 if name == "sgd" else 0.0
    config = Config(optimizer=name, learning_rate=0.3, momentum=momentum, weight_decay=0.01, schedule="cosine")
    optimizer = optimizer_for(config, nn.Linear(2, 2))
    assert type(optimizer) is {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group.get("momentum", 0.0)) == (0.3, 0.01, momentum)
    set_rate(optimizer, config, 50, 100)
    assert group["lr"] == pytest.approx(0.15)
    plain = optimizer_for(config.changed(method="sgd", sgd_learning_rate=0.7), nn.Linear(2, 2))
    assert plain.param_groups[0]["lr"] == 0.7


OPTIONS = ("--schedule", "cosine", "--warmup", "0.2", "--weight-decay", "0.01", "--ema", "0.9")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("data"))


def without_momentum(spec: str, out: Path, *more: str) -> list[str]:
    words = arguments(spec, out, "dpsgd", *more)
    at = words.index("--momentum")
    return [*words[:at], *words[at + 2 :]]


def test_interrupted_a_run_with_adamw_schedule_average_and_views_ends_with_the_same_bytes(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--optimizer", "adamw", "--seed", "3", "--augment", "flip,crop", "--views", "2", *OPTIONS)
    assert cli.main(without_momentum(spec, tmp_path / "whole", *options)) == 0
    command = [*without_momentum(spec, tmp_path / "run", *options), "--resume"]
    due = training.evaluation_due

    def interrupting(job: training.Job) -> bool:
        if job.steps == 7:
            signal.raise_signal(signal.SIGINT)
        return due(job)

    monkeypatch.setattr(training, "evaluation_due", interrupting)
    assert cli.main(command) == 130
    monkeypatch.setattr(training, "evaluation_due", due)
    assert cli.main(command) == 0
    for name in ("model.safetensors", "average.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= last["average_test_accuracy"] <= 1


def test_what_is_saved_as_average_is_that_of_the_released_weights_and_costs_nothing(spec: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    words = ("--seed", "3", "--evaluate-every", "1", "--keep-checkpoints", "1000", "--sample-rate", "1")
    assert cli.main(without_momentum(spec, tmp_path / "run", *words, *OPTIONS)) == 0
    assert cli.main(without_momentum(spec, tmp_path / "plain", *words, *OPTIONS[:-2])) == 0
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(model[name], t) for name, t in load_file(tmp_path / "plain" / "model.safetensors").items())
    stated = [json.loads((tmp_path / name / "privacy.json").read_text()) for name in ("run", "plain")]
    assert stated[0]["epsilon"] == stated[1]["epsilon"]
    expected = {k: t.double() for k, t in fresh(lambda: build("s-cnn", (1, 14, 14), 3), 3).state_dict().items()}
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) == 7  # one before training, and one for each of the steps: sample_rate 1
    for t, path in enumerate(checkpoints[1:]):
        decay = min(0.9, (1 + t) / (10 + t))
        now = {k.removeprefix("model/"): v for k, v in load_file(path).items() if k.startswith("model/")}
        expected = {k: decay * v + (1 - decay) * now[k].double() for k, v in expected.items()}
    average = load_file(tmp_path / "run" / "average.safetensors")
    assert all(torch.allclose(average[k].double(), v, atol=1e-6) for k, v in expected.items())
    assert not any(torch.equal(average[k], model[k]) for k in average)
    assert math.isfinite(sum(float(t.sum()) for t in average.values()))
    loaded, run = lmdp.load(tmp_path / "run", average=True), str(tmp_path / "run")
    assert all(torch.equal(average[k], t) for k, t in loaded.model.state_dict().items())
    pixels = torch.zeros(2, 1, 14, 14, dtype=torch.uint8)
    assert cli.main(["export", run, "--average", "--to", str(tmp_path / "out")]) == 0
    assert (lmdp.load(tmp_path / "out").embed(pixels) == loaded.embed(pixels)).all()
    assert cli.main(["embed", run, "--average", "--data", spec, "--out", str(tmp_path / "e.npz")]) == 0
    with pytest.raises(ValueError, match=r"has no average.safetensors: runs keep one that are trained with --ema"):
        lmdp.load(tmp_path / "plain", average=True)


def test_a_run_with_tanh_and_standardised_filters_is_certified_and_remembers_them(spec: str, tmp_path: Path) -> None:
    options = ("--activation", "tanh", "--weight-standardisation", "--classes", "3", "--channels", "1")
    assert cli.main(without_momentum(spec, tmp_path / "run", "--delta", "0.001", *options)) == 0
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["certified"] is True
    config = Config.load(tmp_path / "run" / "config.toml")
    assert config.model_options.items() >= {"activation": "tanh", "standardised": True}.items()


@pytest.mark.parametrize("method", ["dpsgd", "sgd"])
def test_a_run_on_views_says_that_an_example_is_all_of_them(spec: str, tmp_path: Path, method: str) -> None:
    options = ("--delta", "0.001", "--classes", "3", "--channels", "1", "--augment", "crop", "--views", "3")
    words = [*without_momentum(spec, tmp_path / "run", *options), "--method", method]
    assert cli.main(words) == 0
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    private = method == "dpsgd"
    assert (stated["certified"], stated["rows_per_unit"], stated["unit"]) == (private, 3 if private else 1, "example")
    assert stated["sample_rate"] == pytest.approx(0.25, abs=0.02)


def test_views_that_nothing_makes_differ_are_refused(spec: str, tmp_path: Path, capsys: Any) -> None:
    for words, said in ((["--views", "3"], "augment = flip,crop"), (["--augment", "flop"], "must be among flip, crop")):
        assert cli.main(without_momentum(spec, tmp_path / "run", *words)) == 2
        assert said in capsys.readouterr().err


def test_a_run_in_units_of_clip_norm_and_gain_is_certified(spec: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f'data = "{spec}"\nshadow = "digits"\nsize = 14\nclasses = 3\nchannels = 1\ndelta = 0.001\nsample_rate = 0.25\n'
        "epochs = 1\nunit_clip = true\nunit_gain = true\n"
    )
    out = tmp_path / "run"
    assert cli.main(["train", "--recipe", str(tmp_path / "mine.toml"), "--out", str(out), "--quiet"]) == 0
    assert json.loads((out / "privacy.json").read_text())["certified"] is True
    assert "unit_gain = true" in (out / "config.toml").read_text()


@pytest.mark.parametrize("private", [name for name, method in METHODS.items() if method.private])
def test_a_learning_rate_that_is_given_is_used_by_the_method_that_is_trained(private: str) -> None:
    def rate(*words: str) -> float:
        asked = parser().parse_args(["train", "--out", "nowhere", "--recipe", "mnist", "--weights", "public", *words])
        return peak_rate(config_of(asked, asked.recipe))

    assert rate("--method", private, "--learning-rate", "0.3") == 0.3
    assert rate("--method", "sgd", "--learning-rate", "0.3") == 0.3
    assert rate("--method", "sgd", "--sgd-learning-rate", "0.3") == 0.3
    assert rate("--method", private) == rate()  # of the recipe
    with pytest.raises(ValueError, match=f"{private} is trained: give --learning-rate instead"):
        rate("--method", private, "--sgd-learning-rate", "0.3")
    with pytest.raises(ValueError, match="leave one out"):
        rate("--method", "sgd", "--learning-rate", "0.3", "--sgd-learning-rate", "0.2")


@pytest.mark.parametrize(
    ("methods", "words", "rates"),
    [
        ("sgd,dpsgd", "--learning-rate 0.3", (0.05, 0.3)),
        ("sgd,dpsgd", "--learning-rate 0.3 --sgd-learning-rate 0.2", (0.2, 0.3)),
        ("sgd", "--learning-rate 0.3", (0.3, 0.3)),
    ],
)
def test_methods_that_are_compared_have_the_learning_rates_that_are_given(
    methods: str, words: str, rates: tuple[float, float]
) -> None:
    asked = parser().parse_args(
        ["compare", "--recipe", "mnist", "--out", "nowhere", "--methods", methods, *words.split()]
    )
    config = config_of(asked, asked.recipe)
    wanted = zip(methods.split(","), rates)
    assert all(peak_rate(config.changed(method=method)) == rate for method, rate in wanted)
