"""From public data to a risk profile that private training accepts, or refuses with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.risk import RiskProfile
from lmdp.risk.shadow import Schedule

QUICK = Schedule(epochs=8, batch_size=64, learning_rate=3e-3)


def digits(size: int = 600) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels[:size], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:size])


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)
    )


@pytest.fixture(scope="module")
def profile() -> RiskProfile:
    return lmdp.estimate_risk(small, digits(), protocol="paper", schedule=QUICK)


def test_a_profile_has_the_layers_of_the_layer_map_with_error_rates_and_intervals(profile: RiskProfile) -> None:
    assert [layer.name for layer in profile.layers] == list(lmdp.LayerMap.of(small()).names)
    for layer in profile.layers:
        assert layer.error_rate_interval[0] <= layer.error_rate <= layer.error_rate_interval[1]
        assert layer.interval[0] <= layer.auc <= layer.interval[1]
    assert {control.name for control in profile.controls} == {"(input)", "(untrained)"}
    assert profile.reference is not None
    assert profile.shadow.train_accuracy > profile.shadow.test_accuracy - 0.05
    assert "in-sample accuracy" in str(profile)


def test_the_papers_protocol_stands_beside_its_null(profile: RiskProfile) -> None:
    """Most of the in-sample accuracy is there on permuted labels too."""
    widest = profile.layers[0]
    assert widest.in_sample is not None
    assert widest.null is not None
    assert widest.null > 0.7
    assert profile.error_rates[widest.name] == pytest.approx(1 - widest.in_sample)


def test_saving_and_loading_changes_nothing(profile: RiskProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "risk.json")
    assert RiskProfile.load(tmp_path / "risk.json") == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.pop("layers"), "lacks the field 'layers'"),
        (lambda c: c.update(format=9), "format is 9"),
        (lambda c: c.update(protocol="magic"), "protocol is 'magic'"),
        (lambda c: c.update(layers=[]), "layers is empty"),
        (lambda c: c.update(layers="x"), "layers is 'x'; it must be a list"),
        (
            lambda c: c["layers"][1].update(error_rate=1.5),
            r"layers\[1\]: error_rate is '1.5'; it must be a number between 0",
        ),
        (lambda c: c["layers"][0].update(auc="high"), r"layers\[0\]: auc is 'high'"),
        (lambda c: c["layers"][0].update(interval=[0.1]), r"layers\[0\]: interval .* two numbers"),
        (lambda c: c["layers"][0].pop("name"), r"layers\[0\] lacks the field 'name'"),
        (lambda c: c["layers"][0].update(name=c["layers"][1]["name"]), "two layers of the same name"),
        (lambda c: c["layers"][0].update(in_sample=None), "lack in_sample"),
        (lambda c: c["shadow"].update(models=True), "shadow: models is 'True'"),
        (lambda c: c.update(shadow=3), "shadow is a int"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_field(
    profile: RiskProfile, tmp_path: Path, change: Any, complaint: str
) -> None:
    profile.save(tmp_path / "risk.json")
    content = json.loads((tmp_path / "risk.json").read_text())
    change(content)
    (tmp_path / "risk.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=complaint):
        RiskProfile.load(tmp_path / "risk.json")


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    for content in (b"{", b"\xff\xfe", b"[]", b"nan"):
        (tmp_path / "risk.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"risk\.json"):
            RiskProfile.load(tmp_path / "risk.json")


def test_private_training_takes_the_profile_of_its_architecture_and_refuses_another(profile: RiskProfile) -> None:
    def attach(model: nn.Module) -> None:
        lmdp.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*digits()), batch_size=50),
            noise_multiplier=1,
            max_grad_norm=1,
            method="lm",
            risk=profile,
        )

    attach(small())
    with pytest.raises(ValueError, match=r"another architecture: it lacks layers \['1'\]"):
        attach(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_several_shadow_models_are_calibrated_against_each_other() -> None:
    profile = lmdp.estimate_risk(small, digits(400), models=2, schedule=Schedule(epochs=3), views=False)
    assert profile.shadow.models == 2
    assert all("+" in layer.attack for layer in profile.layers)
    assert profile.reference is not None
    assert profile.reference.attack.startswith(("confidence + ", "output + "))


def test_an_estimate_does_not_depend_on_the_order_of_the_shadow_data() -> None:
    x, y = digits(300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    first, second = (
        lmdp.estimate_risk(small, data, schedule=Schedule(epochs=1), views=False)
        for data in ((x, y), (x[order], y[order]))
    )
    assert first.error_rates == second.error_rates


def test_private_examples_in_the_shadow_data_are_refused() -> None:
    x, y = digits(300)
    with pytest.raises(ValueError, match="2 examples are in both the shadow data and the private data"):
        lmdp.estimate_risk(small, (x, y), private_dataset=(x[:2], y[:2]))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"protocol": "best"}, "protocol is 'best'"),
        ({"models": 0}, "models is 0"),
        ({"shadow_dataset": digits(60)}, "at least 100 of each"),
        ({"shadow_dataset": digits()[0]}, "no labels"),
    ],
)
def test_impossible_estimates_are_refused(options: dict[str, Any], complaint: str) -> None:
    arguments = {"shadow_dataset": digits()} | options
    with pytest.raises(ValueError, match=complaint):
        lmdp.estimate_risk(small, arguments.pop("shadow_dataset"), **arguments)
    with pytest.raises(ValueError, match="epochs"):
        Schedule(epochs=0)


def test_a_model_that_relies_on_the_layout_of_its_images_is_estimated() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 6 * 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()
            return self.head(x.view(len(x), -1))

    data = torch.randn(240, 1, 8, 8), torch.randint(0, 3, (240,))
    profile = lmdp.estimate_risk(Viewing, data, schedule=Schedule(epochs=1))
    assert [layer.name for layer in profile.layers] == ["conv", "head"]
