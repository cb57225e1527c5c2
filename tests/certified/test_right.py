"""What is made right without the user doing anything: position tables, and parameters under two names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lmdp.membership import representations
from tests.certified.case import private
from tests.certified.hub import transformer
from tests.certified.nets import TextTransformer, VisionTransformer
from tests.certified.parts import CLASSES, LENGTH, VOCABULARY, WIDTH, images, texts

CLIP = 0.05
"""Below the norm of every gradient here, so that every example is scaled."""


class Plain(TextTransformer):
    """Without a mask."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, torch.ones_like(tokens))


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, kind: str, name: str = "input_ids") -> None:
        super().__init__()
        self.model, self.name = transformer(kind), name

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(**{self.name: x}).logits
        return logits


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = transformer("T5EncoderModel"), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.model(tokens).last_hidden_state.mean(1))
        return logits


class TwoNames(nn.Module):
    """The bias of the head is registered by the parent too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.bias = self.head.bias

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).tanh().mean(1))
        return logits


class TwoPlaces(TwoNames):
    """A table that is used where it is registered, and by the parent besides."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        logits: Tensor = self.head(hidden.tanh().mean(1)) + self.bias
        return logits


TEXT: dict[str, Callable[[], nn.Module]] = {
    "a table of positions": Plain,
    "BERT": lambda: Logits("BertForSequenceClassification"),
    "DistilBERT": lambda: Logits("DistilBertForSequenceClassification"),
    "RoBERTa": lambda: Logits("RobertaForSequenceClassification"),
    "GPT-2": lambda: Logits("GPT2ForSequenceClassification"),
    "T5": Encoded,
    "BERT masked": lambda: Logits("BertForMaskedLM"),
    "RoBERTa masked": lambda: Logits("RobertaForMaskedLM"),
    "two names": TwoNames,
}
PICTURES: dict[str, Callable[[], nn.Module]] = {
    "a vision transformer": VisionTransformer,
    "ViT": lambda: Logits("ViTForImageClassification", "pixel_values"),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over examples: their first class, or each token, is told from what the model was given."""
    output = model(x)
    if output.dim() == 2:
        return F.cross_entropy(output, x.flatten(1)[:, 0].long() % CLASSES)
    return F.cross_entropy(output.transpose(1, 2), x, reduction="none").mean(1).mean()


def one_by_one(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The mean of clipped gradients, each of an example that is alone."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in x.split(1):
        model.zero_grad()
        loss_of(model, row).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, g in grads.items():
            sums[name] += g * (CLIP / norm).clamp(max=1)
    return {name: total / len(x) for name, total in sums.items()}


def released(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The same by a private step without noise."""
    options: dict[str, Any] = {"noise_multiplier": 0.0, "poisson_sampling": False, "max_grad_norm": CLIP}
    training = private(model, TensorDataset(x), batch_size=len(x), allow_unused=True, **options)
    training.optimizer.zero_grad()
    loss_of(model, x).backward()
    training.optimizer.step()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    training.engine.detach()
    return grads


def check(make: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    model = make().eval()
    expected = one_by_one(copy.deepcopy(model), x)
    actual = released(model, x)
    scale = max(float(g.abs().max()) for g in expected.values())
    assert set(actual) == set(expected)
    for name, g in expected.items():
        torch.testing.assert_close(actual[name], g, rtol=1e-4, atol=1e-5 * scale, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("size", [LENGTH, LENGTH + 3, 1, 2])
@pytest.mark.parametrize("make", TEXT.values(), ids=TEXT)
def test_what_all_examples_share_counts_for_each_of_them(make: Callable[[], nn.Module], size: int) -> None:
    """Also where there are as many examples as tokens."""
    check(make, texts().tensors[0][:size].clamp(min=3))


@pytest.mark.parametrize("size", [5, 4, 7])
@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_the_same_for_patches_of_pictures(make: Callable[[], nn.Module], size: int) -> None:
    check(make, images().tensors[0][:size])


@pytest.mark.parametrize("size", [LENGTH, 5])
def test_a_parameter_that_is_used_at_two_places_is_right_or_refused(size: int) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        check(TwoPlaces, texts().tensors[0][:size])


@pytest.mark.parametrize("examples", [40, 300])
def test_an_audit_reads_nothing_that_nobody_wrote(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of positions gives as many rows as there are positions, whatever the number of examples."""
    monkeypatch.setattr(representations, "_allocate", lambda n, width, *_: np.full((n, width), np.nan, np.float32))
    assert unwritten(Plain(), texts(examples).tensors[0]) == []


def unwritten(model: nn.Module, inputs: Tensor) -> list[str]:
    """Layers of which something is read that was never written; a refusal reads nothing."""
    with contextlib.suppress(ValueError):
        layers = representations.record(model, inputs).layers
        return [name for name, rows in layers.items() if np.isnan(rows).any()]
    return []
