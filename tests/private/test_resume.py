"""Under a seed a resumed training is the uninterrupted one, wherever it was broken off; without one it draws anew."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lmdp
from tests.private.test_engine import data, private

STEPS = 12


def loader(workers: int) -> Any:
    plain = data()
    return torch.utils.data.DataLoader(plain.dataset, batch_size=8, num_workers=workers)


def steps(engine: lmdp.PrivacyEngine, model: Any, optimizer: Any, source: Any, until: int) -> None:
    while engine.steps < until:
        for x, y in source:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if engine.steps == until:
                break


def parameters(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


PUBLIC = (torch.randn(300, 1, 6, 6, generator=torch.Generator().manual_seed(9)), torch.arange(300) % 3)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "dpsgd"},
        {"method": "lm", "workers": 1},
        {"method": "lm", "max_physical_batch_size": 3},
        {"method": "lm", "weights": "public", "public_data": PUBLIC, "public_every": 4},
        {"method": "lm-optimal", "weights": "public", "public_data": PUBLIC, "public_every": 5},
        {"method": "lm", "weights": "batch"},
    ],
    ids=str,
)
def test_a_seeded_training_broken_off_anywhere_goes_on_as_if_it_had_not_been(options: dict[str, Any]) -> None:
    options = dict(options)
    workers = options.pop("workers", 0)

    def begin() -> tuple[Any, Any, Any, Any]:
        momentum = lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)  # noqa: E731
        return private(optimizer=momentum, seed=4, data_loader=loader(workers), **options)

    engine, model, optimizer, source = begin()
    steps(engine, model, optimizer, source, STEPS)
    whole = parameters(model)
    engine, model, optimizer, source = begin()
    for stop in (1, 4, 7, STEPS):  # in mid-pass, and with batches drawn ahead by the worker
        steps(engine, model, optimizer, source, stop)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), json.dumps(engine.state_dict())
        engine, model, optimizer, source = begin()
        model.load_state_dict(saved[0][0])
        optimizer.load_state_dict(saved[0][1])
        engine.load_state_dict(json.loads(saved[1]))
    assert torch.equal(parameters(model), whole)
    assert engine.steps == STEPS


def test_looking_at_batches_and_breaking_off_do_not_change_a_seeded_training() -> None:
    engine, model, optimizer, source = private(seed=4)
    steps(engine, model, optimizer, source, STEPS)
    whole = parameters(model)
    engine, model, optimizer, source = private(seed=4)
    for until in range(1, STEPS + 1):
        next(iter(source))
        list(source)
        steps(engine, model, optimizer, source, until)
    assert torch.equal(parameters(model), whole)


def test_a_skipped_batch_is_not_drawn_again_for_another_step() -> None:
    _, model, optimizer, source = private(seed=4, check_mixing=False)
    seen = []
    for _ in range(3):
        for i, (x, y) in enumerate(source):
            seen.append(tuple(x.flatten().tolist()))
            if i % 2 == 0:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert len(set(seen)) == len(seen) == 15


def test_without_a_seed_a_resumed_training_draws_other_noise_and_other_batches() -> None:
    engine, model, optimizer, source = private()
    steps(engine, model, optimizer, source, 2)
    state = engine.state_dict()
    assert "seed" not in json.dumps(state)
    results = []
    for _ in range(2):
        again, model, optimizer, source = private()
        again.load_state_dict(state)
        steps(again, model, optimizer, source, 3)
        results.append(parameters(model))
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("weights", [[3.0, 4.0], [float("nan"), 1.0], [1.0], "x", None])
def test_saved_weights_that_would_break_the_sensitivity_are_refused(weights: Any) -> None:
    options = {"method": "lm", "weights": "public", "public_data": PUBLIC}
    state = private(**options)[0].state_dict()
    state["source"]["weights"] = weights
    with pytest.raises(ValueError, match="saved"):
        private(**options)[0].load_state_dict(state)
