"""A whole training, with and without one example: every method is bounded as stated, and every leak is caught."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from lmdp.accounting import Mechanism
from lmdp.audit.canaries import Slate
from lmdp.methods import METHODS
from lmdp.private.step import PrivateStep
from tests.audit.trainings import CNN, Block, examples, outliers, plain, resnet, training
from tests.private.probe import draw
from tests.tables import certified

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
CERTIFIED = certified()
KINDS = sorted(outliers())


def check(kind: str = "huge", seed: int = 0, **options: Any) -> lmdp.audit.NeighbourReport:
    return lmdp.audit.check_neighbours(training(**options), examples(), outliers()[kind], seed=seed)


@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_is_bounded_for_every_outlier(method: str, weights: str, kind: str) -> None:
    report = check(kind, method=method, weights=weights)
    assert report.passed, report


@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("optimizer", [MOMENTUM, torch.optim.Adam], ids=["momentum", "adam"])
@pytest.mark.parametrize("part", [None, 2])
def test_every_method_is_bounded_under_every_optimizer_and_in_parts(
    method: str, weights: str, optimizer: Any, part: int | None
) -> None:
    report = check(method=method, weights=weights, optimizer=optimizer, max_physical_batch_size=part)
    assert report.passed, report


@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("make", [Block, resnet], ids=["transformer", "resnet"])
def test_every_method_is_bounded_on_every_kind_of_model(method: str, weights: str, make: Any) -> None:
    report = check(make=make, method=method, weights=weights)
    assert report.passed, report


@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("kind", ["huge", "nan"])
def test_every_method_is_bounded_in_single_precision(method: str, weights: str, kind: str) -> None:
    (x, y), (extra, label) = examples(), outliers()[kind]
    train = training(Block, method=method, weights=weights)
    report = lmdp.audit.check_neighbours(train, (x.float(), y), (extra.float(), label))
    assert report.passed, report
    assert "only roughly judged in float32" in report["others' contributions"].detail


@pytest.mark.slow
@pytest.mark.parametrize(("method", "weights"), CERTIFIED)
@pytest.mark.parametrize("make", [CNN, Block, resnet], ids=["cnn", "transformer", "resnet"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [None, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, MOMENTUM, torch.optim.Adam], ids=["sgd", "momentum", "adam"])
def test_the_whole_matrix(method: str, weights: str, make: Any, kind: str, part: int | None, optimizer: Any) -> None:
    options = {"max_physical_batch_size": part, "optimizer": optimizer}
    report = check(kind, make=make, method=method, weights=weights, **options)
    assert report.passed, report


@pytest.mark.parametrize("method", ["lm", "lm-optimal"])
@pytest.mark.parametrize("make", [CNN, Block, resnet], ids=["cnn", "transformer", "resnet"])
@pytest.mark.parametrize("part", [None, 2])
def test_weights_from_the_batch_fail(method: str, make: Any, part: int | None) -> None:
    report = check(make=make, method=method, weights="batch", max_physical_batch_size=part)
    assert "others' contributions" in report.failures, report


def test_weights_from_the_batch_move_a_large_batch_by_many_times_the_sensitivity() -> None:
    """Gradients set by hand: a hundred aligned examples, and one whose first layer dwarfs its second."""
    many = torch.ones(100, 2, 3, dtype=torch.float64)
    outlier = torch.tensor([[1e6] * 3, [1.0] * 3], dtype=torch.float64)

    def train(engine: lmdp.PrivacyEngine, dataset: Any, weights: str = "batch") -> None:
        model = Slate(layers=2, width=3).double()
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(dataset, batch_size=80),
            noise_multiplier=1,
            max_grad_norm=1.0,
            loss_reduction="sum",
            weights=weights,
        )
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    report = lmdp.audit.check_neighbours(train, (many,), (outlier,))
    assert "gradient" in report.failures, report
    assert (report["gradient"].movement or 0) > 20
    assert lmdp.audit.check_neighbours(functools.partial(train, weights="private"), (many,), (outlier,)).passed


def test_the_bound_is_reached_so_the_check_is_not_vacuous() -> None:
    grain = 1e-5  # of the public grid that releases are rounded to
    report = check(method="dpsgd")
    assert report["gradient"].movement == pytest.approx(1, abs=grain)
    assert check(method="lm")["gradient and statistic"].movement == pytest.approx(1, abs=grain)


# -- leaks in the user's own code -------------------------------------------------------------------------------------


def caught(name: str, kind: str = "huge", **options: Any) -> None:
    report = check(kind, **options)
    assert name in report.failures, report


def standardised(output: Tensor, target: Tensor) -> Tensor:
    """A loss in which examples meet: outputs are centred over the batch."""
    return F.cross_entropy(output - output.mean(0), target) if len(output) > 1 else F.cross_entropy(output, target)


def test_a_loss_with_batch_statistics_is_caught() -> None:
    caught("others' contributions", kind="aligned", loss=standardised, check_mixing=False)


def test_a_class_weighted_mean_is_caught() -> None:
    weight = torch.tensor([1.0, 1.0, 50.0], dtype=torch.float64)
    loss = functools.partial(F.cross_entropy, weight=weight)
    caught("others' contributions", loss=loss, check_mixing=False, max_grad_norm=100.0)


def test_a_broadcast_that_compares_outputs_with_the_labels_of_others_is_caught() -> None:
    """Examples meet in the labels only: the look in the first step cannot see that, the neighbours do."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, :1] - target).square().mean(1).sum()

    caught("others' contributions", loss=loss, loss_reduction="sum", max_grad_norm=100.0)


def test_a_sum_divided_by_the_true_batch_size_is_caught() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") / len(output)

    caught("others' contributions", loss=loss, loss_reduction="sum", max_grad_norm=100.0)


Loop = Callable[..., Any]


def loop_with(act: Callable[..., Any]) -> Loop:
    """The ordinary loop with something done after each backward pass."""

    def loop(engine: Any, model: nn.Module, optimizer: Any, loader: Any, loss: Callable[..., Tensor]) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            value = loss(model(x), y)
            if len(x):
                value.backward()
            if act(value.detach(), x, engine, optimizer) != "skip":
                optimizer.step()

    return loop


def talk(value: Tensor, *_: Any) -> None:
    print(float(value))  # noqa: T201


def log(value: Tensor, *_: Any) -> None:
    logging.getLogger("training").warning("loss %s", float(value))


def warn(value: Tensor, *_: Any) -> None:
    if not torch.isfinite(value):
        warnings.warn("the loss is not finite", stacklevel=1)


def stop(value: Tensor, x: Tensor, *_: Any) -> None:
    if len(x) and not torch.isfinite(value):
        raise ArithmeticError("the loss is not finite")


def skip(value: Tensor, x: Tensor, *_: Any) -> str:
    return "step" if len(x) and torch.isfinite(value) else "skip"


def schedule(value: Tensor, x: Tensor, engine: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1 - 0.01 * len(x)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (talk, "printed, logged, warned"),
        (log, "printed, logged, warned"),
        (warn, "printed, logged, warned"),
        (stop, "errors"),
        (skip, "number of steps"),
        (schedule, "parameters and state"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_loop_that_tells_on_one_example_is_caught(act: Any, name: str) -> None:
    caught(name, kind="nan", loop=loop_with(act))


def test_a_published_training_loss_is_caught() -> None:
    def loop(engine: Any, model: nn.Module, optimizer: Any, loader: Any, loss: Any) -> dict[str, float]:
        plain(engine, model, optimizer, loader, loss)
        x, y = loader.dataset[:]
        return {"final loss": float(loss(model(x), y))}

    caught("returned by train", loop=loop)


def test_a_loop_that_cannot_take_an_empty_batch_never_gets_one() -> None:
    def loop(engine: Any, model: nn.Module, optimizer: Any, loader: Any, loss: Any) -> None:
        for x, y in loader:
            if not len(x):
                raise ValueError("nothing to train on")
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    report = check(loop=loop)
    assert report.passed, report


def test_data_normalised_by_their_own_mean_are_caught() -> None:
    def train(engine: lmdp.PrivacyEngine, dataset: Any) -> Any:
        x, y = dataset[:]
        return training()(engine, torch.utils.data.TensorDataset(x - x.mean(0), y))

    report = lmdp.audit.check_neighbours(train, examples(), outliers()["aligned"])
    assert "others' contributions" in report.failures, report


def test_running_statistics_are_caught() -> None:
    class Remembering(CNN):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if len(x):
                self.mean.data = 0.9 * self.mean + 0.1 * x.detach().mean()
            return super().forward(x)

    caught("parameters and state", make=Remembering)


# -- leaks in the trust boundary itself: mutants ----------------------------------------------------------------------


def mutate_release(monkeypatch: pytest.MonkeyPatch, after: Callable[..., None]) -> None:
    release = PrivateStep.release

    def mutant(self: PrivateStep, number: int) -> None:
        sums = self._sums
        release(self, number)
        after(self, sums)

    monkeypatch.setattr(PrivateStep, "release", mutant)


def gradients(step: PrivateStep) -> list[Tensor]:
    return [p.grad for p in step.capture.parameters.values() if p.grad is not None]


def test_dividing_by_the_true_batch_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(step: PrivateStep, sums: Any) -> None:
        for gradient in gradients(step):
            gradient.mul_(step.mechanism.expected_batch_size / max(1, sums.examples))

    mutate_release(monkeypatch, after)
    caught("gradient", method="dpsgd")


def test_no_noise_for_an_empty_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(step: PrivateStep, sums: Any) -> None:
        for gradient in gradients(step) if not sums.examples else []:
            gradient.zero_()

    mutate_release(monkeypatch, after)
    report = check(method="dpsgd")
    assert {"gradient", "noise"} <= set(report.failures), report


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_noise_of_another_spread_than_stated_is_caught(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    spread = Mechanism.gradient_std.fget
    assert spread is not None
    monkeypatch.setattr(Mechanism, "gradient_std", property(lambda self: spread(self) * scale))
    caught("noise", method="dpsgd")


def test_noise_used_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdp.private.keystream import KeyStream
    from lmdp.private.noise import GaussianNoise

    added = GaussianNoise.added

    def again(self: GaussianNoise, *what: Any) -> list[Tensor]:
        self._stream = KeyStream(bytes(32))
        return added(self, *what)

    monkeypatch.setattr(GaussianNoise, "added", again)
    caught("noise", method="dpsgd")


def test_noise_drawn_once_more_for_one_example_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(step: PrivateStep, sums: Any) -> None:
        if sums.nonfinite:
            draw(step.randomness.noise(1), [sums.shares], 1.0)

    mutate_release(monkeypatch, after)
    caught("noise drawn", kind="nan", method="dpsgd")


def rule(monkeypatch: pytest.MonkeyPatch, method: str, scales: Callable[[Tensor, float], Tensor]) -> None:
    monkeypatch.setitem(METHODS, method, replace(METHODS[method], scales=scales))


def test_a_layer_left_out_of_the_clip_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch, "dpsgd", lambda n, C: (C / n[:, 1:].norm(dim=1, keepdim=True)).clamp(max=1).expand_as(n))
    caught("gradient", method="dpsgd")


def test_clipping_by_the_largest_norm_of_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch, "dpsgd", lambda n, C: (C / n.norm(dim=1).max()).clamp(max=1).expand_as(n))
    caught("others' contributions", method="dpsgd")


def test_a_sensitivity_that_is_understated_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    understated = replace(METHODS["naive-perlayer"], sensitivity=lambda layers: 1.0)
    monkeypatch.setitem(METHODS, "naive-perlayer", understated)
    caught("gradient", method="naive-perlayer", max_grad_norm=1e-3)


def test_a_statistic_that_is_not_normalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdp.private.step.shares", lambda norms: norms)
    caught("weight statistic", method="lm")


def test_weights_that_follow_the_unnoised_statistic_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(step: PrivateStep, sums: Any) -> None:
        step.source._weights = lmdp.private.weights.unit(sums.shares + 1e-3)  # type: ignore[union-attr]

    mutate_release(monkeypatch, after)
    caught("layer weights", method="lm")


def test_an_example_that_is_not_a_number_and_is_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(norms: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        return norms.double().nan_to_num(), torch.zeros(len(norms), dtype=torch.bool)

    monkeypatch.setattr("lmdp.private.step.usable", keep)
    caught("gradient", kind="nan", method="dpsgd")


def test_an_example_that_raises_inside_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(norms: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        if not torch.isfinite(norms).all():
            raise FloatingPointError("an example is not finite")
        return norms.double(), torch.zeros(len(norms), dtype=torch.bool)

    monkeypatch.setattr("lmdp.private.step.usable", refuse)
    caught("errors", kind="nan", method="dpsgd")


# -- the tool itself --------------------------------------------------------------------------------------------------


def test_a_report_prints_and_becomes_plain_values() -> None:
    report = check(method="dpsgd")
    assert "bounded as stated" in str(report)
    assert "not a proof" in str(report)
    assert report.to_dict()["passed"] is True
    with pytest.raises(KeyError, match="no finding 'nothing'"):
        report["nothing"]


def test_a_training_that_fails_in_every_run_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="method is 'none'"):
        check(method="none")


def test_what_the_check_cannot_do_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="Poisson batches"):
        check(poisson_sampling=False)
    with pytest.raises(ValueError, match="never called"):
        lmdp.audit.check_neighbours(lambda engine, dataset: None, examples(), outliers()["huge"])
    with pytest.raises(TypeError, match="returned a object"):
        lmdp.audit.check_neighbours(lambda engine, dataset: object(), examples(), outliers()["huge"])
    with pytest.raises(TypeError, match="dataset is a int"):
        lmdp.audit.check_neighbours(training(), 3, outliers()["huge"])
    with pytest.raises(ValueError, match="dataset is empty"):
        lmdp.audit.check_neighbours(training(), (torch.zeros(0, 1), torch.zeros(0)), outliers()["huge"])


def test_any_dataset_will_do_and_random_states_are_put_back() -> None:
    class Listed(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(examples()[0])

        def __getitem__(self, at: int) -> Any:
            return examples()[0][at], examples()[1][at]

    torch.manual_seed(3)
    before = torch.get_rng_state()
    report = lmdp.audit.check_neighbours(training(), Listed(), outliers()["huge"])
    assert report.passed, report
    assert torch.equal(before, torch.get_rng_state())
