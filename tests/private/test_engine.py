"""The engine as its users meet it: their model, their optimizer, their loop, and clear refusals."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.methods import METHODS
from lmdp.models import SCNN
from tests.gradients.reference import layer_norms, one_by_one
from tests.tables import choices, with_default_source

N, BATCH = 40, 8


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(torch.tanh(self.norm(self.conv(x))), 1))


def data(size: int = N, batch: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 1, 6, 6, generator=generator)
    y = torch.randint(0, 3, (size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)


def private(model: nn.Module | None = None, **options: Any) -> tuple[lmdp.PrivacyEngine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Small() if model is None else model
    kind = options.pop("optimizer", torch.optim.SGD)
    optimizer = kind(model.parameters(), lr=0.1) if callable(kind) else kind
    engine = lmdp.PrivacyEngine()
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": data(), "looks_besides": True} | options
    return engine, *engine.make_private(module=model, optimizer=optimizer, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


# -- the model stays the user's ---------------------------------------------------------------------------------------


def test_the_same_module_and_optimizer_come_back_with_the_same_keys() -> None:
    model = Small()
    keys = list(model.state_dict())
    attributes = set(vars(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = lmdp.PrivacyEngine()
    result = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data(), noise_multiplier=1, max_grad_norm=1
    )
    assert result[0] is model
    assert result[1] is optimizer
    assert type(model) is Small
    assert list(model.state_dict()) == keys
    train(*result)
    assert list(model.state_dict()) == keys
    assert set(vars(model)) == attributes
    assert all(p.requires_grad for p in model.parameters())


def test_copies_and_pickles_are_ordinary_models() -> None:
    _, model, optimizer, loader = private()
    train(model, optimizer, loader)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x = torch.randn(2, 1, 6, 6)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
    train(model, optimizer, loader)


def test_evaluation_leaves_no_trace() -> None:
    engine, model, optimizer, _ = private()
    x, y = torch.randn(5, 1, 6, 6), torch.randint(0, 3, (5,))
    F.cross_entropy(model(x), y).backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(17, 1, 6, 6))
    model(torch.randn(3, 1, 6, 6))
    model.train()
    optimizer.step()
    assert engine.steps == 1


def test_detach_makes_everything_ordinary_again() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    spent = engine.get_epsilon(1e-5)
    engine.detach()
    assert "step" not in vars(optimizer)
    assert "zero_grad" not in vars(optimizer)
    x, y = torch.randn(5, 1, 6, 6), torch.randint(0, 3, (5,))
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert engine.get_epsilon(1e-5) == spent
    lmdp.PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=data(), noise_multiplier=1, max_grad_norm=1
    )


def test_a_forgotten_engine_releases_its_model() -> None:
    model = Small()
    engine, _, optimizer, loader = private(model)
    del engine, optimizer, loader
    gc.collect()
    model(torch.randn(2, 1, 6, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_exception_in_forward_leaves_the_parameters_trainable() -> None:
    engine, model, *_ = private()
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 6, 6))
    assert engine.steps == 0
    assert all(p.requires_grad for p in model.parameters())


# -- the step is the naive step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", with_default_source())
def test_without_noise_the_step_is_the_clipped_sum_of_single_gradients(method: str, reduction: str) -> None:
    torch.manual_seed(0)
    model = Small().double()
    x, y = torch.randn(7, 1, 6, 6, dtype=torch.float64), torch.randint(0, 3, (7,))

    def summed(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch[0]), batch[1], reduction="sum")

    single = one_by_one(model, summed, [(x[i : i + 1], y[i : i + 1]) for i in range(7)])
    C, rates = 0.5, [0.2, 0.4]
    engine, model, optimizer, _ = private(
        model,
        method=method,
        risk=rates,
        noise_multiplier=0,
        max_grad_norm=C,
        poisson_sampling=False,
        loss_reduction=reduction,
    )
    n = layer_norms(single, engine.layers)
    w = torch.tensor(rates, dtype=torch.float64)
    formula = METHODS[method].scales
    assert formula is not None
    scale = formula(n, C) * (w / w.norm() if METHODS[method].reweighted else 1.0)
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    for name, at in engine.layers.index.items():
        expected = sum(scale[i, at] * single[i][name] for i in range(7)) / BATCH
        torch.testing.assert_close(model.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("method", "weights"), choices())
@pytest.mark.parametrize("part", [1, 3, 100])
def test_handing_a_batch_out_in_parts_changes_nothing(method: str, weights: str, part: int) -> None:
    public = (torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.arange(9) % 3) if weights == "public" else None

    def run(part: int | None) -> Tensor:
        torch.manual_seed(1)
        options = {"method": method, "weights": weights, "public_data": public}
        images, labels = data().dataset.tensors
        options["data_loader"] = DataLoader(TensorDataset(images.double(), labels), batch_size=BATCH)
        engine, model, optimizer, loader = private(Small().double(), seed=3, max_physical_batch_size=part, **options)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert engine.steps == math.ceil(N / BATCH)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(run(part), run(None), rtol=1e-10, atol=1e-12)


def test_the_parts_of_an_abandoned_batch_do_not_join_the_next_one() -> None:
    """Otherwise an example drawn in both could count twice."""
    _, model, optimizer, loader = private(
        seed=3, noise_multiplier=0, max_physical_batch_size=2, data_loader=data(40, 20), check_mixing=False
    )
    whole, batches = [], 0
    for x, y in loader:
        batches += loader.log._current.first
        if batches == 1 and not loader.log._current.first:
            continue  # of the first batch, only the first part is stepped
        whole = [*(whole if not loader.log._current.first else ()), (x, y)]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if model.head.weight.grad is not None:
            break
    released = [p.grad.clone() for p in model.parameters()]
    _, model, optimizer, _ = private(noise_multiplier=0, poisson_sampling=False, data_loader=data(40, 20))
    x, y = (torch.cat(column) for column in zip(*whole))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for found, p in zip(released, model.parameters()):
        torch.testing.assert_close(found, p.grad)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_any_optimizer_sees_only_the_released_gradient(kind: str) -> None:
    """The private optimizer makes the same move as a plain one that is handed the released gradient."""
    make = getattr(torch.optim, kind)
    _, model, optimizer, loader = private(optimizer=make, check_mixing=False)
    twin = copy.deepcopy(model)
    plain = make(twin.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters()):
            q.grad = p.grad.clone()
        plain.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)


def test_parameter_groups_and_schedulers_made_before_or_after_work() -> None:
    model = Small()
    optimizer = torch.optim.SGD(
        [
            {"params": model.conv.parameters(), "lr": 0.5},
            {"params": [*model.norm.parameters(), *model.head.parameters()]},
        ],
        lr=0.1,
    )
    before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, model, optimizer, loader = private(model, optimizer=optimizer)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    train(model, optimizer, loader)
    before.step()
    after.step()
    assert engine.steps == len(loader)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.005])


def test_forgetting_zero_grad_changes_nothing() -> None:
    def run(forget: bool) -> Tensor:
        _, model, optimizer, loader = private(seed=1)
        for x, y in loader:
            if not forget:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(True), run(False))


def test_zero_grad_may_stand_between_forward_and_backward_and_discards_gradients() -> None:
    _, model, optimizer, _ = private(poisson_sampling=False, noise_multiplier=0)
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    F.cross_entropy(model(x * 9), y).backward()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    discarded = [p.grad.clone() for p in model.parameters()]
    _, model, optimizer, _ = private(poisson_sampling=False, noise_multiplier=0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for a, b in zip(discarded, [p.grad for p in model.parameters()]):
        torch.testing.assert_close(a, b)


def test_a_closure_is_run_once() -> None:
    engine, model, optimizer, _ = private()
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(calls) == engine.steps == 1


def test_frozen_parameters_are_untouched_and_not_counted() -> None:
    model = Small()
    model.conv.requires_grad_(False)
    before = model.conv.weight.clone()
    engine, model, optimizer, loader = private(model)
    train(model, optimizer, loader)
    assert torch.equal(model.conv.weight, before)
    assert model.conv.weight.grad is None
    assert engine.layers.names == ("norm", "head")


def test_every_trainable_parameter_is_noised_every_step_even_when_the_batch_is_empty() -> None:
    engine, model, optimizer, loader = private(data_loader=data(4, 1))
    empty, same, draws = 0, 0, 0
    for _ in range(20):
        for x, y in loader:
            before = [p.detach().clone() for p in model.parameters()]
            delivery = loader.log._current
            empty += delivery.empty
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for p, q in zip(model.parameters(), before) if delivery.last else ():
                assert not torch.equal(p, q)
                same, draws = same + int((p == q).sum()), draws + p.numel()
    assert same < 1e-3 * draws  # a draw vanishes against its parameter about once in a million
    assert empty > 0
    assert engine.steps == 80
    assert engine.privacy_statement(1e-5).certified


def test_two_views_of_one_batch_in_one_loss_count_as_one_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 1, 6, 6)
    _, model, optimizer, _ = private(method="dpsgd", noise_multiplier=0, poisson_sampling=False, loss_reduction="sum")
    twin = copy.deepcopy(model)
    (model(x) * model(-x)).sum().backward()
    optimizer.step()

    def views(m: nn.Module, batch: Tensor) -> Tensor:
        return (m(batch) * m(-batch)).sum()

    single = one_by_one(twin, views, [x[i : i + 1] for i in range(5)])
    norms = torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in single])
    for name, p in model.named_parameters():
        expected = sum(min(1.0, 1 / float(n)) * one[name] for n, one in zip(norms, single)) / BATCH
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


# -- what is promised -------------------------------------------------------------------------------------------------


def test_training_to_a_target_epsilon_ends_at_it_and_refuses_to_pass_it() -> None:
    torch.manual_seed(0)
    model = Small()
    engine = lmdp.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data(),
        target_epsilon=4.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        looks_besides=True,
    )
    train(model, optimizer, loader, epochs=2)
    assert engine.get_epsilon(1e-5) == pytest.approx(4.0, rel=0.01)
    assert engine.get_epsilon(1e-5) <= 4.0
    frozen = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="past the target 4"):
        train(model, optimizer, loader)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), frozen))
    assert engine.steps == 2 * len(loader)


def test_the_statement_of_a_proper_run_is_certified_and_complete() -> None:
    engine, model, optimizer, loader = private(method="lm", risk={"conv": 0.3, "head": 0.2})
    train(model, optimizer, loader)
    statement = engine.privacy_statement(1e-5)
    assert statement.certified
    assert statement.epsilon == engine.get_epsilon(1e-5)
    assert (statement.method, statement.weight_source, statement.sampling) == ("lm", "private", "Poisson")
    assert (statement.steps, statement.sample_rate, statement.clip_norm) == (5, 0.2, 1.0)
    json.dumps(statement.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "batch"}, "computed from the private batch without noise"),
        ({"seed": 5}, "the seed is fixed"),
        ({"poisson_sampling": False}, "not Poisson-sampled"),
        ({"noise_multiplier": 0.0}, "no noise is added"),
    ],
)
def test_a_run_that_cannot_be_certified_says_why(options: dict[str, Any], reason: str) -> None:
    engine, model, optimizer, loader = private(**options)
    train(model, optimizer, loader)
    statement = engine.privacy_statement(1e-5)
    assert not statement.certified
    assert any(reason in each for each in statement.reasons)


def test_batches_from_elsewhere_and_skipped_empty_batches_are_not_certified() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, data())
    assert "did not come from the data loader" in " ".join(engine.privacy_statement(1e-5).reasons)

    # of 40 draws, an empty one before a stepped one: what a pass leaves at its end is no skip, the next begins with it
    engine, model, optimizer, loader = private(data_loader=data(40, 1))
    for x, y in loader:
        if not loader.log._current.empty:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert "batches were drawn and skipped" in " ".join(engine.privacy_statement(1e-5).reasons)


def test_a_buffer_that_training_changes_is_not_certified() -> None:
    class Counting(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(x.detach().mean())
            return super().forward(x)

    engine, model, optimizer, loader = private(Counting())
    train(model, optimizer, loader)
    assert "['mean'] changed" in engine.privacy_statement(1e-5).reasons[0]


def test_a_run_resumes_its_account_and_refuses_anothers() -> None:
    engine, model, optimizer, loader = private()
    train(model, optimizer, loader)
    state = json.loads(json.dumps(engine.state_dict()))
    again, *_ = private()
    again.load_state_dict(state)
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    assert again.layer_weights == engine.layer_weights
    other, *_ = private(noise_multiplier=2.0)
    with pytest.raises(ValueError, match=r"noise_multiplier.*1\.0.*2\.0"):
        other.load_state_dict(state)


def test_diagnostics_are_off_by_default_and_labelled_when_on() -> None:
    engine, model, optimizer, loader = private()
    assert engine.diagnostics is None
    engine, model, optimizer, loader = private(diagnostics=True, max_grad_norm=0.01, method="dpsgd")
    assert engine.diagnostics is not None
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        engine.diagnostics.record_loss(loss)
        optimizer.step()
    assert "not private" in engine.diagnostics.to_dict()["label"]
    record = engine.diagnostics.steps[0]
    assert record.clip_fraction == 1.0
    assert record.raw_loss == pytest.approx(1.1, abs=0.6)
    assert record.bias_norm > 0


def test_the_bias_norm_is_the_distance_between_mean_clipped_and_mean_raw_gradients() -> None:
    engine, model, optimizer, _ = private(
        diagnostics=True, max_grad_norm=0.3, method="dpsgd", noise_multiplier=0, poisson_sampling=False
    )
    x, y = torch.randn(6, 1, 6, 6), torch.randint(0, 3, (6,))
    twin = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    F.cross_entropy(twin(x), y).backward()
    squares = [(p.grad * BATCH / 6 - q.grad).square().sum() for p, q in zip(model.parameters(), twin.parameters())]
    assert engine.diagnostics is not None
    assert engine.diagnostics.steps[0].bias_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-4)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refuse(match: str, model: nn.Module | None = None, **options: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        private(model, **options)


def test_batch_norm_is_refused_by_name_and_make_compatible_mends_it() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
    refuse(r"'1': BatchNorm2d mixes .*make_compatible", model)
    fixed = lmdp.make_compatible(model)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert isinstance(model[1], nn.BatchNorm2d)
    engine, model, optimizer, loader = private(fixed)
    train(model, optimizer, loader)
    assert engine.privacy_statement(1e-5).certified


def test_a_frozen_batch_norm_in_evaluation_mode_is_fine_until_it_trains() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
    model[0].eval().requires_grad_(False)
    engine, model, optimizer, loader = private(model)
    train(model, optimizer, loader)
    assert engine.privacy_statement(1e-5).certified
    model.train()
    with pytest.raises(RuntimeError, match=r"'0' \(BatchNorm2d\).*eval"):
        train(model, optimizer, loader)


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (nn.InstanceNorm2d(1, affine=True, track_running_stats=True), "running statistics of private data"),
        (nn.MultiheadAttention(4, 2), "batch_first=True"),
        (weight_norm(nn.LSTM(4, 4), "weight_hh_l0"), "batch_first=True"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Linear(2, 2).half(), "float16"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.ReLU(), "no trainable parameter"),
    ],
)
def test_modules_that_cannot_be_private_are_refused_with_the_remedy(module: nn.Module, complaint: str) -> None:
    anchor = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=complaint):
        private(module, optimizer=torch.optim.SGD([*module.parameters()] or [anchor], lr=0.1))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"method": "lmm"}, "method is 'lmm'"),
        ({"weights": "magic"}, "weights is 'magic'"),
        ({"weights": "public"}, "needs public_data"),
        ({"weights": "public", "public_data": 3}, "public_data is a int"),
        ({"method": "lm-optimal"}, "'lm-optimal' with weights='private'"),
        ({"max_grad_norm": -1}, "max_grad_norm is -1"),
        ({"noise_multiplier": -1}, "noise_multiplier is -1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"loss_reduction": "none"}, "loss_reduction is 'none'"),
        ({"risk": [0.1]}, "risk has 1 error rates, but the model has 2 layers: conv, head"),
        ({"risk": {"conv": 0.1, "tail": 0.2}}, r"lacks layers \['head'\] and has layers \['tail'\]"),
        ({"risk": [0.1, 1.5]}, "between 0 and 1"),
        ({"risk": 3}, "risk is a int"),
        ({"emphasis": -2}, "emphasis is -2"),
        ({"weight_budget": 1.0}, "weight_budget is 1.0"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size is 0"),
        ({"max_physical_batch_size": 4, "poisson_sampling": False}, "needs poisson_sampling=True"),
        ({"generic": ["nowhere"]}, r"generic names \['nowhere'\]"),
    ],
)
def test_impossible_settings_are_refused_with_name_and_value(options: dict[str, Any], complaint: str) -> None:
    model = Small()
    refuse(complaint, model, **options)
    private(model)  # and nothing was left attached


def test_optimizers_that_do_not_fit_the_model_are_refused() -> None:
    model, other = Small(), nn.Linear(2, 2)
    refuse(
        "2 parameters that are not in the module",
        model,
        optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1),
    )
    refuse("trainable but not in the optimizer", model, optimizer=torch.optim.SGD(model.head.parameters(), lr=1))
    refuse("LBFGS", model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_one_engine_one_training_one_model() -> None:
    engine, model, optimizer, _ = private()
    arguments = {"optimizer": optimizer, "data_loader": data(), "noise_multiplier": 1, "max_grad_norm": 1}
    with pytest.raises(RuntimeError, match="already made a training private"):
        engine.make_private(module=model, **arguments)
    with pytest.raises(RuntimeError, match="already attached"):
        lmdp.PrivacyEngine().make_private(module=model, **arguments)
    with pytest.raises(RuntimeError, match="not attached"):
        lmdp.PrivacyEngine().get_epsilon(1e-5)
    with pytest.raises(ValueError, match="accountant is 'gdp'"):
        lmdp.PrivacyEngine(accountant="gdp")  # type: ignore[arg-type]


def test_a_step_without_backward_is_refused() -> None:
    _, _, optimizer, _ = private()
    with pytest.raises(RuntimeError, match="found no gradients"):
        optimizer.step()


def test_two_backward_passes_before_a_step_are_refused() -> None:
    engine, model, *_ = private()
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    F.cross_entropy(model(x), y).backward()
    assert engine.steps == 0
    with pytest.raises(RuntimeError, match="second time before"):
        F.cross_entropy(model(x), y).backward()


def test_a_graph_from_before_the_last_step_is_refused() -> None:
    _, model, optimizer, _ = private()
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    old = F.cross_entropy(model(x), y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(RuntimeError):
        old.backward()


def test_a_penalty_on_the_weights_in_the_loss_is_refused() -> None:
    engine, model, *_ = private()
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    assert engine.steps == 0
    with pytest.raises(RuntimeError, match=r"parameter 'head.weight' was used outside.*weight_decay"):
        (F.cross_entropy(model(x), y) + model.head.weight.square().sum()).backward()


def test_a_parameter_without_gradient_is_named_or_gets_noise_only() -> None:
    class Spare(Small):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    _, model, optimizer, loader = private(Spare())
    with pytest.raises(RuntimeError, match=r"no gradient reached \['spare.weight', 'spare.bias'\]"):
        train(model, optimizer, loader)
    _, model, optimizer, loader = private(Spare(), allow_unused=True)
    before = model.spare.weight.detach().clone()
    train(model, optimizer, loader)
    assert (model.spare.weight != before).all()


def test_rows_that_are_not_examples_are_refused() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.reshape(-1, 6)).reshape(len(x), -1)

    engine, model, *_ = private(Folding())
    assert engine.layers.names == ("head",)
    with pytest.raises(ValueError, match=r"'head' \(Linear\) took in or gave out another number of rows"):
        model(torch.randn(4, 1, 6, 6)).sum().backward()


def test_a_model_run_on_other_rows_than_the_loader_gave_is_refused() -> None:
    _, model, optimizer, loader = private(data_loader=data(40, 20))
    x, y = next(iter(loader))
    twice = torch.cat([x, x])
    F.cross_entropy(model(twice), torch.cat([y, y])).backward()
    with pytest.raises(RuntimeError, match="another number of examples than the data loader handed out"):
        optimizer.step()


def test_parameters_frozen_or_unfrozen_after_the_fact_are_refused() -> None:
    x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))
    model = Small()
    model.conv.requires_grad_(False)
    _, model, optimizer, _ = private(model)
    model.conv.requires_grad_(True)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        optimizer.step()
    _, model, optimizer, _ = private()
    F.cross_entropy(model(x), y).backward()
    model.head.requires_grad_(False)
    with pytest.raises(RuntimeError, match="frozen or unfrozen"):
        optimizer.step()
    _, model, optimizer, _ = private()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="added to the optimizer"):
        optimizer.step()


def test_an_input_changed_in_place_before_backward_is_refused_as_by_autograd() -> None:
    engine, model, *_ = private()
    assert engine.steps == 0
    x = torch.randn(4, 1, 6, 6)
    loss = model(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_the_shallow_network_learns_a_separable_problem_privately() -> None:
    torch.manual_seed(0)
    y = torch.randint(0, 2, (600,))
    x = torch.randn(600, 1, 28, 28) * 0.3 + (2.0 * y - 1)[:, None, None, None]
    model = SCNN(classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    engine = lmdp.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=60),
        target_epsilon=8,
        target_delta=1e-4,
        epochs=5,
        max_grad_norm=1.0,
        method="lm",
        seed=0,
    )
    train(model, optimizer, loader, epochs=5)
    with torch.no_grad():
        assert float((model(x).argmax(1) == y).double().mean()) > 0.95
