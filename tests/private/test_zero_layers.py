"""What rounding leaves of a layer without a gradient is not scaled up to a full share of the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients.rows import norm_floor
from lmdp.methods import LEAST_SHARE
from lmdp.private.clipping import Clipping, usable
from tests.gradients.hub_models import MODELS, TEXT, HubModel, of, squares, tokens
from tests.gradients.reference import captured

pytestmark = pytest.mark.filterwarnings("ignore")
TYPES = [torch.float32, torch.float64]
SIZES = st.one_of(st.just(0.0), st.floats(-30, 30).map(lambda exponent: 10.0**exponent))
MATRICES = st.lists(st.lists(SIZES, min_size=4, max_size=4), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(rows=MATRICES, clip_norm=st.floats(-6, 6).map(lambda exponent: 10.0**exponent))
def test_a_layer_counts_fully_unless_it_is_next_to_nothing_and_then_in_proportion(
    rows: list[list[float]], clip_norm: float
) -> None:
    norms = torch.tensor(rows, dtype=torch.float64)
    scales = Clipping.of("lm", clip_norm=clip_norm, layers=4).scales(norms)
    for n, s in zip(norms, scales):
        whole = float(n.norm())
        for norm, scale in zip(n.tolist(), s.tolist()):
            full = min(clip_norm, whole)
            share = min(1.0, norm / (LEAST_SHARE * whole)) if whole else 0.0
            assert scale * norm == pytest.approx(full * share, rel=1e-9, abs=1e-300)


def biases_only(attention: str) -> nn.Module:
    """BitFit: of BERT, the biases and the head are trained."""
    torch.manual_seed(0)
    model = of("BertForSequenceClassification", "BertConfig", TEXT)(attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("classifier"))
        if "query" in name or "key" in name:
            parameter.data *= 10  # attention that tells tokens apart
    return model.eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_bias_of_a_key_has_no_share_and_every_other_layer_has(dtype: torch.dtype, attention: str) -> None:
    """Whatever is added to all scores of a softmax changes nothing: the true gradient is zero."""
    model = biases_only(attention).to(dtype)
    case = HubModel(lambda: model, tokens, squares)
    gradients, layers = captured(model, case.total, case.batch(6, 12))
    raw = gradients.squared_norms(layers).sqrt()
    keys = torch.tensor([layer.name.endswith("key") for layer in layers])
    assert 0 < keys.sum() < len(layers)
    assert (raw[:, keys] > norm_floor(dtype)).any()  # rounding, which a method that normalises would scale up
    scales, bad = Clipping.of("lm", clip_norm=1.0, layers=len(layers)).fitting(usable(raw, dtype)[0], 1.0, dtype)
    assert not bad.any()
    full = raw.norm(dim=1, keepdim=True).clamp(max=1.0)
    assert ((scales * raw / full)[:, keys] < 1e-3).all()
    fully = raw > LEAST_SHARE * raw.norm(dim=1, keepdim=True)
    torch.testing.assert_close((scales * raw)[fully], full.expand_as(raw)[fully])
    queries = torch.tensor([layer.name.endswith("query") for layer in layers])  # at first all keys are about the same
    assert fully[:, ~(keys | queries)].all()


@pytest.mark.parametrize("cast", [False, True])
def test_one_example_moves_the_sum_by_its_bound_however_rounding_follows_the_batch(cast: bool) -> None:
    """Weights so large that what rounding leaves of key biases is far above the last place of the whole gradient."""
    model = biases_only("sdpa")
    for name, parameter in model.named_parameters():
        parameter.data *= 10 if parameter.dim() > 1 and "embeddings" not in name and not cast else 1
    batch = tokens(60, 12)
    without = {name: value[1:] for name, value in batch.items()}
    moved = released(model, batch, cast) - released(model, without, cast)
    assert 0.5 < float(moved.norm()) <= 1 + 1e-2


def released(model: nn.Module, batch: dict[str, Tensor], cast: bool) -> Tensor:
    """The sum without noise of one step of `lm`, of a loss that is a mean, in 16 bits if it is cast."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    size = len(batch["input_ids"])
    engine = lmdp.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
        noise_multiplier=0,
        max_grad_norm=1.0,
        method="lm",
        weights="fixed",
        poisson_sampling=False,
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        each = squares(model, batch)
    (1e3 * each.float().mean()).backward()  # everybody reaches the bound
    optimizer.step()
    engine.detach()
    return size * torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_next_to_nothing_is_released_of_it() -> None:
    model = biases_only("sdpa")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    lmdp.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(6)), batch_size=6),
        noise_multiplier=0,
        max_grad_norm=1.0,
        method="lm",
        weights="fixed",
        poisson_sampling=False,
        check_mixing=False,
    )
    squares(model, tokens(6, 12)).mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert bool(_norm(parameter) < 1e-5) == name.endswith("key.bias"), name


def _norm(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.norm()


@pytest.mark.parametrize("name", ["BERT, classes", "GPT-2", "ViT", "T5"])
def test_only_queries_and_keys_of_a_model_that_has_learnt_nothing_count_less(name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make().eval()
    gradients, layers = captured(model, case.total, case.batch(6, 12))
    raw = gradients.squared_norms(layers).sqrt()
    less = (raw < LEAST_SHARE * raw.norm(dim=1, keepdim=True)).any(dim=0).tolist()
    assert all(
        layer.name.endswith(("query", "key", "q_proj", "k_proj"))
        for layer, counts_less in zip(layers, less)
        if counts_less
    )
