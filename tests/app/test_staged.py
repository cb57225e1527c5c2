"""A first stage in which nothing is learnt: made of every image once, with the model that images would give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lmdp
from lmdp.app import training
from lmdp.app.cli import main
from lmdp.app.config import Config
from lmdp.app.staged import computed, said_of_stage
from lmdp.data import Images
from lmdp.models import build, fresh
from lmdp.models.running import accuracy

CONFIG = Config(
    model="scatter-linear", method="dpsgd", epsilon=8.0, delta=1e-3, epochs=1, batch_size=20, learning_rate=0.5, seed=3
)


def images(n: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    return Images(torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator), torch.arange(n) % 3)


def test_features_are_those_of_each_image_alone() -> None:
    model, examples = build("scatter-linear", (1, 8, 8), 3), images(70)
    features = computed(CONFIG, model, examples)
    assert features.labels is examples.labels
    assert torch.equal(features.pixels[:50], model.stage(examples.take(range(50)).tensors()[0]))
    assert torch.equal(computed(CONFIG, model, examples.take([69, 3])).pixels, features.pixels[[69, 3]])


def test_what_has_no_such_stage_or_is_changed_in_every_step_is_left_alone() -> None:
    staged, examples = build("scatter-linear", (1, 16, 16), 3), Images(torch.zeros(3, 1, 16, 16), torch.arange(3))
    assert computed(CONFIG, build("s-cnn", (1, 16, 16), 3), examples) is examples
    assert computed(CONFIG.changed(augment="flip", views=2), staged, examples) is examples
    assert "every view" in said_of_stage(CONFIG.changed(augment="flip"), staged, examples)
    features = computed(CONFIG, staged, examples)
    assert computed(CONFIG, staged, features) is features
    assert f"({features.pixels.nbytes >> 20} MB)" in said_of_stage(CONFIG, staged, examples)


@pytest.mark.parametrize("name", ["scatter-linear", "scatter-cnn"])
def test_training_on_features_gives_the_model_that_images_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> dict[str, torch.Tensor]:
        model = fresh(lambda: build(name, (1, 8, 8), 3), 0)
        job = training.prepare(CONFIG.changed(model=name), model, images(100), risk=None, public=None)
        weights = training.run_through(job).state_dict()
        assert job.engine is not None
        job.engine.detach()
        return weights

    once = trained()
    monkeypatch.setattr(training, "computed", lambda config, model, examples: examples)
    each_time = trained()
    assert all(torch.allclose(once[key], each_time[key], atol=1e-5) for key in once)


def test_a_run_on_features_is_certified_and_its_model_takes_images(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = "--data digits --model scatter-linear --size 8 --method dpsgd --epsilon 8 --delta 1e-4 --epochs 4"
    assert main(["train", *options.split(), "--out", str(out), "--quiet"]) == 0
    run = lmdp.load(out)
    assert run.statement.certified, run.statement
    source = lmdp.data.load("digits", size=8)
    assert source.test is not None
    x, y = source.test.tensors()
    told = float((out / "metrics.jsonl").read_text().splitlines()[-1].partition('"test_accuracy": ')[2].split(",")[0])
    assert accuracy(run.model, [(x, y)]) == pytest.approx(told)
    assert run.embed(source.test.pixels[:5]).shape == (5, 10)
