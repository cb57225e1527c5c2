"""What suits so many examples and an epsilon: from public numbers alone, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdp.accounting import epsilon_spent
from lmdp.app import cli, planning
from lmdp.app.config import Config
from lmdp.app.planning import EVIDENCE, FASTEST, SLOWEST, Plan, expected, like_chance, suited, told
from tests.app.test_cli import make_npz


def planned(examples: int, parameters: int = 1000, **values: Any) -> Plan:
    return Plan.of(Config(method="dpsgd", accountant="rdp", **values), examples, parameters)


def test_the_planned_noise_keeps_the_epsilon_and_is_that_of_the_training(tmp_path: Path) -> None:
    spec = make_npz(tmp_path / "private.npz", train=120, test=60)
    words = ["--epsilon", "4", "--delta", "0.001", "--epochs", "2", "--accountant", "rdp", "--quiet"]
    shape = ["--size", "14", "--classes", "3", "--channels", "1", "--holdout", "0", "--method", "dpsgd"]
    assert cli.main(["train", "--data", spec, *shape, *words, "--out", str(tmp_path / "run")]) == 0
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    plan = planned(120, epsilon=4.0, delta=0.001, epochs=2.0)
    assert (plan.batch_size, plan.sample_rate, plan.steps) == (22, stated["sample_rate"], stated["steps"])
    assert plan.noise_multiplier == stated["noise_multiplier"]
    spent = epsilon_spent(plan.noise_multiplier, plan.sample_rate, steps=plan.steps, delta=0.001, accountant="rdp")
    assert 3.9 < spent <= 4.0
    config = Config.load(tmp_path / "run" / "config.toml")
    parameters = 16 * 64 + 16 + 32 * 16 * 16 + 32 + 32 * 32 + 32 + 3 * 32 + 3
    fresh = Config(method="dpsgd", epsilon=4.0, delta=0.001, epochs=2.0, accountant="rdp")
    chosen = suited(fresh, 120, parameters)
    assert (config.learning_rate, config.sample_rate) == (chosen.learning_rate, chosen.sample_rate)
    assert config.batch_for(120) == 22
    assert config.changed(sample_rate=None).batch_for(10_000) != config.batch_for(10_000)  # another run has the same q


def test_a_run_without_a_learning_rate_goes_on_with_the_one_that_was_chosen(tmp_path: Path) -> None:
    spec = make_npz(tmp_path / "private.npz", train=120, test=60)
    words = ["train", "--data", spec, "--size", "14", "--method", "dpsgd", "--epochs", "1", "--quiet"]
    assert cli.main([*words, "--out", str(tmp_path / "run")]) == 0
    assert cli.main([*words, "--out", str(tmp_path / "run"), "--resume"]) == 0


@settings(max_examples=6, deadline=None)
@given(examples=st.integers(60, 10**6), epsilon=st.floats(0.5, 20), momentum=st.sampled_from([0.0, 0.9]))
def test_what_is_chosen_is_possible_and_noise_falls_with_examples(
    examples: int, epsilon: float, momentum: float
) -> None:
    plan = planned(examples, epsilon=epsilon, delta=1e-7)
    more = planned(4 * examples, epsilon=epsilon, delta=1e-7)
    assert 1 <= plan.batch_size <= examples
    assert more.noise_of_a_training < plan.noise_of_a_training
    config = Config(method="dpsgd", accountant="rdp", epsilon=epsilon, delta=1e-7, momentum=momentum, unit_clip=True)
    rate = suited(config, examples, 1000).learning_rate
    assert rate is not None
    assert 0.99 * SLOWEST <= rate / (1 - momentum) <= 1.01 * FASTEST


def test_the_learning_rate_and_the_clip_norm_come_apart() -> None:
    rates = [suited(Config(method="dpsgd", accountant="rdp", clip_norm=c), 5000, 1000).learning_rate for c in (1, 0.1)]
    assert rates[1] == pytest.approx(10 * rates[0])  # type: ignore[operator]
    unit = Config(method="dpsgd", accountant="rdp", clip_norm=0.1, unit_clip=True)
    assert suited(unit, 5000, 1000).learning_rate == rates[0]
    assert suited(Config(method="dpsgd", learning_rate=0.3), 5000, 1000).learning_rate == 0.3
    assert suited(Config(method="sgd"), 5000, 1000).learning_rate is None


def test_a_batch_that_is_too_small_is_told_with_one_that_suits() -> None:
    config = Config(method="dpsgd", accountant="rdp", learning_rate=0.1)
    assert "expected batch 12 of 1202" in told(config.changed(batch_size=12), 1202, 26_010)
    assert "batch_size = 122 makes it" in told(config.changed(batch_size=12), 1202, 26_010)
    assert "makes it" not in told(config, 1202, 26_010)


def test_an_accuracy_that_chance_could_give_is_said_to_be_one() -> None:
    labels = [0] * 30 + [1] * 20 + [2] * 10
    assert "within its interval of chance" in like_chance({"test_accuracy": 0.55}, labels)
    assert "gives 50.0%" in like_chance({"test_accuracy": 0.55}, labels)
    assert like_chance({"test_accuracy": 0.75}, labels) == ""
    assert like_chance({"test_accuracy": None}, []) == ""


def test_what_to_expect_is_said_from_trainings_that_were_run() -> None:
    ordered = sorted(EVIDENCE, key=lambda each: each.noise_of_a_training)
    assert len(ordered) >= 3
    middle = Plan(1000, 5.0, 1e-5, 40.0, 100, 1.0, 1)
    said = expected(middle)  # quieter than all
    assert "less noise" not in said
    assert ordered[0].what in said
    loud = planned(60, parameters=10**8, epsilon=0.1, delta=1e-7)
    assert "expect little, or nothing, above chance" in expected(loud)
    for each in EVIDENCE:
        assert each.private < each.without


def test_the_command_touches_no_data_and_answers_in_text_and_json(capsys: Any, tmp_path: Path) -> None:
    words = ["plan", "--examples", "54160", "--epsilon", "3", "--accountant", "rdp"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    for word in ("noise multiplier", "expected batch     2130", "learning rate", "what to expect", EVIDENCE[0].what):
        assert word in text
    assert cli.main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["batch_size"] == 2130
    assert content["noise_multiplier"] == pytest.approx(planned(54160, epsilon=3.0).noise_multiplier)
    for wrong, said in ((["--examples", "0"], "at least 1"), (["--examples", "200000"], "Choose a delta below")):
        assert cli.main(["plan", *wrong, "--epsilon", "3"]) == 2
        assert said in capsys.readouterr().err


def test_planning_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, lmdp.app.planning; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert planning.PARAMETERS == 26_010
