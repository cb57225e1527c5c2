"""What the account counts, who the generators are, and what a state or a graph of another time may not do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from lmdp.accounting import ACCOUNTANTS, calibrate_noise, epsilon_spent
from lmdp.private.noise import Entropy, Seeded
from tests.private.test_engine import BATCH, N, Small, data, private, refuse, train
from tests.tables import with_default_source


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("method", with_default_source())
def test_the_account_is_of_the_whole_noise_multiplier_by_the_chosen_accountant(method: str, accountant: str) -> None:
    """With a weight statistic the gradient has more noise than this; the pair of releases has exactly this much."""
    model = Small()
    engine = lmdp.PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data(),
        noise_multiplier=1.3,
        max_grad_norm=0.5,
        method=method,
        weight_budget=0.4,
        looks_besides=True,
    )
    train(model, optimizer, loader)
    expected = epsilon_spent(1.3, BATCH / N, steps=len(loader), delta=1e-5, accountant=accountant)
    assert engine.get_epsilon(1e-5) == expected
    statement = engine.privacy_statement(1e-5)
    assert (statement.epsilon, statement.noise_multiplier, statement.accountant) == (expected, 1.3, accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_the_noise_for_a_target_is_calibrated_by_the_chosen_accountant_for_every_draw(
    accountant: str,
) -> None:
    """43 examples in batches of 8 are 6 draws a pass, not 43 / 8: all 12 of two passes must fit."""
    model = Small()
    engine = lmdp.PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data(43, 8),
        target_epsilon=4.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        looks_besides=True,
    )
    assert engine.noise_multiplier == calibrate_noise(
        target_epsilon=4.0, target_delta=1e-5, sample_rate=8 / 43, steps=12, accountant=accountant
    )
    train(model, optimizer, loader, epochs=2)
    assert engine.steps == 12
    assert 3.9 < engine.get_epsilon(1e-5) <= 4.0


def test_a_step_that_fails_while_it_releases_has_been_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model, optimizer, loader = private()

    def crash(_: Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._attached.step.source, "observe", crash)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert model.head.weight.grad is not None  # it had left
    assert engine.steps == 1


def test_every_stream_of_every_run_has_bits_of_its_own() -> None:
    words = []
    for _ in range(2):
        engine, _, _, loader = private()
        chance = engine._attached.step.randomness
        assert loader.batch_sampler.uniforms == chance.uniforms
        words += [stream.words(1000) for stream in (chance._noise._stream, chance._sampling)]
    assert len(torch.cat(words).unique()) == 4000


def test_the_global_seed_does_not_reach_the_sampling() -> None:
    def drawn() -> Tensor:
        _, _, _, loader = private(data_loader=data(400, 40))
        torch.manual_seed(0)
        return torch.cat([x for x, _ in loader]).flatten()

    one, other = drawn(), drawn()
    assert one.shape != other.shape or not torch.equal(one, other)


def test_sampling_and_noise_never_share_a_stream() -> None:
    for chance in (Entropy(), Seeded(0), Seeded(3)):
        draws = [chance.uniforms(number, 8) for number in range(3)]
        draws += [chance.noise(t)._stream.uniform(8) for t in (0, 1, 2)]
        assert len(torch.cat(draws).unique()) == 8 * len(draws)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"data_loader": data(40, 10)}, "sample_rate"),
        ({"max_grad_norm": 2.0}, "clip_norm"),
        ({"method": "dpsgd"}, "method"),
        ({"weights": "fixed"}, "weight_source"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}, "layers"),
    ],
)
def test_a_state_of_other_privacy_parameters_is_refused_by_their_name(change: dict[str, Any], named: str) -> None:
    state = private()[0].state_dict()
    with pytest.raises(ValueError, match=f"differ: .*'{named}'"):
        private(**change)[0].load_state_dict(state)


def test_a_buffer_that_training_replaces_is_not_certified() -> None:
    class Replacing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean + x.detach().mean()
            return super().forward(x)

    engine, model, optimizer, loader = private(Replacing())
    train(model, optimizer, loader)
    assert "['mean'] changed" in engine.privacy_statement(1e-5).reasons[0]


def test_a_frozen_parameter_with_an_old_gradient_is_refused() -> None:
    """An optimizer would go on moving it by a gradient that has no noise."""
    model = Small()
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    F.cross_entropy(model(x), y).backward()
    model.conv.requires_grad_(False)
    _, model, optimizer, _ = private(model)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="without noise"):
        optimizer.step()


def test_a_graph_from_before_the_last_step_is_refused_even_where_autograd_would_take_it() -> None:
    """The only layer of a linear model needs no weight in its backward pass, so autograd sees nothing wrong."""
    _, model, optimizer, _ = private(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    old = F.cross_entropy(model(x), y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"made before the last optimizer.step\(\)"):
        old.backward()


def test_one_loss_of_two_different_batches_is_refused() -> None:
    """One row would be added to each of four examples."""
    engine, model, *_ = private()
    x = torch.randn(4, 1, 6, 6)
    assert engine.steps == 0
    with pytest.raises(ValueError, match=r"batches of different sizes"):
        (model(x).sum() + model(x[:1]).sum()).backward()


def test_a_parameter_that_only_earlier_steps_reached_is_named() -> None:
    class Wavering(Small):
        def forward(self, x: Tensor, plain: bool = False) -> Tensor:
            return super().forward(x) if plain else self.head(torch.flatten(x.expand(-1, 4, -1, -1), 1))

    _, model, optimizer, _ = private(Wavering())
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    F.cross_entropy(model(x, plain=True), y).backward()
    optimizer.step()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"no gradient reached \['conv.weight', 'conv.bias', 'norm.weight'"):
        optimizer.step()


def test_a_risk_mapping_is_read_by_layer_name_whatever_its_order() -> None:
    by_name, *_ = private(risk={"head": 0.1, "conv": 0.4})
    in_order, *_ = private(risk=[0.4, 0.1])
    assert by_name.layer_weights == in_order.layer_weights
    assert by_name.layer_weights[0] > by_name.layer_weights[1]


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_an_embedding_bag_that_touches_other_examples_is_refused(option: str) -> None:
    refuse(option, nn.EmbeddingBag(4, 4, mode="sum", **{option: True}))


def test_detaching_twice_does_not_hide_what_was_changed_in_between() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.detach()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    engine.detach()
    assert (
        "the parameters were changed after detach(), outside of this account" in engine.privacy_statement(1e-5).reasons
    )


@pytest.mark.parametrize("asked_before", [True, False])
@pytest.mark.parametrize("what", ["weights", "buffer"])
def test_what_is_changed_after_a_statement_is_saved_with_the_state(what: str, asked_before: bool) -> None:
    model = Small()
    model.register_buffer("seen", torch.zeros(6))
    engine, model, optimizer, loader = private(model)
    train(model, optimizer, loader)
    if asked_before:
        assert engine.privacy_statement(1e-3).certified
    with torch.no_grad():
        for tensor in model.parameters() if what == "weights" else model.buffers():
            tensor.add_(1.0)
    saved = engine.state_dict(), copy.deepcopy(model.state_dict())
    engine.detach()
    fresh = Small()
    fresh.register_buffer("seen", torch.zeros(6))
    resumed, fresh, optimizer, loader = private(fresh)
    fresh.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    train(fresh, optimizer, loader, epochs=2)
    assert not resumed.privacy_statement(1e-3).certified


def test_a_buffer_whose_rows_change_places_is_seen() -> None:
    """Of rows that are as long as what is added up, the sums stay the same."""
    model = Small()
    model.register_buffer("queue", torch.randn(256, 122))
    engine, model, optimizer, loader = private(model)
    train(model, optimizer, loader)
    model.queue.copy_(model.queue.roll(3, 0))
    verdict = engine.privacy_statement(1e-3).verdicts["content"]
    assert not verdict.holds
    assert "queue" in verdict.how
