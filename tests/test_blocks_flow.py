"""The whole flow by block: risk on public texts, private training, audit; and the same by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lmdp
from lmdp.app import cli
from lmdp.app.config import Config
from lmdp.app.runs import RunFolder
from lmdp.models import ResNet18
from lmdp.report.values import shown_names
from lmdp.risk import RiskProfile
from lmdp.risk.shadow import Schedule
from tests import hub

Batch = dict[str, Tensor]


class Texts(Dataset[tuple[Batch, Tensor]]):
    """Random words; the label is whether word 5 or word 6 is among them more often."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(3, hub.WORDS, (size, hub.LENGTH), generator=generator)
        mask = torch.arange(hub.LENGTH) < torch.randint(5, hub.LENGTH + 1, (size, 1), generator=generator)
        self.batch = {"input_ids": words * mask, "attention_mask": mask.long()}
        self.labels = ((words == 5).sum(1) > (words == 6).sum(1)).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Batch, Tensor]:
        return {name: rows[i] for name, rows in self.batch.items()}, self.labels[i]


def factory() -> nn.Module:
    return hub.bert(hidden_dropout_prob=0.1)


@pytest.fixture(scope="module")
def profile() -> RiskProfile:
    pytest.importorskip("transformers")
    return lmdp.estimate_risk(
        factory,
        Texts(320, 1),
        private_dataset=Texts(320, 2),
        layers="block",
        pooling="mean",
        schedule=Schedule(epochs=3, learning_rate=3e-3),
    )


def attach(model: nn.Module, data: Dataset[Any], risk: Any, **options: Any) -> Any:
    engine = lmdp.PrivacyEngine()
    three = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="lm",
        risk=risk,
        **options,
    )
    return engine, three


@pytest.mark.filterwarnings("ignore")
def test_risk_training_and_audit_of_texts_by_block(profile: RiskProfile, tmp_path: Path) -> None:
    assert tuple(profile.error_rates) == hub.BERT
    profile.save(tmp_path / "risk.json")
    read = RiskProfile.load(tmp_path / "risk.json")
    assert read == profile
    assert (read.by, read.pooling) == ("block", "mean")

    torch.manual_seed(0)
    private, others = Texts(320, 2), Texts(320, 3)
    model = factory().train()
    engine, (model, optimizer, loader) = attach(model, private, read, layers="block")
    assert engine.layers.names == hub.BERT
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs).logits, labels).backward()
        optimizer.step()
    assert len(engine.layer_weights) == len(hub.BERT)
    assert engine.steps > 0
    engine.detach()
    report = lmdp.audit(model, private, others, layers="block", pooling="mean")
    assert tuple(leak.name for leak in report.layers) == hub.BERT
    assert report.by == "block"
    report.to_html(tmp_path / "audit.html")
    assert "block 1" in (tmp_path / "audit.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_a_profile_of_blocks_is_refused_by_modules_and_the_remedy_helps(profile: RiskProfile) -> None:
    data = Texts(80, 2)
    with pytest.raises(ValueError, match=r'layers by block, and the training by module\. Pass layers="block"'):
        attach(factory().train(), data, profile)
    engine, _ = attach(factory().train(), data, profile, layers="block")
    engine.detach()
    with pytest.raises(ValueError, match="another architecture"):
        attach(hub.bert(num_labels=2).bert.train(), data, profile, layers="block")  # type: ignore[operator, union-attr]


@pytest.mark.filterwarnings("ignore")
def test_an_estimate_follows_from_its_seed_dropout_and_all() -> None:
    pytest.importorskip("transformers")
    rates = []
    for noise in range(2):
        torch.manual_seed(noise)
        schedule = Schedule(epochs=1)
        rates.append(lmdp.estimate_risk(factory, Texts(220, 1), layers="block", pooling="cls", schedule=schedule))
    assert rates[0].error_rates == rates[1].error_rates


def test_charts_call_blocks_by_their_numbers_and_tell_their_lists_apart() -> None:
    one = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.11", "classifier"]
    assert list(shown_names(one, "block").values()) == ["bert.embeddings", "block 0", "block 11", "classifier"]
    assert list(shown_names(one, "module").values()) == one
    two = ["encoder.block.0", "encoder.final_layer_norm", "decoder.block.0"]
    assert list(shown_names(two, "block").values()) == ["encoder block 0", two[1], "decoder block 0"]
    towers = ["text_model.encoder.layers.0", "vision_model.encoder.layers.0"]
    assert list(shown_names(towers, "block").values()) == ["text_model block 0", "vision_model block 0"]
    alike = ["a.0", "a.b.0"]
    assert set(shown_names(alike, "block")) == set(alike)
    assert len(set(shown_names(alike, "block").values())) == 2


def residual(channels: int, classes: int) -> nn.Module:
    return ResNet18(channels, classes, width=4)


def make_npz(path: Path, seed: int) -> str:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, 440)
    images = (generator.integers(0, 120, (440, 16, 16)) + 40 * labels[:, None, None]).astype(np.uint8)
    parts = {"x_train": images[:240], "y_train": labels[:240], "x_test": images[240:], "y_test": labels[240:]}
    np.savez(path, **parts, num_classes=np.int64(3))
    return f"npz:{path}"


def test_the_command_line_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    private, public = make_npz(tmp_path / "private.npz", 0), make_npz(tmp_path / "public.npz", 1)
    model = ["--model", "tests.test_blocks_flow:residual"]
    blocks = [*model, "--layers", "block"]
    names = ["conv1", *(f"blocks.{i}" for i in range(8)), "fc"]
    risk = ["risk", *blocks, "--shadow", public, "--data", private, "--shadow-epochs", "1", "--out", "risk.json"]
    assert cli.main([*risk, "--quiet"]) == 0
    assert json.loads(Path("risk.json").read_text())["by"] == "block"
    train = ["train", "--data", private, "--risk", "risk.json", "--sample-rate", "0.25", "--epochs", "1", "--quiet"]
    train += ["--accountant", "rdp"]
    capsys.readouterr()
    assert cli.main([*train, *model, "--out", "wrong"]) == 2
    assert "--layers block" in capsys.readouterr().err
    assert not Path("wrong").exists()
    assert cli.main([*train, *blocks, "--out", "run"]) == 0
    assert 'layers = "block"\n' in Path("run/config.toml").read_text()
    assert len(RunFolder(Path("run")).metrics()[-1]["layer_weights"]) == len(names)
    assert cli.main(["audit", "run", "--quiet"]) == 0
    audited = json.loads(Path("run/audit.json").read_text())
    assert [leak["name"] for leak in audited["layers"]] == names
    assert audited["by"] == "block"
    assert "block 7" in Path("run/report.html").read_text()
    assert cli.main(["train", "--out", "run", "--resume", "--quiet"]) == 0


def test_a_configuration_that_says_nothing_of_layers_means_modules(tmp_path: Path) -> None:
    assert "layers" not in Config().to_toml()
    (tmp_path / "config.toml").write_text('model = "s-cnn"\n')
    assert Config.load(tmp_path / "config.toml").layers == "module"
    (tmp_path / "config.toml").write_text(Config(layers="block").to_toml())
    assert Config.load(tmp_path / "config.toml").layers == "block"
    with pytest.raises(ValueError, match="layers is 'stage'; it must be one of module, block"):
        Config(layers="stage")
