"""The misuses that `docs/privacy.md` lists, one test each: refused, or said in the statement, or without effect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, WeightedRandomSampler

import lmdp
from tests.private.test_engine import BATCH, N, Small, data, private, train
from tests.private.test_misuse import batch, certified

DOCS = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_a_loader_wrapped_in_a_list_is_not_certified() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, list(loader))
    assert engine.steps == len(loader)
    assert "did not come from the data loader" in engine.privacy_statement(1e-5).verdicts["sampling"].why


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_made_anew_from_the_dataset_is_not_certified(shuffle: bool) -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, DataLoader(loader.dataset, batch_size=BATCH, shuffle=shuffle))
    assert "did not come from the data loader" in engine.privacy_statement(1e-5).verdicts["sampling"].why


def test_the_loader_that_was_passed_in_is_not_the_one_that_came_back() -> None:
    mine = data()
    engine, model, optimizer, _ = private(data_loader=mine)
    train(model, optimizer, mine)
    assert not certified(engine)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_shuffling_and_drop_last_make_way_for_poisson_sampling(options: dict[str, Any]) -> None:
    plain = DataLoader(data(43).dataset, batch_size=BATCH, **options)
    engine, model, optimizer, loader = private(data_loader=plain)
    assert len(loader) == math.ceil(43 / BATCH) == 6
    sizes = set()
    for _ in range(20):
        sizes |= {len(x) for x, _ in loader}
        train(model, optimizer, loader)
    assert len(sizes) > 3
    statement = engine.privacy_statement(1e-5)
    assert statement.certified
    assert statement.sample_rate == pytest.approx(BATCH / 43)
    assert statement.steps == 120


def test_samplers_of_another_law_are_refused() -> None:
    class Cyclic(SequentialSampler):
        """Deterministic; a subclass of a known one, which is not the known one."""

    class Biased(RandomSampler):
        pass

    dataset = data().dataset
    for sampler in (WeightedRandomSampler(torch.ones(N), N), Cyclic(dataset), Biased(dataset), list(range(N))):
        with pytest.raises(ValueError, match=r"draws with.*Subset"):
            private(data_loader=DataLoader(dataset, batch_size=BATCH, sampler=sampler))
    private(data_loader=DataLoader(Subset(dataset, range(10)), batch_size=2))


@pytest.mark.parametrize("name", ["rate", "size", "uniforms"])
def test_the_sample_rate_cannot_be_changed_in_mid_run(name: str) -> None:
    _, _, _, loader = private()
    with pytest.raises(AttributeError, match=f"{name} is fixed"):
        setattr(loader.batch_sampler, name, 0.9)
    for other in ("batch_size", "batch_sampler", "dataset"):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(loader, other, None)


def test_noise_and_clip_norm_cannot_be_changed_in_mid_run() -> None:
    for name in (
        "max_grad_norm",
        "noise_multiplier",
        "expected_batch_size",
    ):  # what schedules of other libraries change
        engine, model, optimizer, loader = private()
        before = [p.detach().clone() for p in model.parameters()]
        setattr(optimizer, name, 0.0)
        with pytest.raises(RuntimeError, match=f"optimizer.{name} was changed to 0.0 after make_private"):
            train(model, optimizer, loader)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    engine, *_ = private()
    with pytest.raises(AttributeError):
        engine.noise_multiplier = 0.1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        engine._attached.step.clipping.clip_norm = 9.0  # type: ignore[misc]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_before_and_during_training(kind: torch.dtype) -> None:
    with pytest.raises(ValueError, match="needs float32 or float64"):
        private(Small().to(kind))
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    model.to(kind)
    x, y = batch()
    with pytest.raises(RuntimeError, match=f"became {kind} after make_private"):
        train(model, optimizer, [(x.to(kind), y)])
    assert engine.steps == len(loader)


def test_gradient_accumulation_by_hand_is_refused_and_costs_nothing() -> None:
    engine, model, _optimizer, _ = private(poisson_sampling=False)
    x, y = batch()
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    second = F.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="zero_grad"):
        second.backward()
    assert engine.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_step_without_backward_is_refused_and_costs_nothing() -> None:
    engine, _, optimizer, loader = private()
    handed = next(x for x, _ in loader if len(x))
    assert len(handed)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert engine.steps == 0


def test_two_engines_on_one_model_are_refused() -> None:
    _, model, optimizer, _ = private()
    with pytest.raises(RuntimeError, match="already attached"):
        lmdp.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data(), noise_multiplier=1, max_grad_norm=1
        )


def test_an_optimizer_with_foreign_parameters_is_refused_before_and_during_training() -> None:
    model, foreign = Small(), torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="not in the module"):
        private(model, optimizer=torch.optim.SGD([*model.parameters(), foreign], lr=0.1))
    engine, model, optimizer, loader = private()
    optimizer.add_param_group({"params": [foreign]})
    with pytest.raises(RuntimeError, match="added to the optimizer"):
        train(model, optimizer, loader)
    assert engine.steps == 0


@pytest.mark.parametrize(
    "named",
    [
        "wrapped in a list", "`drop_last`", "WeightedRandomSampler", "half precision", "autocast", "two engines",
        "not in the module", "gradient accumulation by hand", "without `backward()`", "in mid-run",
        "frozen or unfrozen",
    ],
)  # fmt: skip
def test_the_documentation_lists_it(named: str) -> None:
    table = DOCS.read_text(encoding="utf-8").split("## Edges and misuse")[1]
    assert named in table
