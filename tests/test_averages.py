"""The moving average of weights: its formula, its type, and a model that is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lmdp


def walk(model: nn.Module, steps: int, seed: int = 0) -> list[torch.Tensor]:
    """Random weights, step by step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(model.weight.shape, generator=generator) for _ in range(steps)]  # type: ignore[arg-type]


def step_to(model: nn.Module, weight: torch.Tensor) -> None:
    with torch.no_grad():
        model.weight.copy_(weight)  # type: ignore[operator]


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.999])
def test_an_average_is_that_of_the_formula(decay: float) -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    average, expected = lmdp.WeightAverage(model, decay), model.weight.detach().clone()
    for t, weight in enumerate(walk(model, 30)):
        step_to(model, weight)
        average.update()
        d = min(decay, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * model.weight.detach()
    assert torch.allclose(average.weights["weight"], expected, rtol=1e-12)


def test_weights_that_stand_still_are_their_own_average() -> None:
    model = nn.Linear(3, 2)
    average, weight = lmdp.WeightAverage(model), model.weight.detach().clone()
    for _ in range(100):
        average.update()
    assert torch.equal(average.weights["weight"], weight)


def test_the_model_is_as_it_was_after_an_evaluation_even_one_that_fails() -> None:
    model = nn.Linear(3, 2)
    average, before = lmdp.WeightAverage(model), model.weight.detach().clone()
    step_to(model, before + 1)
    average.update()

    def evaluate() -> None:
        with average.applied():
            assert torch.equal(model.weight, average.weights["weight"])
            assert not torch.equal(model.weight, before + 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert torch.equal(model.weight, before + 1)


def test_small_changes_are_not_lost_in_sixteen_bits() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    step_to(model, torch.tensor([[1.0]]))
    average = lmdp.WeightAverage(model, 0.999)
    average.updates = 10_000
    step_to(model, torch.tensor([[2.0]]))
    for _ in range(2000):
        average.update()
    assert float(average.weights["weight"]) == pytest.approx(2 - 0.999**2000, abs=0.01)
    assert average.weights["weight"].dtype == torch.bfloat16


def test_from_a_saved_state_an_average_goes_on_bit_for_bit() -> None:
    model = nn.Linear(3, 2)
    average = lmdp.WeightAverage(model, 0.9)
    weights = walk(model, 20)
    for i, weight in enumerate(weights):
        step_to(model, weight)
        average.update()
        if i == 9:
            saved = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    again = lmdp.WeightAverage(model, 0.9)
    again.load_state_dict(saved)
    for weight in weights[10:]:
        step_to(model, weight)
        again.update()
    assert again.updates == 20
    assert torch.equal(again.weights["weight"], average.weights["weight"])


def test_a_state_of_another_model_and_an_impossible_decay_are_refused() -> None:
    state = lmdp.WeightAverage(nn.Linear(3, 2)).state_dict()
    with pytest.raises(ValueError, match=r"'weights/weight' is \(2, 3\) there and \(2, 4\) here"):
        lmdp.WeightAverage(nn.Linear(4, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match="decay is 1; it must lie strictly between 0 and 1"):
        lmdp.WeightAverage(nn.Linear(3, 2), 1)
    with pytest.raises(ValueError, match="0 trainable parameters"):
        lmdp.WeightAverage(nn.ReLU())


def test_a_private_training_with_an_average_stays_certified() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = lmdp.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="dpsgd",
    )
    average = lmdp.WeightAverage(model, 0.9)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update()
            with average.applied(), torch.no_grad():
                model(x)
    statement = engine.privacy_statement(1e-3)
    assert statement.certified, statement.reasons
