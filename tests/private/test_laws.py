"""Laws that single lines could break unnoticed: each of these fails when its line is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients import generic
from lmdp.gradients import rows as pieces
from lmdp.gradients.plan import rule_for
from lmdp.private.clipping import usable
from lmdp.private.weights import BatchView, Private, mean_ratio, risk_factors, shares, unit
from tests.gradients.reference import captured, compare, quadratic, relative, split
from tests.gradients.test_rules import DOUBLE, Tokens, gram_norms, made
from tests.private.probe import private_probe, step
from tests.private.test_sensitivity import RISK
from tests.private.test_weights import random_units
from tests.tables import with_default_source


def test_a_step_releases_its_own_batch_and_nothing_of_earlier_ones() -> None:
    """An example that came back in later steps' sums would count many times for one step's privacy."""
    batches = torch.randn(3, 5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    engine, model, optimizer = private_probe(batches[0], method="lm")
    seen: list[Tensor] = []
    engine._attached.step.source.observe = seen.append  # type: ignore[method-assign, union-attr]
    for batch in batches:
        n, G = batch.norm(dim=2), batch.flatten(1).norm(dim=1)
        scale = 0.5 * G.clamp(max=1.0)[:, None] / n
        torch.testing.assert_close(step(model, optimizer, batch), (scale[..., None] * batch).sum(0))
        torch.testing.assert_close(seen[-1], (n / G[:, None]).sum(0))


@pytest.mark.parametrize("method", with_default_source())
def test_a_full_batch_gets_the_very_noise_that_an_empty_one_gets(method: str) -> None:
    """Up to one step of the grid that both are rounded to."""

    def released(batch: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        engine, model, optimizer = private_probe(batch, method=method, noise_multiplier=sigma, max_grad_norm=0.5)
        source = engine._attached.step.source
        seen: list[Tensor] = []
        if isinstance(source, Private):
            source.observe = seen.append  # type: ignore[method-assign]
        gradients = [step(model, optimizer, batch).flatten() for _ in range(3)]
        grids = engine.mechanism.gradient_grid, engine.mechanism.statistic_grid
        steps = [torch.full_like(t, grid.step) for parts, grid in zip((gradients, seen), grids) for t in parts]
        return torch.cat([*gradients, *seen]), torch.cat(steps)

    full = torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise, steps = released(full[:0], 1.3)
    assert (noise != 0).all()
    away = released(full, 1.3)[0] - released(full, 0.0)[0] - noise
    assert (away.abs() <= steps * (1 + 1e-9)).all()


def test_squares_that_lose_digits_to_underflow_cannot_hide_part_of_a_gradient() -> None:
    """Each entry's square lies half-way between two multiples of the smallest float32, and is rounded down."""
    row = torch.full((1, 2, 200_000), (83.49 * 2.0**-149) ** 0.5)
    row[0, 1] = 1.0
    assert row[0, 0].double().norm() > 1.002 * row[0, 0].square().sum().sqrt()
    _, model, optimizer = private_probe(row, method="lm", weights="fixed")
    released = step(model, optimizer, row).double()
    assert released.norm() <= 1.0 + 1e-5


def test_shares_of_a_gradient_whose_square_overflows_float32_have_norm_one() -> None:
    norms, bad = usable(torch.tensor([[3e25, 4e25]]), torch.float32)
    assert not bad.any()
    assert shares(norms).tolist() == [pytest.approx([0.6, 0.8])]


def test_private_weights_are_the_running_mean_times_the_risk() -> None:
    source = Private(risk_factors([0.5, 0.2], 1.0), share=0.01)
    first, second = torch.tensor([[3.0, 4.0], [4.0, 1.0]], dtype=torch.float64)
    source.observe(first)
    source.observe(second)
    expected = unit((0.9 * first + second) * torch.tensor([0.5, 0.2]))
    assert source.current().tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("source", ["public", "batch"])
def test_weights_from_gradients_are_the_mean_ratio_of_whole_gradients_times_the_risk(source: str) -> None:
    """Some examples are clipped and some are not, which a mean loss that is not undone would change."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)
    data *= torch.logspace(-2, 1, 6, dtype=torch.float64)[:, None, None]
    private = data if source == "batch" else data.flip(1)
    engine, model, optimizer = private_probe(
        private, method="lm", weights=source, public_data=(data, torch.zeros(6)), risk=RISK, diagnostics=True
    )
    step(model, optimizer, private)
    expected = unit(mean_ratio(BatchView(data.norm(dim=2), 1.0)) * risk_factors(RISK, 1.0))
    assert engine.diagnostics is not None
    assert engine.diagnostics.steps[0].weights == pytest.approx(expected.tolist())


@pytest.mark.parametrize("source", ["public", "batch"])
def test_optimal_weights_have_the_least_bias_of_all_unit_vectors_through_the_engine(source: str) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(12, 4, 3, generator=generator, dtype=torch.float64)
    data = (data + 1) * torch.tensor([0.1, 0.3, 1.0, 2.0], dtype=torch.float64)[:, None]
    engine, model, optimizer = private_probe(
        data, method="lm-optimal", weights=source, public_data=(data, torch.zeros(12)), diagnostics=True
    )
    step(model, optimizer, data)
    C_i = data.flatten(1).norm(dim=1).clamp(max=1.0)
    u = (C_i[:, None, None] * data / data.norm(dim=2, keepdim=True)).mean(0)
    rivals = (random_units(100_000, 4, 0)[..., None] * u - data.mean(0)).flatten(1).norm(dim=1)
    assert engine.diagnostics is not None
    assert engine.diagnostics.steps[0].bias_norm <= float(rivals.min()) + 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "kind",
    [
        "linear",
        "linear on sequences",
        "conv2d",
        "conv2d, many channels on few pixels",
        "conv2d, full vectors of channels",
        "conv2d, long rows, stride 2",
        "embedding",
        "layer norm",
        "bare parameters",
        "called twice",
        "tied weights",
    ],
)
def test_a_nan_output_gradient_of_one_example_leaves_the_others_as_they_are(kind: str, dtype: torch.dtype) -> None:
    """Nor in single precision, where other kernels do the work."""
    model, batch = made(kind, dtype)

    def weighted(m: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, weight = pair
        return weight @ m(x).reshape(len(x), -1).square().sum(1)

    weight = torch.linspace(0.5, 1.5, 5, dtype=dtype)
    weight[2] = torch.nan
    found, layers = captured(model, weighted, (batch, weight))
    norms, bad = usable(found.squared_norms(layers).sqrt(), torch.float64)
    assert bad.tolist() == [False, False, True, False, False]
    assert (norms[2] == 0).all()
    kept, _ = captured(model, weighted, (batch[~bad], weight[~bad]))
    sums = found.without(bad).weighted_sums([torch.ones_like(norms)], layers)[0]
    for name, expected in kept.weighted_sums([torch.ones_like(norms[~bad])], layers)[0].items():
        rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6 * float(expected.abs().max()))
        torch.testing.assert_close(sums[name], expected, rtol=rtol, atol=atol)


def test_a_whole_taken_as_one_scales_each_of_its_parameters_by_its_own_layer() -> None:
    torch.manual_seed(0)
    model, batch = Tokens().double(), torch.randn(5, 3, 4, dtype=torch.float64)
    assert compare(model, quadratic, batch, split(batch), generic_modules=[""]).worst <= DOUBLE


def test_the_norm_of_two_million_entries_is_not_lost_to_rounding() -> None:
    rows = torch.rand(2, 2**21 + 5, generator=torch.Generator().manual_seed(0))
    assert relative(pieces.squared_row_norms(rows).double(), rows.double().square().sum(1)) < 1e-6


@pytest.mark.parametrize("width", [1, 7, 2047, 2048, 4096, 9216, 2**14, 2**14 + 64, 65537, 786_432 // 4])
@pytest.mark.parametrize("sizes", [(1,), (3, 3, 1)])
def test_kept_gradients_of_any_width_have_the_norms_and_sums_of_their_entries(
    width: int, sizes: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(width)
    blocks = [torch.randn(size, width, generator=generator) for size in sizes]
    rows, scales = pieces.Rows.gather(blocks, lambda flat: flat), torch.rand(2, sum(sizes), generator=generator)
    exact = torch.cat(blocks).double()
    assert relative(rows.squared_norms.double(), exact.square().sum(1)) < 1e-6
    for some in (scales, scales[:1]):
        found = torch.stack(rows.weighted_sums(some))
        assert found.shape == (len(some), width)
        assert relative(found.double(), some.double() @ exact) < 1e-6
    turned = torch.cat(blocks).T.contiguous().T  # the same numbers in another order of memory
    assert relative(pieces.squared_row_norms(turned).double(), exact.square().sum(1)) < 1e-6


def test_a_gram_product_that_rounds_below_zero_is_a_small_norm_not_a_nan() -> None:
    x = torch.ones(1, 2, 1)
    gram_x, gram_g = torch.ones(1, 2, 2), torch.tensor([[[1.0, -1.001], [-1.001, 1.0]]])
    assert 0 < float(pieces.gram_squared_norms(x, x, gram_x, gram_g)) < 1e-5


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_plain_layer_with_parameters_of_another_name_gets_the_generic_rule() -> None:
    layer = nn.utils.weight_norm(nn.Linear(4, 3))
    assert type(layer) is nn.Linear
    assert rule_for(layer) is generic.RULE


def test_two_positions_that_almost_cancel_never_make_a_gram_norm_too_small() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2000, 2, 4), torch.randn(2000, 2, 4)
    x[:, 1], g[:, 1] = x[:, 0] * (1 + 10 ** (-1 - 7 * torch.rand(2000, 1)) * torch.randn(2000, 1)), -g[:, 0]
    exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    gram = gram_norms(x, g)
    assert (gram >= exact * (1 - 1e-6)).all()


def test_equal_positions_that_almost_cancel_never_make_a_gram_norm_too_small() -> None:
    """Equal positions are rounded alike, so that errors add up in step instead of averaging out."""
    torch.manual_seed(0)
    x, g = (torch.randn(400, 1, 64).abs().expand(400, 32, 64).contiguous() for _ in range(2))
    g[:, 16:] *= -(1 + 10 ** (-1 - 6 * torch.rand(400, 1, 1)))
    exact = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    gram = gram_norms(x, g)
    assert (gram >= exact * (1 - 1e-6)).all()


@pytest.mark.parametrize("seed", range(10))
def test_one_example_of_equal_cancelling_positions_releases_at_most_the_sensitivity(seed: int) -> None:
    torch.manual_seed(seed)
    x, g = (torch.randn(1, 1, 512).abs().expand(1, 32, 512).contiguous() for _ in range(2))
    g[:, 16:] *= -(1 + 10 ** (-2.5 - 1.5 * float(torch.rand(()))))
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    lmdp.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x), batch_size=1),
        noise_multiplier=0,
        max_grad_norm=1.0,
        method="dpsgd",
        poisson_sampling=False,
        loss_reduction="sum",
    )
    (model(x) * g).sum().backward()
    optimizer.step()
    assert float(model.weight.grad.double().norm()) <= 1 + 1e-5
