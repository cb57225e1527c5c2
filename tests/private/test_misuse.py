"""Plausible code that would break the promise: refused, or the statement says so. Never silently a wrong epsilon."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from lmdp.gradients import conv, linear
from tests.private.test_engine import Small, data, private, train


def certified(engine: lmdp.PrivacyEngine) -> bool:
    return engine.privacy_statement(1e-5).certified


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(size, 1, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("doubt", [{"seed": 0}, {"poisson_sampling": False}, {"weights": "batch"}])
def test_saving_and_loading_does_not_launder_what_was_not_certified(doubt: dict[str, Any]) -> None:
    engine, model, optimizer, loader = private(**doubt)
    train(model, optimizer, loader)
    state = json.loads(json.dumps(engine.state_dict()))
    again, *_ = private(**({"weights": "batch"} if "weights" in doubt else {}))
    again.load_state_dict(state)
    assert not certified(again)


def test_loading_an_earlier_state_does_not_refund_steps() -> None:
    engine, model, optimizer, loader = private()
    early = engine.state_dict()
    train(model, optimizer, loader)
    with pytest.raises(ValueError, match="made 5 steps of its own"):
        engine.load_state_dict(early)
    assert engine.steps == 5
    with pytest.raises(ValueError, match="made 5 steps of its own"):  # nor does one that counts as many
        engine.load_state_dict(engine.state_dict())


def test_a_batch_whose_step_raised_counts_as_skipped() -> None:
    engine, model, optimizer, loader = private()
    for x, y in loader:
        optimizer.zero_grad()
        if engine.steps == 3 and loader.log.skipped == 0:
            with pytest.raises(RuntimeError):
                optimizer.step()  # without backward: the loop goes on as if nothing had been
            continue
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert "batches were drawn and skipped" in engine.privacy_statement(1e-5).reasons[0]


def test_forked_and_copied_entropy_never_repeats() -> None:
    from lmdp.private.noise import Entropy

    chance = Entropy()
    assert not torch.equal(copy.deepcopy(chance).uniforms(0, 8), chance.uniforms(0, 8))
    mine, theirs = copy.copy(chance), pickle.loads(pickle.dumps(chance))
    assert not torch.equal(mine.uniforms(0, 8), theirs.uniforms(0, 8))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, chance.uniforms(0, 8).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 64) != chance.uniforms(0, 8).numpy().tobytes()


@pytest.mark.parametrize(("told", "reduction"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_of_another_reduction_than_told_is_refused(told: str, reduction: str) -> None:
    engine, model, optimizer, loader = private(loss_reduction=told)
    x, y = next((x, y) for x, y in loader if len(x))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=f"loss_reduction='{reduction}'"):
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    engine.detach()


def test_a_state_of_another_dataset_size_is_refused() -> None:
    engine, *_ = private(data_loader=data(40, 8))
    other, *_ = private(data_loader=data(80, 16))
    with pytest.raises(ValueError, match="dataset_size"):
        other.load_state_dict(engine.state_dict())


def test_a_second_training_of_a_model_does_not_pass_for_the_first() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.detach()
    again = lmdp.PrivacyEngine()
    again.make_private(module=model, optimizer=optimizer, data_loader=data(), noise_multiplier=1, max_grad_norm=1)
    assert "5 private steps before" in again.privacy_statement(1e-5).reasons[0]


def test_training_after_detach_is_outside_the_account() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    engine.detach()
    assert certified(engine)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert "after detach()" in engine.privacy_statement(1e-5).reasons[0]


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_unnoised_state_changed_behind_autograds_back_is_noticed(kind: str) -> None:
    class Remembering(Small):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("mean", torch.zeros(()))
            else:
                self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean.data = self.mean.data * 0.9 + x.detach().mean() * 0.1
            return super().forward(x)

    engine, model, optimizer, loader = private(Remembering())
    train(model, optimizer, loader)
    assert "['mean'] changed" in engine.privacy_statement(1e-5).reasons[0]


def test_choosing_batches_by_looking_at_them_is_noticed() -> None:
    engine, model, optimizer, loader = private(data_loader=data(80, 16))
    for i, (x, y) in enumerate(loader):
        if i % 2:
            continue
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert "skipped" in engine.privacy_statement(1e-5).verdicts["sampling"].why


def test_public_data_may_not_be_the_private_data() -> None:
    loader = data()
    for public in (loader, loader.dataset):
        with pytest.raises(ValueError, match="private dataset itself"):
            private(data_loader=loader, weights="public", public_data=public)


def test_an_interrupted_step_does_not_join_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    released = []
    for interrupted in (True, False):
        engine, model, optimizer, _ = private(poisson_sampling=False, noise_multiplier=0)
        F.cross_entropy(model(x), y).backward()
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr("lmdp.private.step.shares", lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert engine.steps == 1
    torch.testing.assert_close(released[0], released[1])


def test_an_interrupted_forward_leaves_nothing_muted() -> None:
    class Interrupting(Small):
        interrupt = False

        def forward(self, x: Tensor) -> Tensor:
            hook = self.head.register_forward_pre_hook(self._stop)
            try:
                return super().forward(x)
            finally:
                hook.remove()

        def _stop(self, *_: Any) -> None:
            if self.interrupt:
                raise KeyboardInterrupt

    engine, model, optimizer, loader = private(Interrupting())
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(batch()[0])
    model.interrupt = False
    train(model, optimizer, loader)
    assert engine.steps == len(loader)
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(batch()[0])
    engine.detach()
    assert all(p.requires_grad for p in model.parameters())


def test_a_layer_frozen_after_make_private_is_refused_in_the_next_forward() -> None:
    engine, model, *_ = private()
    model.conv.requires_grad_(False)
    assert engine.steps == 0
    with pytest.raises(RuntimeError, match=r"'conv.weight' was frozen after make_private"):
        model(batch()[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_gradients_is_refused_by_name_and_one_that_is_off_is_not(fused: bool) -> None:
    model = Small()
    engine, model, optimizer, _ = private(model, optimizer=torch.optim.Adam(model.parameters(), fused=fused))
    x, y = batch()
    for scaler in (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=1.0)):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        with pytest.raises(RuntimeError, match=r"GradScaler.*bfloat16"):
            scaler.step(optimizer)
        optimizer.zero_grad()
    assert engine.steps == 0
    off = torch.amp.GradScaler("cpu", enabled=False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    off.scale(F.cross_entropy(output.float(), y)).backward()
    off.step(optimizer)
    off.update()
    assert engine.steps == 1
    engine.detach()
    assert vars(optimizer).get("_step_supports_amp_scaling", False) == fused


def test_dropout_that_cannot_be_replayed_is_refused() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x.squeeze(1).permute(1, 0, 2).contiguous(), 0.5).permute(1, 0, 2)
            return self.head(torch.flatten(x * self.gain, 1))

    engine, model, *_ = private(Transposed())
    assert engine.steps == 0
    with pytest.raises(RuntimeError, match="dropout that cannot be replayed"):
        model(batch()[0]).sum().backward()


def test_a_module_that_mixes_examples_under_the_generic_rule_is_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(36))
            self.head = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.flatten(x, 1)
            return self.head((x - x.mean(0)) * self.gain)

    engine, model, *_ = private(Centred(), check_mixing=False)
    assert engine.steps == 0
    with pytest.raises(RuntimeError, match="mixes the examples of a batch"):
        model(batch()[0]).sum().backward()


def test_a_replaced_forward_does_not_get_the_rule_of_its_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    layer = model[1]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 2  # type: ignore[method-assign]
    twin = nn.Linear(36, 3)
    twin.load_state_dict(layer.state_dict())
    _, model, optimizer, _ = private(
        model, method="dpsgd", noise_multiplier=0, max_grad_norm=1e6, poisson_sampling=False
    )
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    F.cross_entropy(twin(torch.flatten(x, 1)) * 2, y).backward()
    torch.testing.assert_close(layer.weight.grad * 8 / 4, twin.weight.grad)


def test_a_gradient_penalty_through_the_tap_is_refused() -> None:
    engine, model, *_ = private()
    assert engine.steps == 0
    x = batch()[0].requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_a_dataclass_that_hides_tensors_is_refused() -> None:
    @dataclass
    class Output:
        logits: Tensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(36))

        def forward(self, x: Tensor) -> Output:
            return Output(torch.flatten(x, 1) * self.gain)

    engine, model, *_ = private(Wrapped())
    assert engine.steps == 0
    with pytest.raises(TypeError, match="returns a Output"):
        model(batch()[0])


def test_after_a_backward_that_raised_the_next_one_asks_for_zero_grad() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise ArithmeticError("broken")

    class Breaking(Small):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.norm(self.conv(x)))
            return self.head(torch.flatten(Broken.apply(h) if self.broken else h, 1))

    engine, model, optimizer, _ = private(Breaking())
    x, y = batch()
    with pytest.raises(ArithmeticError):
        F.cross_entropy(model(x), y).backward()
    model.broken = False
    with pytest.raises(RuntimeError, match="zero_grad"):
        F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.steps == 1


def test_reduced_precision_activations_are_measured_in_the_parameters_precision() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 1, 6, 6), torch.randint(0, 3, (256,))
    released = []
    for size in (256, 255):
        torch.manual_seed(1)
        _, model, optimizer, _ = private(noise_multiplier=0, max_grad_norm=0.1, method="dpsgd", poisson_sampling=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[:size]), y[:size], reduction="sum")
        (loss / size).backward()
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * 8)
    assert float((released[0] - released[1]).norm()) <= 0.1 * (1 + 1e-2)


@pytest.mark.parametrize("positions", [1, 40])
@pytest.mark.parametrize("inside", [("forward",), ("forward", "backward"), ("forward", "backward", "step")])
def test_autocast_changes_no_bound_wherever_it_is_on(positions: int, inside: tuple[str, ...]) -> None:
    """Rows or sums in bfloat16 would let one of many like examples move the sum by several times the clip norm."""

    def autocast(what: str) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=what in inside)

    def released(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        options = {"noise_multiplier": 0, "max_grad_norm": 1.0, "method": "dpsgd", "loss_reduction": "sum"}
        _, model, optimizer, _ = private(nn.Linear(16, 16), poisson_sampling=False, **options)
        with autocast("forward"):
            loss = model(x).float().sum()
        with autocast("backward"):
            loss.backward()
        with autocast("step"):
            optimizer.step()
        return torch.cat([p.grad.flatten().double() for p in model.parameters()]) * 8

    torch.manual_seed(3)
    x = torch.rand(1, positions, 16) + 0.5 + 0.01 * torch.randn(701, positions, 16)
    x = x[:, 0] if positions == 1 else x
    assert float((released(x) - released(x[:-1])).norm()) <= 1 + 1e-3


PRODUCTS = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)


@pytest.mark.parametrize("how", ["matmul precision", "all products"])
def test_norms_and_sums_are_made_in_full_precision_when_products_need_not_be(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Few processors have the short products, so what is looked at is the setting: in the rules, in the sums, after."""
    seen: list[tuple[str, str]] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            seen.append(tuple(product.fp32_precision for product in PRODUCTS))
            return function(*args)

        return noted

    monkeypatch.setattr(conv, "joint_squared_norms", noting(conv.joint_squared_norms))
    monkeypatch.setattr(linear, "_bias_sums", noting(linear._bias_sums))
    monkeypatch.setattr(conv.Geometry, "contract", noting(conv.Geometry.contract))
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.Flatten(), nn.Linear(256, 3))
    _, model, optimizer, _ = private(model, poisson_sampling=False)
    try:
        if how == "matmul precision":
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.fp32_precision = "bf16"
        before = [product.fp32_precision for product in PRODUCTS]
        F.cross_entropy(model(torch.randn(8, 16, 4, 4)), torch.arange(8) % 3).backward()
        optimizer.step()
        assert [product.fp32_precision for product in PRODUCTS] == before
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        assert all(product.fp32_precision in ("none", "ieee") for product in PRODUCTS)  # nothing stuck
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert len(seen) > 3  # the step's own, and those of runs that look at the model
    assert all(value in ("none", "ieee") for values in seen for value in values)


def test_an_empty_batch_may_be_stepped_without_a_backward_pass() -> None:
    """For models that cannot run on zero examples."""
    engine, model, optimizer, loader = private(data_loader=data(4, 1))
    for _ in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert engine.steps == 40
    assert certified(engine)


def test_a_compiled_model_is_refused_with_the_remedy() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Small()

    with pytest.raises(ValueError, match=r"torch.compile.*model.compile\(\)"):
        private(Compiled())
