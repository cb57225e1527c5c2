"""Models of other people's libraries, as they come: exact, or refused with a remedy that works when it is followed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lmdp
from lmdp.gradients import Capture
from lmdp.layers import LayerMap
from tests.certified.case import CERTIFIED, Case, Training, private
from tests.gradients.hub_models import MODELS, TEXT, Batch, HubModel, of, pictures, still
from tests.gradients.reference import captured, compare, layer_norms, one_by_one

pytestmark = pytest.mark.filterwarnings("ignore")

DOUBLE, SINGLE, AUTOCAST = 1e-8, 1e-4, 5e-3
SHAPES = [(3, 5), (5, 5), (1, 4)]


def installed(case: HubModel) -> None:
    """Skip, with the reason, where a library cannot be imported (torchvision's wheels need the torch they are for)."""
    try:
        importlib.import_module(case.library)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{case.library} cannot be imported: {error}")


def ready(name: str, attention: str | None = None, *, dtype: torch.dtype = torch.float64) -> tuple[HubModel, nn.Module]:
    case = MODELS[name]
    installed(case)
    torch.manual_seed(0)
    return case, case.make(attention).to(dtype).eval()


def batch_of(case: HubModel, size: int, length: int, dtype: torch.dtype = torch.float64) -> Batch:
    batch = case.batch(size, length)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def examples(batch: Batch) -> list[Batch]:
    size = len(next(iter(batch.values())))
    return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(size)]


def whole(case: HubModel) -> dict[str, Any]:
    return {"generic_modules": case.options.get("generic", ())}


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "length"), SHAPES)
@pytest.mark.parametrize(("name", "attention"), [(n, a) for n, model in MODELS.items() for a in model.attention])
def test_every_example_has_the_gradient_that_it_has_alone(name: str, attention: str, size: int, length: int) -> None:
    case, model = ready(name, attention)
    batch = batch_of(case, size, length)
    assert compare(model, case.total, batch, examples(batch), **whole(case)).worst <= DOUBLE


def test_a_picture_may_have_as_many_patches_as_the_batch_has_examples() -> None:
    case, model = ready("ViT", "eager")
    batch = {"pixel_values": pictures(5, 0)["pixel_values"].double()}
    assert compare(model, case.total, batch, examples(batch)).worst <= DOUBLE


@pytest.mark.parametrize("name", MODELS)
def test_single_precision_and_autocast_agree_as_far_as_they_round(name: str) -> None:
    case, model = ready(name, dtype=torch.float32)
    batch = batch_of(case, 4, 6, torch.float32)

    def cast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case.total(model, batch)

    for loss, bound in ((case.total, SINGLE), (cast, AUTOCAST)):
        gradients, layers = captured(model, loss, batch, **whole(case))
        norms = gradients.squared_norms(layers).sqrt().norm(dim=1)
        expected = layer_norms(one_by_one(model, loss, examples(batch)), layers).norm(dim=1)
        torch.testing.assert_close(norms, expected, rtol=bound, atol=0)


@pytest.mark.parametrize(("size", "length"), [(4, 5), (5, 5)])
@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.library == "transformers"])
def test_one_example_put_in_anothers_place_moves_the_released_sum_by_at_most_twice_the_bound(
    name: str, size: int, length: int
) -> None:
    case, model = ready(name)
    batch, other = batch_of(case, size, length), batch_of(case, size + 1, length)
    changed = {key: torch.cat([other[key][-1:], value[1:]]) for key, value in batch.items()}
    moved = clipped_sum(model, case, batch, size) - clipped_sum(model, case, changed, size)
    assert 0.1 * BOUND < moved.norm() <= 2 * BOUND * (1 + 1e-9)


BOUND = 0.5


def clipped_sum(model: nn.Module, case: HubModel, batch: Batch, size: int) -> Tensor:
    engine = lmdp.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=size),
        noise_multiplier=0,
        max_grad_norm=BOUND,
        method="dpsgd",
        poisson_sampling=False,
        loss_reduction="sum",
        check_mixing=False,
        allow_unused=True,
        generic=case.options.get("generic", ()),
    )
    (1e4 * case.total(model, batch)).backward()  # every example reaches the bound
    optimizer.step()
    engine.detach()
    return size * torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# -- trained ----------------------------------------------------------------------------------------------------------


class Records(Dataset[Batch]):
    """The rows of a batch, one by one."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index] for name, value in self.batch.items()}


def training(case: HubModel, model: nn.Module, **options: Any) -> Training:
    return private(model.train(), Records(case.batch(64, 7)), method="lm", **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_training_of_it_ends_certified_as_it_comes_or_as_the_refusal_says(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    installed(case)

    def run(_: Path) -> lmdp.PrivacyEngine:
        model = case.make()
        case.mended(model)
        return training(case, model, **case.options).run(case.mean, passes=3)

    outcome = Case(name, "", run).outcome(tmp_path)
    assert outcome.kind == CERTIFIED, outcome
    assert outcome.steps >= 4


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.refusal])
def test_what_cannot_be_told_apart_is_refused_before_a_step_and_names_what_to_do(name: str) -> None:
    case = MODELS[name]
    installed(case)
    torch.manual_seed(0)
    told = training(case, case.make())
    with pytest.raises((RuntimeError, ValueError), match=case.refusal) as refusal:
        told.run(case.mean, passes=1)
    assert told.engine.steps == 0
    told.engine.detach()
    for names in re.findall(r"generic=(\[.*?\])", str(refusal.value)):
        assert ast.literal_eval(names) == list(case.options["generic"])


def test_a_layer_that_was_left_out_by_chance_may_be_allowed_to() -> None:
    """wav2vec2 leaves out whole layers, the same for all examples: refused, because of what else it could mean."""
    case = MODELS["wav2vec2"]
    installed(case)
    torch.manual_seed(0)
    model: Any = case.make()
    model.config.layerdrop = 0.3
    model.wav2vec2.masked_spec_embed.requires_grad_(False)  # the other remedy of that refusal: masks stay on
    told = training(case, model)
    with pytest.raises(RuntimeError, match=r"no gradient reached.*allow_unused=True"):
        told.run(case.mean, passes=8)
    told.engine.detach()
    model.zero_grad()
    told = training(case, model, allow_unused=True)
    assert told.run(case.mean, passes=3).steps > 0


# -- how --------------------------------------------------------------------------------------------------------------


def test_the_bias_that_two_modules_name_is_counted_once_and_belongs_to_the_inner_one() -> None:
    for kind, config, bias in (
        ("BertForMaskedLM", "BertConfig", "cls.predictions.decoder.bias"),
        ("RobertaForMaskedLM", "RobertaConfig", "lm_head.decoder.bias"),
    ):
        model = of(kind, config, TEXT)("eager")
        capture = Capture(model, LayerMap.of(model))
        capture.detach()
        assert bias in capture.parameters
        assert [
            o.name for o in capture.owners if any(p is capture.parameters[bias] for p in o.parameters.values())
        ] == [bias.rpartition(".")[0]]


@pytest.mark.parametrize("name", ["BERT with a head", "GPT-2", "T5 encoder", "BEiT", "prompt tuning"])
def test_it_is_established_whose_rows_are_the_examples_and_a_longer_batch_asks_no_more(name: str) -> None:
    case, model = ready(name, "eager")
    capture = Capture(model, LayerMap.of(model))
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(0))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for size, length in ((5, 5), (3, 4), (4, 4), (7, 9)):
        case.total(model, batch_of(case, size, length)).backward()
        assert capture.take().batch_size == size
        assert capture.rows_doubt is None
        counts.append(sum(runs))
        runs.clear()
    capture.detach()
    assert "a run on a few rows" in str(capture.rows_established)
    assert len(set(counts[1:])) == 1


CHECKPOINTED = ["BERT with a head", "DistilBERT", "GPT-2", "Llama", "T5 encoder", "ViT", "LoRA"]


def checkpointing(name: str, *, reentrant: bool) -> Iterator[tuple[HubModel, nn.Module]]:
    """The model without, and then with, checkpoints, both without dropout."""
    case, model = ready(name, "eager")
    still(model)
    yield case, model.train()
    inner: Any = getattr(model, "encoder", model)
    inner.gradient_checkpointing_enable({"use_reentrant": reentrant})
    yield case, model.train()


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    norms = []
    for case, model in checkpointing(name, reentrant=False):
        gradients, layers = captured(model, case.total, batch_of(case, 5, 5))
        norms.append(gradients.squared_norms(layers))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("name", ["BERT with a head", "Llama"])
def test_reentrant_checkpoints_are_refused_and_the_other_kind_is_named(name: str) -> None:
    *_, (case, model) = checkpointing(name, reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        captured(model, case.total, batch_of(case, 5, 5))
