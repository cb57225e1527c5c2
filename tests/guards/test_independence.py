"""Examples that meet, in the model or in the loss, are refused in the first step; all else is left alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients.attach import REGISTRY
from lmdp.guards.loss import Output, rows_meet
from lmdp.guards.ways import TRIES
from tests.private.test_engine import Small, data, private, train

Loss = Callable[[Tensor, Tensor], Tensor]


def centred(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output - output.mean(0), target)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(output)))


def paired(output: Tensor, target: Tensor) -> Tensor:
    half = len(output) // 2
    return (output[:half] * output[half : 2 * half]).sum()


def ranked(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1] - output[:, :1].T).exp().mean()


def of_the_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).exp()


def clamped(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).clamp(max=100.0)


def without_nan(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).nan_to_num()


def first_step(loss: Loss, model: nn.Module | None = None, **options: Any) -> lmdp.PrivacyEngine:
    engine, model, optimizer, loader = private(model, data_loader=data(40, 20), **options)
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return engine


@pytest.mark.parametrize("loss", [centred, contrastive, paired, ranked, of_the_mean, clamped, without_nan])
def test_a_loss_in_which_examples_meet_is_refused_before_anything_is_released(loss: Loss) -> None:
    engine, model, optimizer, loader = private(data_loader=data(40, 20))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"the loss lets the examples .* meet|what the examples .* add up to"):
        train_with(loss, model, optimizer, loader)
    assert engine.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("size", range(2, 40))
def test_pairs_that_meet_are_seen_in_a_batch_of_any_size(size: int) -> None:
    output = torch.randn(size, 3, generator=torch.Generator().manual_seed(size), requires_grad=True)
    rows = [Output(output, output.grad_fn, rows=True)]
    assert rows_meet(paired(output, torch.zeros(size)), rows) is True
    assert rows_meet(squared(output, torch.zeros(size, dtype=torch.long)), rows) is False


def train_with(loss: Loss, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{"weight": torch.tensor([1.0, 2.0, 3.0])}, {"ignore_index": 2}])
def test_a_mean_that_divides_by_what_labels_decide_is_refused_with_the_remedy(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="reduction='sum'"):
        first_step(functools.partial(F.cross_entropy, **options))
    summed = functools.partial(F.cross_entropy, reduction="sum", **options)
    assert first_step(summed, loss_reduction="sum").steps == 2


def test_labels_that_do_not_count_are_noticed_in_a_mean() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, torch.where(target == 0, -100, target))

    with pytest.raises(RuntimeError, match="a mean with ignore_index"):
        first_step(loss)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - F.one_hot(target, 3)).square().mean()


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def one_against_all(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, F.one_hot(target, 3).float(), pos_weight=torch.ones(3) * 2)


def linear(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def hinge(output: Tensor, target: Tensor) -> Tensor:
    return F.multi_margin_loss(output, target)


def looped(output: Tensor, target: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(o[None], t[None]) for o, t in zip(output, target)]).mean()


def halved(output: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("loss", [squared, smoothed, one_against_all, linear, hinge, looped, halved, F.cross_entropy])
def test_a_mean_of_terms_that_each_depend_on_one_example_passes(loss: Loss) -> None:
    assert first_step(loss).steps == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 0.0])
@pytest.mark.parametrize("loss", [squared, F.cross_entropy, one_against_all])
def test_no_example_can_make_a_sound_loss_look_mixed(loss: Loss, value: float) -> None:
    engine, model, optimizer, _ = private(poisson_sampling=False)
    x, y = next(iter(data(40, 20)))
    x[3] = value
    loss(model(x), y).backward()
    optimizer.step()
    assert engine.steps == 1


class Centred(Small):
    """Subtracts the mean of the batch, where no module of its own shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Attending(nn.Module):
    """Attention across the batch: batch_first forgotten, in effect."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(torch.flatten(x, 1))
        return self.head(F.scaled_dot_product_attention(h[None], h[None], h[None])[0])


@pytest.mark.parametrize("make", [Centred, Attending])
def test_a_model_in_which_examples_meet_is_refused_before_anything_is_released(make: type[nn.Module]) -> None:
    engine, model, optimizer, _ = private(make())
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(torch.randn(5, 1, 6, 6)), torch.zeros(5, dtype=torch.long)).backward()
    with pytest.raises(RuntimeError, match="the model lets the examples of a batch meet"):
        optimizer.step()
    assert engine.steps == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert engine.privacy_statement(1e-5).verdicts["model"] == "violated"


class CentredInTraining(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else Small.forward(self, x)


@pytest.mark.parametrize("toggled", [True, False])
def test_a_model_that_is_in_another_mode_by_its_step_is_not_taken_for_the_one_that_was_run(toggled: bool) -> None:
    engine, model, optimizer, _ = private(CentredInTraining())
    F.cross_entropy(model(torch.randn(5, 1, 6, 6)), torch.zeros(5, dtype=torch.long)).backward()
    if toggled:
        model.eval()
        optimizer.step()
        assert engine.privacy_statement(1e-5).verdicts["model"] == "not established"
        independence = engine._attached.watch.independence
        assert independence is not None
        assert all(way.needed for way in independence._models)  # a look in company still has to tell
        return
    with pytest.raises(RuntimeError, match="the model lets the examples of a batch meet"):
        optimizer.step()


def test_the_look_leaves_random_state_buffers_and_results_alone() -> None:
    class Counting(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(F.dropout(x, 0.5))

    results = []
    for check in (True, False):
        torch.manual_seed(1)
        settings = {"check_mixing": check, "poisson_sampling": False, "loss_reduction": "sum", "seed": 0}
        _, model, optimizer, _ = private(Counting(), **settings)
        x, y = next(iter(data(40, 20)))
        torch.manual_seed(7)
        F.cross_entropy(model(x), y, reduction="sum").backward()  # a mean is rounded otherwise where it is looked at
        optimizer.step()
        results.append([*(p.detach().clone() for p in model.parameters()), model.calls, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_it_can_be_switched_off() -> None:
    assert first_step(centred, check_mixing=False).steps == 2
    assert first_step(F.cross_entropy, Centred(), check_mixing=False).steps == 2


def test_it_leaves_torch_as_it_was_when_the_engine_goes() -> None:
    for watcher in list(REGISTRY._watchers):  # engines of other tests
        REGISTRY.remove_watcher(watcher)
    original = torch.autograd.backward
    assert not hasattr(original, "__wrapped__")
    engine, model, optimizer, loader = private()
    assert torch.autograd.backward is not original
    train(model, optimizer, loader)
    assert engine.privacy_statement(1e-5).verdicts["model"] == "holds"
    engine.detach()
    assert torch.autograd.backward is original
    other, *_ = private()
    other.detach()
    assert torch.autograd.backward is original


class Texts(nn.Module):
    """Tokens in, a class for each token out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).float()
    return (per_token(output, target) * mask).sum() / mask.sum()


def masked_mean_by_number(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target)[target > 0].sum() / int((target > 0).sum())


def masked_mean_by_product(output: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).float()
    return (per_token(output, target) * mask).sum() * mask.sum().reciprocal()


def mean_of_chosen(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target)[target > 0].mean()


def squared_mean_of_chosen(output: Tensor, target: Tensor) -> Tensor:
    chosen = target > 0
    return F.mse_loss(output[chosen], F.one_hot(target[chosen], 3).float())


def divided_first(output: Tensor, target: Tensor) -> Tensor:
    return (per_token(output, target) / (target > 0).sum()).sum()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target).sum()


def over_all(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target).mean()


def own_means(output: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).float()
    return ((per_token(output, target) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def own_means_one_by_one(output: Tensor, target: Tensor) -> Tensor:
    losses = per_token(output, target)
    return sum(losses[i].sum() / (1 + target[i].sum()) for i in range(len(target))) / len(target)


def own_means_by_slices(output: Tensor, target: Tensor) -> Tensor:
    losses = per_token(output, target)
    return sum(losses[i : i + 1].sum() / (1 + target[i].sum()) for i in range(len(target))) / len(target)


def in_parts(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target).mean() / 4 + 0.1 * output.square().mean(dim=(1, 2)).mean()


def sum_over_a_constant(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target).sum() / 37


def steps_until_refused(loss: Loss, sizes: list[int], lengths: list[int] | None = None, **options: Any) -> int | None:
    """How many steps of these batches are made before one is refused; None if none is."""
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Texts(), poisson_sampling=False, **options)
    for i, size in enumerate(sizes):
        x = torch.randint(0, 50, (size, lengths[i] if lengths else 6))
        optimizer.zero_grad()
        value = loss(model(x), torch.randint(0, 3, x.shape))
        try:
            value.backward()
        except RuntimeError as error:
            if "the loss divides by something else" not in str(error) and "the loss is a mean with" not in str(error):
                raise
            return i if engine.steps == i else -1
        optimizer.step()
    return None


@pytest.mark.parametrize(
    "loss",
    [
        masked_mean,
        masked_mean_by_number,
        masked_mean_by_product,
        mean_of_chosen,
        squared_mean_of_chosen,
        divided_first,
        summed,
    ],
)
def test_a_divisor_that_is_neither_fixed_nor_the_number_of_examples_is_refused(loss: Loss) -> None:
    assert steps_until_refused(loss, [8, 11, 9]) == 1


def soft_targets(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), F.one_hot(target.flatten(), 3).float())


class OwnMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.size = losses.shape
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.expand(ctx.size) / ctx.size.numel()


def custom_mean(output: Tensor, target: Tensor) -> Tensor:
    return OwnMean.apply(per_token(output, target))


def python_quotient(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target).sum() * (1 / len(target))


def in_chunks(output: Tensor, target: Tensor) -> Tensor:
    losses = per_token(output, target)
    return sum(part.mean() * (len(part) / len(losses)) for part in losses.chunk(3))


def dotted(output: Tensor, target: Tensor) -> Tensor:
    return torch.dot(per_token(output, target).sum(1), torch.full((len(target),), 1 / len(target)))


def ragged(output: Tensor, target: Tensor) -> Tensor:
    lengths = [1 + int(t.sum()) % 5 for t in target]
    flat = torch.cat([row[:n] for row, n in zip(per_token(output, target), lengths)])
    return torch.stack([part.mean() for part in flat.split(lengths)]).mean()


class Scheduled:
    """A temperature and a weight that follow the number of the step."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        penalty = output.square().mean() * torch.tensor(0.1 * self.step) + output.abs().mean() * (0.2 * self.step)
        return over_all(output / (1 + self.step), target) + penalty


class Alternating(Scheduled):
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        return over_all(output, target) if self.step % 2 else output.square().mean()


def own_with_left_out_labels(output: Tensor, target: Tensor) -> Tensor:
    left = torch.where(target == 0, -100, target)
    left[:, 0] = 1
    return torch.stack([F.cross_entropy(o, t) for o, t in zip(output, left)]).mean()


@pytest.mark.parametrize(
    "loss",
    [
        soft_targets,
        custom_mean,
        python_quotient,
        in_chunks,
        dotted,
        ragged,
        Scheduled(),
        Alternating(),
        own_with_left_out_labels,
    ],
)
def test_sound_losses_of_many_forms_pass(loss: Loss) -> None:
    assert steps_until_refused(loss, [8, 11, 6, 9, 7, 30]) is None


@pytest.mark.parametrize("loss", [over_all, own_means, own_means_one_by_one, own_means_by_slices, in_parts])
def test_divisors_that_are_fixed_or_each_examples_own_pass(loss: Loss) -> None:
    assert steps_until_refused(loss, [8, 11, 1, 9, 2, 30]) is None


def test_steps_that_were_made_before_a_refusal_are_not_certified() -> None:
    engine, model, optimizer, loader = private(Texts(), data_loader=texts())
    with pytest.raises(RuntimeError, match="the loss divides by something else"):
        train_with(masked_mean, model, optimizer, loader)
    assert engine.steps > 0
    statement = engine.privacy_statement(1e-5)
    assert not statement.certified
    assert statement.verdicts["loss"] == "violated"
    assert "the loss divides by something else" in statement.verdicts["loss"].why


def texts() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, high, (200, 6), generator=generator) for high in (50, 3))
    return DataLoader(TensorDataset(x, y), batch_size=20)


def test_a_sum_may_be_divided_by_a_constant_and_not_by_the_number_of_examples() -> None:
    assert steps_until_refused(sum_over_a_constant, [8, 11, 1], loss_reduction="sum") is None
    assert steps_until_refused(sum_over_a_constant, [8, 11, 9]) == 1
    assert steps_until_refused(over_all, [8, 11, 9], loss_reduction="sum") == 1


def test_a_mean_over_the_longest_example_is_refused_when_its_length_changes() -> None:
    assert steps_until_refused(over_all, [8, 8, 8, 8], [6, 6, 7, 9]) == 2
    assert steps_until_refused(own_means, [8, 8, 8, 8], [6, 6, 7, 9]) is None


def test_labels_that_first_do_not_count_in_a_later_step_are_refused_there() -> None:
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        left = torch.where(target == 0, -100, target) if len(seen) > 3 else target
        return F.cross_entropy(output.flatten(0, 1), left.flatten())

    assert steps_until_refused(loss, [8, 11, 9, 10, 10]) == 3


class TimeFirst(Texts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class TimeFirstCentred(Texts):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x).transpose(0, 1)
        return output - output.mean(1, keepdim=True)


@pytest.mark.parametrize("length", [3, 8])
def test_examples_are_told_apart_where_they_are_not_the_first_dimension(length: int) -> None:
    """Also where there are as many examples as tokens, as there are in some batches here."""

    def run(model: nn.Module, loss: Loss) -> lmdp.PrivacyEngine:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(*(torch.randint(0, n, (80, length)) for n in (50, 3))), batch_size=8)
        engine, model, optimizer, loader = private(model, data_loader=loader)
        train_with(lambda output, target: loss(output, target.T), model, optimizer, loader)
        return engine

    def over_time(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((output - output.mean(0)).flatten(0, 1), target.flatten())

    def over_examples(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((output - output.mean(1, keepdim=True)).flatten(0, 1), target.flatten())

    assert run(TimeFirst(), over_time).privacy_statement(1e-5).certified
    with pytest.raises(RuntimeError, match="examples of a batch meet"):
        run(TimeFirst(), over_examples)
    with pytest.raises(RuntimeError, match="examples of a batch meet"):
        run(TimeFirstCentred(), over_time)


def test_models_with_several_outputs_tokens_and_inputs_that_cannot_be_made_up_pass() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            if int(x.max()) < 40:
                raise ValueError("no such text")  # refuses made-up tokens
            features = self.embed(x).mean(1)
            return {"features": features, "logits": self.head(features)}

    engine, model, optimizer, _ = private(Tokens(), poisson_sampling=False)
    x, y = torch.randint(40, 50, (6, 5)), torch.randint(0, 3, (6,))
    for _ in range(4):
        out = model(x)
        (F.cross_entropy(out["logits"], y) + out["features"].square().mean()).backward()
        optimizer.step()
    assert engine.steps == 4


def test_a_loss_that_cannot_be_differentiated_twice_is_let_through() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    assert first_step(lambda output, target: F.cross_entropy(Once.apply(output), target)).steps == 2


def test_a_loss_is_judged_however_backward_is_called() -> None:
    def each(output: Tensor) -> Tensor:
        unit = F.normalize(output, dim=1)
        return F.cross_entropy(unit @ unit.T, torch.arange(len(output)), reduction="none")

    calls: list[Callable[[Tensor], None]] = [
        lambda output: torch.autograd.backward([each(output).mean()]),
        lambda output: each(output).backward(torch.full((len(output),), 0.1)),
        lambda output: torch.autograd.backward([each(output)], [torch.full((len(output),), 0.1)]),
    ]
    for call in calls:
        _, model, *_ = private(poisson_sampling=False)
        with pytest.raises(RuntimeError, match="the loss lets the examples"):
            call(model(torch.randn(8, 1, 6, 6)))


def test_backward_passes_of_others_do_not_use_up_the_look() -> None:
    _, model, *_ = private(poisson_sampling=False)
    for _ in range(2 * TRIES):
        output = model(torch.randn(8, 1, 6, 6))
        torch.randn(3, requires_grad=True).sum().backward()
    with pytest.raises(RuntimeError, match="the loss lets the examples"):
        contrastive(output, torch.zeros(8)).backward()


def test_a_forward_pass_on_other_data_before_does_not_count() -> None:
    engine, model, optimizer, _ = private(poisson_sampling=False)
    for size in (5, 8, 11, 6):
        model(torch.randn(7, 1, 6, 6))  # without no_grad, and never followed by backward
        F.cross_entropy(model(torch.randn(size, 1, 6, 6)), torch.zeros(size, dtype=torch.long)).backward()
        optimizer.step()
    assert engine.steps == 4
    assert not engine._attached.capture._repeated  # else all its per-example gradients would be formed


@pytest.mark.parametrize("both", [False, True])
def test_a_model_may_be_called_on_its_own_output(both: bool) -> None:
    engine, model, optimizer, _ = private(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), poisson_sampling=False)
    once = model(torch.randn(6, 4))
    loss = model(once).square().mean()
    (loss + once.square().mean() if both else loss).backward()
    optimizer.step()
    assert engine.steps == 1


class Counted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Dropping(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if random.random() < 0.5 else 2.0) * float(np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("make", [Counted, Dropping])
@pytest.mark.parametrize("seed", range(4))
def test_models_that_keep_count_or_draw_are_not_refused_and_not_disturbed(make: type[nn.Module], seed: int) -> None:
    seen = []
    for check in (True, False):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        _, model, *_ = private(make(), check_mixing=check)
        model(torch.ones(5, 1, 6, 6))
        seen.append((random.random(), float(np.random.rand()), getattr(model, "calls", 1)))  # noqa: NPY002
    assert seen[0] == seen[1]


def test_a_table_that_happens_to_be_as_long_as_the_batch_is_not_taken_for_examples() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.head(x + table.mean(0))

    for size in (8, 9):
        engine, model, optimizer, _ = private(Looking(), poisson_sampling=False)
        F.cross_entropy(model(torch.randn(size, 4), torch.randn(8, 4)), torch.zeros(size, dtype=torch.long)).backward()
        optimizer.step()
        assert engine.steps == 1


def test_a_pass_on_public_data_is_not_judged() -> None:
    """Public examples may meet: their gradients cost no privacy, whatever the loss on them."""
    x, y = torch.randn(6, 1, 6, 6), torch.arange(6) % 3

    def weighted(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels, weight=torch.tensor([1.0, 2.0, 3.0]))

    engine, model, optimizer, loader = private(
        method="lm", weights="public", public_data=(x, y), criterion=weighted, public_every=1
    )
    train(model, optimizer, loader)
    assert engine.steps == len(loader)
    assert not any("refused" in reason for reason in engine.privacy_statement(1e-5).reasons)
