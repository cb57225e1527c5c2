"""Looks change nothing: a batch that is handed out in two companies releases what it would have released whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.guards.looks import FIRST, PARTS, is_due, steps_among, steps_until_look
from tests.private.test_engine import Small, data, private
from tests.tables import choices

STEPS = 6


def trained(method: str, weights: str, **options: Any) -> tuple[lmdp.PrivacyEngine, Tensor]:
    """After some steps with inputs that the loop transforms, so that the graph does not tell where they come from."""
    torch.manual_seed(1)
    images, labels = data().dataset.tensors
    public = (torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.arange(9) % 3) if weights == "public" else None
    loader = DataLoader(TensorDataset(images.double(), labels), batch_size=8)
    engine, model, optimizer, loader = private(
        Small().double(), data_loader=loader, method=method, weights=weights, public_data=public, seed=3, **options
    )
    while engine.steps < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x * 0.5), y).backward()
            optimizer.step()
            if engine.steps == STEPS:
                break
    return engine, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("method", "weights"), choices())
@pytest.mark.parametrize("part", [None, 3])
def test_a_batch_in_two_companies_releases_what_it_would_have_released_whole(
    method: str, weights: str, part: int | None
) -> None:
    engine, looked = trained(method, weights, max_physical_batch_size=part)
    _, plain = trained(method, weights, check_mixing=False)
    assert engine._attached.watch.independence.companies >= 1
    torch.testing.assert_close(looked, plain, rtol=1e-9, atol=1e-11)


def test_a_look_takes_iterations_of_the_pass_and_adds_none() -> None:
    """So that a scheduler which was given a number of iterations fits."""
    engine, model, optimizer, loader = private(data_loader=data(80, 8), looks_besides=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
    for _ in range(3):
        batches = 0
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x * 0.5), y).backward()
            optimizer.step()
            scheduler.step()
            batches += 1
        assert batches == len(loader)
    assert engine.steps == steps_among(3 * len(loader)) < 3 * len(loader)
    assert engine.privacy_statement(1e-5).certified


@pytest.mark.parametrize("batch", [80, 40, 16])
def test_a_look_that_a_pass_has_no_room_for_goes_on_in_the_next(batch: int) -> None:
    engine, model, optimizer, loader = private(data_loader=data(80, batch), looks_besides=False)
    iterations = 0
    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            iterations += 1
    assert iterations == 12 * len(loader)
    assert engine.steps == steps_among(iterations)
    assert engine.privacy_statement(1e-5).certified


def test_when_a_look_is_due_follows_from_the_number_of_steps_alone() -> None:
    """How many iterations make a step would else tell something of the data."""
    due = [steps for steps in range(2000) if is_due(steps)]
    assert due[: len(FIRST)] == list(FIRST)
    for steps in range(1999):
        assert steps + steps_until_look(steps) == next((d for d in due if d > steps), 2048)
    iterations = steps = 0
    while steps < 600:
        steps, iterations = steps + 1, iterations + 1
        iterations += PARTS * is_due(steps)
        assert steps_among(iterations) == steps


@pytest.mark.parametrize("weird", ["a batch without padding", "an example that is not finite", "nothing"])
def test_how_many_iterations_make_a_step_does_not_depend_on_the_data(weird: str) -> None:
    """One example makes the model go another way."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embed(tokens)
            if bool((tokens[:, -1] == 0).any()):
                hidden = hidden * (tokens != 0)[:, :, None]
            return self.head(hidden.mean(1))

    tokens = torch.randint(1, 9, (40, 5), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = 0
    targets = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    if weird == "a batch without padding":
        tokens[7, -1] = 3
    if weird == "an example that is not finite":
        targets[7] = torch.inf
    dataset = TensorDataset(tokens, targets)
    engine, model, optimizer, loader = private(
        Masking(), data_loader=DataLoader(dataset, batch_size=2), looks_besides=False
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert engine.steps == steps_among(2 * len(loader))


def test_a_pass_of_looks_makes_no_step_and_establishes_what_was_open() -> None:
    engine, model, optimizer, loader = private(data_loader=data(80, 20), looks_besides=False)
    before = [p.detach().clone() for p in model.parameters()]

    def run(steps: int) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x * 2), y).backward()
            optimizer.step()
            if engine.steps == steps:
                return

    run(1)
    after = [p.detach().clone() for p in model.parameters()]
    assert not all(torch.equal(a, b) for a, b in zip(before, after))
    statement = engine.privacy_statement(1e-5)
    assert not statement.certified
    assert "engine.looking()" in statement.reasons[0]
    with engine.looking():
        run(0)
    assert engine.steps == 1
    assert all(torch.equal(p, a) for p, a in zip(model.parameters(), after))
    assert engine.privacy_statement(1e-5).certified
    with engine.looking():
        assert list(loader) == []


def test_where_nothing_is_looked_at_a_pass_of_looks_is_refused_before_it_makes_a_step() -> None:
    engine, model, optimizer, loader = private(data_loader=data(80, 20), poisson_sampling=False)

    def run() -> None:
        with engine.looking():
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="poisson_sampling=False nothing is handed out"):
        run()
    assert engine.steps == 0


def test_dropout_and_augmentation_draw_the_same_in_both_companies() -> None:
    class Dropping(Small):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(F.dropout(x, 0.3)), 0.3)

    engine, model, optimizer, loader = private(Dropping(), data_loader=data(80, 8))
    for x, y in loader:
        with engine.still():
            noise = torch.randn(1) * 0.1
        F.cross_entropy(model(x + noise), y).backward()
        optimizer.step()
    assert engine.privacy_statement(1e-5).certified


def test_a_weight_that_follows_the_number_of_the_step_is_told_from_one_that_follows_the_batch() -> None:
    def run(scaled: Any) -> lmdp.PrivacyEngine:
        engine, model, optimizer, loader = private(data_loader=data(80, 8))
        calls = 0
        for _ in range(3):
            for x, y in loader:
                calls += 1
                each = F.cross_entropy(model(x), y, reduction="none") * torch.full((len(y),), scaled(calls, y))
                each.mean().backward()
                optimizer.step()
        return engine

    assert run(lambda calls, y: 0.02 * calls).privacy_statement(1e-5).certified
    with pytest.raises(RuntimeError, match="examples of a batch meet"):
        run(lambda calls, y: 1.0 / (1 + int((y == 0).sum())))


def test_a_model_that_keeps_count_of_its_calls_is_left_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.calls, self.kept = nn.Linear(36, 3), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.kept.append(x.shape)
            return self.head(x.flatten(1))

    engine, model, optimizer, loader = private(Counting(), data_loader=data(80, 8))
    for i, (x, y) in enumerate(loader, start=1):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert model.calls == len(model.kept) == i
    assert engine.privacy_statement(1e-5).certified
