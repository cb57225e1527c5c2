"""Models of transformers, and what they share among examples, agree with one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients import Capture
from lmdp.layers import LayerMap
from tests.gradients.reference import captured, compare

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

DOUBLE = 1e-8
WORDS, PATCHES = 23, 5
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 24,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
Batch = dict[str, Tensor]


class Pooled(nn.Module):
    """An encoder with a head of its own, as users build it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(16, 3)

    def forward(self, **inputs: Tensor) -> Tensor:
        hidden = self.encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(2)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def tokens(size: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(size * 100 + length)
    words = torch.randint(2, WORDS, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[0, 3:] = 0
    return {"input_ids": words, "attention_mask": mask}


def pictures(size: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(size)).double()}


def translated(size: int, length: int) -> Batch:
    return tokens(size, length) | {"labels": tokens(size, length + 1)["input_ids"]}


def squares(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    values = output if isinstance(output, Tensor) else output["logits"] if "logits" in output else output[0]
    return (values.square() * torch.linspace(0.5, 1.5, values.shape[-1]).double()).sum() / 2


def words(model: nn.Module, batch: Batch) -> Tensor:
    """The summed loss of a language model."""
    logits = model(**batch).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="sum")


@dataclass(frozen=True)
class Model:
    make: Callable[[str], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor] = squares
    batch: Callable[[int, int], Batch] = tokens
    attention: tuple[str, ...] = ("eager", "sdpa")


def of(kind: str, config: str, **settings: Any) -> Callable[[str], nn.Module]:
    def make(attention: str) -> nn.Module:
        values = (SIZES if not settings else {}) | settings
        model = getattr(transformers, kind)(getattr(transformers, config)(**values, attn_implementation=attention))
        for pooler in [m for m in (getattr(model, "pooler", None),) if m is not None]:
            pooler.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    return make


GPT2 = of("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=24)
DISTIL = of(
    *("DistilBertModel", "DistilBertConfig"),
    dim=16,
    n_layers=2,
    n_heads=2,
    hidden_dim=24,
    vocab_size=WORDS,
    max_position_embeddings=24,
)
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}

MODELS = {
    "BERT with a head": Model(lambda attention: Pooled(of("BertModel", "BertConfig")(attention))),
    "BERT, masked words": Model(of("BertForMaskedLM", "BertConfig"), words),
    "RoBERTa": Model(of("RobertaForMaskedLM", "RobertaConfig"), words),
    "DistilBERT": Model(lambda attention: Pooled(DISTIL(attention))),
    "GPT-2": Model(GPT2, words),
    "Llama": Model(of("LlamaForCausalLM", "LlamaConfig"), words),
    "T5 encoder": Model(of("T5EncoderModel", "T5Config", **T5), attention=("eager",)),
    "T5": Model(of("T5ForConditionalGeneration", "T5Config", **T5), batch=translated, attention=("eager",)),
    "ViT": Model(of("ViTForImageClassification", "ViTConfig", **VIT, image_size=8, patch_size=4), batch=pictures),
    "ViT, as many patches as examples": Model(
        of("ViTForImageClassification", "ViTConfig", **VIT, image_size=8, patch_size=4),
        batch=lambda size, _: pictures(5, 0),
    ),
}


def examples(batch: Batch) -> list[Batch]:
    size = len(next(iter(batch.values())))
    return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(size)]


@pytest.mark.parametrize(("size", "length"), [(3, 5), (5, 5), (1, 4)])
@pytest.mark.parametrize(("name", "attention"), [(n, a) for n, model in MODELS.items() for a in model.attention])
def test_models_of_transformers_agree_with_one_example_at_a_time(
    name: str, attention: str, size: int, length: int
) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model, batch = case.make(attention).double().eval(), case.batch(size, length)
    assert compare(model, case.loss, batch, examples(batch)).worst <= DOUBLE


@pytest.mark.parametrize(("size", "length"), [(4, 5), (5, 5)])
@pytest.mark.parametrize("name", MODELS)
def test_one_example_put_in_anothers_place_moves_the_released_sum_by_at_most_twice_the_bound(
    name: str, size: int, length: int
) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make("eager").double().eval()
    batch, other = case.batch(size, length), case.batch(size + 1, length)
    size = len(next(iter(batch.values())))
    changed = {key: torch.cat([other[key][-1:] * 3 % WORDS, value[1:]]) for key, value in batch.items()}
    moved = clipped_sum(model, case, batch, size) - clipped_sum(model, case, changed, size)
    assert 0.1 * BOUND < moved.norm() <= 2 * BOUND * (1 + 1e-9)


BOUND = 0.5


def clipped_sum(model: nn.Module, case: Model, batch: Batch, size: int) -> Tensor:
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
    )
    (1000 * case.loss(model, batch)).backward()  # every example reaches the bound
    optimizer.step()
    engine.detach()
    return size * torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_bias_that_two_modules_name_is_counted_once_and_belongs_to_the_inner_one() -> None:
    for kind, config, bias in (
        ("BertForMaskedLM", "BertConfig", "cls.predictions.decoder.bias"),
        ("RobertaForMaskedLM", "RobertaConfig", "lm_head.decoder.bias"),
    ):
        model = of(kind, config)("eager")
        capture = Capture(model, LayerMap.of(model))
        capture.detach()
        assert bias in capture.parameters
        assert [
            o.name for o in capture.owners if any(p is capture.parameters[bias] for p in o.parameters.values())
        ] == [bias.rpartition(".")[0]]


@pytest.mark.parametrize("name", ["BERT with a head", "GPT-2", "T5 encoder"])
def test_it_is_established_whose_rows_are_the_examples_and_a_longer_batch_asks_no_more(name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make("eager").double()
    capture = Capture(model, LayerMap.of(model))
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(0))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for size, length in ((5, 5), (3, 4), (4, 4), (7, 9)):
        case.loss(model, case.batch(size, length)).backward()
        assert capture.take().batch_size == size
        assert capture.rows_doubt is None
        counts.append(sum(runs))
        runs.clear()
    capture.detach()
    assert "a run on a few rows" in str(capture.rows_established)
    assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("name", ["BERT with a head", "GPT-2", "T5 encoder"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model, batch = case.make("eager").double(), case.batch(5, 5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected, layers = captured(model, case.loss, batch)
    inner = getattr(model, "encoder", model) if isinstance(model, Pooled) else model
    inner.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.train()
    gradients, _ = captured(model, case.loss, batch)
    torch.testing.assert_close(gradients.squared_norms(layers), expected.squared_norms(layers))
