"""`get_epsilon` says once that its number is not certified: once looks could tell, and never of a certified run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp

Loss = Callable[[Tensor, Tensor], Tensor]


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of each example alone whose graph does not say so: it takes two looks."""
    return F.softplus(-logits[range(len(labels)), labels]).pow(2).mean()


class Told:
    """A training of so many iterations, and the warnings of its epsilons."""

    def __init__(self, iterations: int, loss: Loss = F.cross_entropy, target: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.said = nn.Linear(5, 2), loss, list[str]()
        data = TensorDataset(torch.randn(10 * iterations, 5), torch.arange(10 * iterations) % 2)
        self.engine = lmdp.PrivacyEngine(accountant="rdp")
        noise: dict[str, Any] = {"target_epsilon": 8, "target_delta": 1e-4, "epochs": 3}
        make = self.engine.make_private_with_epsilon if target else self.engine.make_private
        _, self.optimizer, self.loader = make(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=10),
            max_grad_norm=1.0,
            method="dpsgd",
            **(noise if target else {"noise_multiplier": 1.0}),
            **options,
        )

    def ask(self, **how: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert self.engine.get_epsilon(1e-4, **how) > 0
        assert all(w.category is lmdp.NotCertifiedWarning for w in caught)
        self.said += [str(w.message) for w in caught]

    def train(self, *, asking: bool = False) -> Told:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()
            if asking:
                self.ask()
        return self


@pytest.mark.parametrize("loss", [F.cross_entropy, squared])
def test_a_certified_training_is_never_warned_of_however_often_it_is_asked(loss: Loss) -> None:
    told = Told(24, loss).train(asking=True)
    told.ask()
    assert told.said == []
    assert told.engine.privacy_statement(1e-3).certified


def test_before_the_planned_steps_are_made_looks_may_still_tell() -> None:
    told = Told(7, squared, target=True).train()
    assert not told.engine.privacy_statement(1e-3).certified
    told.ask()
    told.train().ask()
    assert told.said == []
    assert told.engine.privacy_statement(1e-3).certified


def test_a_training_that_ended_before_its_looks_is_told_once_with_a_remedy_that_works() -> None:
    told = Told(7, squared).train()
    told.ask()
    told.ask()
    (said,) = told.said
    assert "is claimed, NOT certified, after 2 steps" in said
    assert "print(engine.privacy_statement(delta))" in said
    assert "delta below 0.0143" in said
    statement = told.engine.privacy_statement(0.0142)  # the remedy answers, and has a remedy of its own
    assert "with engine.looking():" in str(statement)
    with told.engine.looking():
        told.train()
    assert told.engine.privacy_statement(0.0142).certified


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"seed": 0}, "the noise is secret (violated)"),
        ({"poisson_sampling": False}, "as drawn (violated)"),
        ({"check_mixing": False}, "examples do not influence each other in the loss (not established)"),
    ],
    ids=["seed", "no Poisson", "nobody looks"],
)
def test_what_no_further_step_can_mend_is_told_with_the_first_epsilon(options: dict[str, Any], reason: str) -> None:
    told = Told(12, **options).train(asking=True)
    (said,) = told.said
    assert reason in said
    assert "after 1 step:" in said


def test_a_pass_that_was_left_is_over() -> None:
    told = Told(24, squared)
    for i, (x, y) in enumerate(told.loader):
        told.optimizer.zero_grad()
        squared(told.model(x), y).backward()
        told.optimizer.step()
        if i == 6:
            told.ask()
            break
    assert told.said == []
    told.ask()
    assert len(told.said) == 1


def test_opacus_accountant_warns_as_well_and_quiet_does_not() -> None:
    told = Told(12, seed=0).train()
    told.ask(quiet=True)
    assert told.said == []
    with pytest.warns(lmdp.NotCertifiedWarning):
        told.engine.accountant.get_epsilon(delta=1e-4)


def test_asking_while_weights_are_put_aside_counts_nothing_against_the_training() -> None:
    told = Told(12).train()
    kept = [p.detach().clone() for p in told.model.parameters()]
    with torch.no_grad():
        for p in told.model.parameters():
            p.mul_(0.5)
        told.ask()
        for p, before in zip(told.model.parameters(), kept):
            p.copy_(before)
    assert told.said == []
