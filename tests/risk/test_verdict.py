"""A profile that is noise says so and weighs layers alike, and what it tells one to do makes it speak."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.report import render, verdict
from lmdp.risk import RiskProfile, Schedule
from lmdp.risk.verdict import remedies
from tests.report import sample
from tests.risk.test_risk import digits, small

QUICK: dict[str, Any] = {"batch_size": 64, "learning_rate": 3e-3}


def mislabelled(size: int, share: float) -> tuple[Tensor, Tensor]:
    """Digits of which some have any label at all: to be learnt by heart or not at all."""
    x, y = digits(size)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(size, generator=generator) < share
    return x, torch.where(wrong, torch.randint(0, 10, (size,), generator=generator), y)


@lru_cache
def estimate(size: int, share: float, models: int = 1, seed: int = 0, **schedule: Any) -> RiskProfile:
    data = mislabelled(size, share)
    return lmdp.estimate_risk(small, data, models=models, schedule=Schedule(**QUICK | schedule), views=False, seed=seed)


def attach(risk: Any) -> tuple[float, ...]:
    """The layer weights that a training begins with."""
    model = small()
    engine = lmdp.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*digits()), batch_size=50),
        noise_multiplier=1,
        max_grad_norm=1,
        weights="fixed",
        risk=risk,
    )
    assert engine.layer_weights is not None
    return engine.layer_weights


def told_to(profile: RiskProfile, name: str) -> Any:
    """The number that the verdict gives for a Python argument."""
    match = re.search(rf"\b{name}=(\d+)", profile.verdict)
    assert match is not None, profile.verdict
    return int(match[1])


def test_a_shadow_model_that_has_not_memorised_measures_nothing_says_so_and_weighs_layers_alike() -> None:
    profile = estimate(600, 0.3, epochs=1)
    assert "Nothing was measured" in profile.verdict
    assert "has not memorised its examples" in profile.verdict
    assert str(profile).endswith(profile.verdict)
    assert not profile.leaking
    assert len(set(profile.weight_rates.values())) == 1
    assert len(set(profile.error_rates.values())) > 1  # as measured
    with pytest.warns(UserWarning, match="does not tell layers apart, so that all count alike. Nothing was measured"):
        weights = attach(profile)
    assert weights == pytest.approx([3**-0.5] * 3)


def test_layers_are_weighed_by_noise_where_that_is_asked_for() -> None:
    profile = estimate(600, 0.3, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = attach(profile.error_rates)
    assert len({round(weight, 6) for weight in weights}) > 1


def test_the_remedy_for_a_model_trained_too_short_works() -> None:
    profile = estimate(600, 0.3, epochs=1)
    longer = estimate(600, 0.3, epochs=told_to(profile, "epochs"))
    assert "1 of 3 layers gives membership away: '5' (AUC 0." in longer.verdict
    assert longer.note == ""
    first, middle, last = attach(longer)
    assert first == middle > last
    assert "count alike: '0' and '3'" in longer.verdict


@pytest.mark.slow
def test_the_remedy_for_a_model_that_was_stopped_as_soon_as_it_fitted_works() -> None:
    profile = estimate(1700, 0.0, epochs=60)
    assert profile.shadow.epochs < 60
    assert "It was stopped when it had learnt 99% of its half: let it go on" in profile.verdict
    assert not profile.leaking
    further = estimate(1700, 0.0, epochs=told_to(profile, "epochs"), enough=told_to(profile, "enough"))
    assert further.shadow.epochs == told_to(profile, "epochs")
    assert further.leaking  # one that has memorised so much may leak in earlier layers too
    assert further.peak.name == "5"
    assert not further.weighs_alike


@pytest.mark.slow
@pytest.mark.parametrize("how", ["examples", "models"])
def test_more_examples_or_more_models_make_a_leak_measurable(how: str) -> None:
    profile = estimate(400, 0.05, epochs=100)
    assert "has memorised too little" in profile.verdict
    more = {"models": told_to(profile, "models")} if how == "models" else {}
    assert "four times as many" in profile.verdict
    measured = estimate(1600 if how == "examples" else 400, 0.05, **more, epochs=100)
    assert [layer.name for layer in measured.leaking] == ["5"]


def test_a_leak_that_cannot_be_told_apart_from_the_other_layers_weighs_nothing_and_says_so() -> None:
    """An attack that does better than chance on every layer, and error rates whose ranges overlap."""
    rates = (0.44, 0.45, 0.45, 0.46)
    layers = tuple(
        replace(layer, auc=0.57, interval=(0.54, 0.60), error_rate=rate, error_rate_interval=(rate - 0.03, rate + 0.03))
        for layer, rate in zip(sample.risk().layers, rates)
    )
    profile = replace(sample.risk(), layers=layers)
    assert len(profile.leaking) == len(layers)
    assert profile.weighs_alike
    assert "Error rates of layers cannot be told apart. Training weighs all layers alike." in profile.verdict
    assert "all count alike" in profile.note
    narrow = tuple(replace(layer, error_rate_interval=(rate - 1e-3, rate + 1e-3)) for layer, rate in zip(layers, rates))
    assert not replace(profile, layers=narrow).weighs_alike


def test_error_rates_far_apart_weigh_nothing_where_no_layer_leaks() -> None:
    """A lucky threshold is no leak: what counts is whether any attack does better than chance."""
    rates = (0.30, 0.35, 0.45, 0.50)
    layers = tuple(
        replace(layer, auc=0.51, interval=(0.48, 0.54), error_rate=rate, error_rate_interval=(rate - 0.01, rate + 0.01))
        for layer, rate in zip(sample.risk().layers, rates)
    )
    noise = replace(sample.risk(), layers=layers)
    assert tuple(noise.error_rates.values()) == rates
    assert noise.weighs_alike
    leaking = replace(noise, layers=(replace(layers[0], auc=0.6, interval=(0.57, 0.63)), *layers[1:]))
    assert tuple(leaking.weight_rates.values()) == rates


def test_a_shift_between_the_halves_is_no_leak() -> None:
    leaky = sample.risk()
    control = replace(leaky.controls[0], auc=0.7, interval=(0.68, 0.72))
    shifted = replace(leaky, controls=(control,))
    assert "measures that difference, not a leak" in shifted.verdict
    assert "another seed" in shifted.verdict
    assert shifted.weighs_alike
    assert not leaky.weighs_alike


def test_the_papers_protocol_is_taken_at_its_word_and_said_to_be_what_it_is() -> None:
    noise = replace(estimate(600, 0.3, epochs=1), protocol="paper")
    layers = tuple(replace(layer, in_sample=0.9 - 0.1 * i, null=0.9) for i, layer in enumerate(noise.layers))
    paper = replace(noise, layers=layers)
    assert paper.weight_rates == paper.error_rates
    assert "because the paper's protocol was asked for" in paper.verdict
    assert "weighs all layers alike" not in paper.verdict


def test_verdict_and_rates_are_saved_and_what_a_file_says_of_them_is_not_believed(tmp_path: Path) -> None:
    profile = estimate(600, 0.3, epochs=1)
    profile.save(tmp_path / "risk.json")
    content = json.loads((tmp_path / "risk.json").read_text())
    assert content["verdict"] == profile.verdict
    assert content["weight_rates"] == profile.weight_rates
    content["weight_rates"] = {"0": 0.1}
    content["verdict"] = "All is well."
    del content["shadow"]["enough"]  # as in files of earlier versions
    (tmp_path / "risk.json").write_text(json.dumps(content))
    assert RiskProfile.load(tmp_path / "risk.json") == profile


def test_the_report_tells_the_verdict_of_the_profile() -> None:
    profile = sample.risk()
    assert profile.verdict in unescape(render(sample.story(risk=profile)))
    assert verdict(sample.story(trained=(), risk=profile)) == profile.verdict


@pytest.mark.parametrize("epochs", [1, 30, 90_000])
def test_remedies_never_name_more_epochs_than_the_command_line_takes(epochs: int) -> None:
    shadow = replace(sample.risk().shadow, epochs=epochs, train_accuracy=0.5)
    assert "--shadow-epochs 100" in remedies(shadow) or epochs == 30
    assert all(int(number) <= 100_000 for number in re.findall(r"epochs[ =](\d+)", remedies(shadow)))


def test_any_profile_can_be_told_in_words() -> None:
    """Of one layer, of layers with names of any length, of intervals without width."""
    for count in (1, 2, 40):
        layer = sample.risk().layers[-1]
        exact = replace(layer, interval=(0.631, 0.631), error_rate_interval=(layer.error_rate, layer.error_rate))
        layers = tuple(replace(exact, name=f"block.{i}") for i in range(count))
        profile = replace(sample.risk(), layers=layers)
        assert f"{count} of {count} layers give" in profile.verdict
        assert len(profile.verdict) < 900
