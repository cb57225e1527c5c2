"""What is measured on: the four models of the paper, a transformer encoder and models of text, each with its batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lmdp.app.bench.language import Classifier, Encoder, LanguageModel, Recurrent, Siamese, low_rank
from lmdp.models import DCNN, SCNN, VGG16, ResNet18, fresh


class Transformer(nn.Module):
    """Pre-norm encoder blocks with attention written out in linear layers."""

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch.

    vocabulary  of which the batch has indices; of none, it has real numbers
    next_word   whether there is a class for every index, and not one for every example
    in_place    whether its forward pass overwrites activations to save memory
    blocks      whether it has a list of this name, to be sharded one by one
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10
    vocabulary: int | None = None
    next_word: bool = False
    in_place: bool = False
    channels_last: bool = False
    blocks: bool = False

    def laid_out(self, *, channels_last: bool) -> Case:
        """The same in this memory format, which only images have."""
        return replace(self, channels_last=channels_last and len(self.shape) == 4)

    def of_size(self, batch: int | None) -> Case:
        """The same with batches of so many."""
        if batch is None:
            return self
        title = f"{self.title.rpartition(', batch ')[0]}, batch {batch}"
        return replace(self, title=title, shape=(batch, *self.shape[1:]))

    @property
    def memory_format(self) -> str:
        return "channels last" if self.channels_last else "contiguous"

    def batch(self, size: int | None = None) -> tuple[Tensor, Tensor]:
        count = self.shape[0] if size is None else size
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.shape[1:])
        if self.vocabulary is None:
            x = torch.randn(shape, generator=generator)
        else:  # a few words are frequent, as in any text
            x = (torch.rand(shape, generator=generator) ** 4 * self.vocabulary).long()
        y = torch.randint(0, self.classes, shape if self.next_word else (count,), generator=generator)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, y

    def model(self, *, hooked: bool = False) -> nn.Module:
        """The same weights every time. `hooked` models write nothing in place, because hooks on modules forbid it."""
        model = fresh(self.make, 0)
        if hooked and self.in_place:
            model = out_of_place(model)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


NOT_IN_PLACE: dict[Any, Any] = {operator.iadd: operator.add, torch.relu_: torch.relu}


def out_of_place(model: nn.Module) -> nn.Module:
    """The same modules, parameters and results, with a new tensor wherever the forward pass would overwrite one."""
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
    traced = fx.symbolic_trace(model)
    for node in traced.graph.nodes:
        if node.op == "call_function":
            node.target = NOT_IN_PLACE.get(node.target, node.target)
    traced.recompile()
    return traced


CASES = {
    "scnn": Case("S-CNN, batch 600", SCNN, (600, 1, 28, 28)),
    "dcnn": Case("D-CNN, batch 256", DCNN, (256, 3, 32, 32)),
    "resnet18": Case("ResNet-18, batch 64", lambda: ResNet18(classes=10), (64, 3, 32, 32), in_place=True),
    "vgg16": Case("VGG-16 on 64x64, batch 32", lambda: VGG16(classes=10), (32, 3, 64, 64), in_place=True),
    "transformer": Case("transformer 4x256, 128 tokens, batch 32", Transformer, (32, 128, 256)),
    "encoder24": Case("encoder 24x256, 128 tokens, batch 8", lambda: Transformer(depth=24), (8, 128, 256), blocks=True),
    "minilm": Case("MiniLM 6x384, 128 tokens, batch 16", Classifier, (16, 128), vocabulary=30_522),
    "siamese": Case("Siamese MiniLM, batch 8", Siamese, (8, 2, 128), classes=2, vocabulary=30_522),
    "lora": Case(
        "LoRA on MiniLM, batch 16",
        lambda: Classifier(encoder=low_rank(Encoder())),
        (16, 128),
        vocabulary=30_522,
    ),
    "gpt2": Case(
        "tied LM 4x256, 64 tokens, batch 16",
        LanguageModel,
        (16, 64),
        classes=16_384,
        vocabulary=16_384,
        next_word=True,
    ),
    "lstm": Case("LSTM, 64 tokens, batch 64", Recurrent, (64, 64), vocabulary=10_000),
}


def case_name(written: str) -> str:
    """The name of a case, with or without hyphens: d-cnn and dcnn are the same."""
    name = written.strip().lower().replace("-", "")
    if name not in CASES:
        raise ValueError(f"model is {written!r}; it must be of {', '.join(CASES)}")
    return name
