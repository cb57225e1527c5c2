"""Data and small models that several cases share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.certified.case import EXAMPLES

FEATURES, CLASSES, LENGTH, VOCABULARY, WIDTH = 6, 3, 8, 24, 16


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(examples: int = EXAMPLES, *, seed: int = 1) -> TensorDataset:
    """Another seed: other people."""
    g = generator(seed)
    x = torch.randn(examples, FEATURES, generator=g)
    return TensorDataset(x, torch.randint(0, CLASSES, (examples,), generator=g))


def pairs(examples: int = EXAMPLES) -> TensorDataset:
    g = generator()
    first, second = torch.randn(2, examples, FEATURES, generator=g)
    return TensorDataset(first, second, torch.randint(0, CLASSES, (examples,), generator=g))


def images(examples: int = EXAMPLES, channels: int = 3, size: int = 8) -> TensorDataset:
    g = generator()
    x = torch.randn(examples, channels, size, size, generator=g)
    return TensorDataset(x, torch.randint(0, CLASSES, (examples,), generator=g))


def texts(examples: int = EXAMPLES) -> TensorDataset:
    """Tokens, 1 where there is text and 0 on padding, and a class."""
    g = generator()
    tokens = torch.randint(1, VOCABULARY, (examples, LENGTH), generator=g)
    lengths = torch.randint(2, LENGTH + 1, (examples,), generator=g)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return TensorDataset(tokens * mask, mask, torch.randint(0, CLASSES, (examples,), generator=g))


class Texts(Dataset[dict[str, Tensor]]):
    """The same as dictionaries, as tokenizers give them."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        self.tensors = texts(examples).tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, mask, labels = (tensor[index] for tensor in self.tensors)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def perceptron(inputs: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).tanh())
        return logits


def per_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """One term for every token: how well the model tells its remainder."""
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens % CLASSES, reduction="none")
