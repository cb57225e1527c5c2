"""Models of many kinds, in which examples do not meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from tests.certified import nets
from tests.certified.case import Table, private
from tests.certified.parts import CLASSES, FEATURES, VOCABULARY, WIDTH, classify, images, perceptron, texts, vectors

sound = Table()

PICTURES: dict[str, Callable[[], nn.Module]] = {
    "resnet": nets.resnet,
    "mobilenet": nets.mobilenet,
    "efficientnet": nets.efficientnet,
    "densenet": nets.densenet,
    "convnext": nets.convnext,
    "vision_transformer": nets.VisionTransformer,
    "swin": nets.Swin,
    "mlp_mixer": nets.Mixer,
}


def of_pictures(make: Callable[[], nn.Module]) -> Callable[[Path], lmdp.PrivacyEngine]:
    return lambda _: private(make(), images()).run(classify)


for name, make in PICTURES.items():
    sound.add(name, f"A {name.replace('_', ' ')} of few channels classifies pictures.", of_pictures(make))


@sound("make_compatible puts GroupNorm where BatchNorm was.")
def make_compatible(_: Path) -> lmdp.PrivacyEngine:
    model = nets.classifier(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return private(lmdp.make_compatible(model), images()).run(classify)


@sound("A backbone with BatchNorm is frozen in evaluation mode, and a head is trained.")
def frozen_batch_norm(_: Path) -> lmdp.PrivacyEngine:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval().requires_grad_(False)
    return private(nets.classifier(backbone), images()).run(classify)


@sound("A convolutional network in evaluation mode all the time.")
def model_in_evaluation_mode(_: Path) -> lmdp.PrivacyEngine:
    return private(nets.resnet().eval(), images()).run(classify)


@sound("A U-Net tells a class for every pixel.")
def segmentation(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), (batch[0].sum(1) > 0).long())

    return private(nets.UNet(), images()).run(loss)


def of_tokens(make: Callable[[], nn.Module]) -> Callable[[Path], lmdp.PrivacyEngine]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    return lambda _: private(make(), texts()).run(loss)


class Bag(nn.Module):
    """The mean of the embeddings of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens).mean(1))
        return logits


sound.add("lstm", "An LSTM reads texts.", of_tokens(lambda: nets.Recurrent(nn.LSTM)))
sound.add("gru", "A GRU reads texts.", of_tokens(lambda: nets.Recurrent(nn.GRU)))
sound.add("bag_of_words", "The mean of embeddings is classified.", of_tokens(Bag))


@sound("A transformer of torch with padding, dropout, and positions looked up once for all examples.")
def text_transformer(_: Path) -> lmdp.PrivacyEngine:
    training = private(nets.TextTransformer(), texts())
    return training.run(lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]))


@sound("The table of embeddings is also the head, and each example's tokens are averaged on their own.")
def tied_weights(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens = batch[0]
        each = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        return each.mean(1).mean()

    return private(nets.Tied(), texts()).run(loss)


@sound("Dropout before and between layers.")
def dropout(_: Path) -> lmdp.PrivacyEngine:
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(WIDTH, 3))
    return private(model, vectors()).run(classify)


@sound("Buffers that no step changes: means and deviations of public data.")
def buffers_that_do_not_change(_: Path) -> lmdp.PrivacyEngine:
    class Normalised(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*perceptron().children())
            self.register_buffer("mean", torch.full((FEATURES,), 0.5))
            self.register_buffer("deviation", torch.full((FEATURES,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward((x - self.mean) / self.deviation)
            return output

    return private(Normalised(), vectors()).run(classify)


@sound("Examples are sets of vectors, whose mean is classified.")
def deep_sets(_: Path) -> lmdp.PrivacyEngine:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.each(x.view(len(x), 2, 3)).relu().mean(1))
            return logits

    return private(Sets(), vectors()).run(classify)


@sound("Parameters and data in double precision.")
def double_precision(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron().double(), vectors())
    return training.run(lambda model, batch: F.cross_entropy(model(batch[0].double()), batch[1]))


@sound("A linear model: logistic regression.")
def logistic_regression(_: Path) -> lmdp.PrivacyEngine:
    return private(nn.Linear(FEATURES, CLASSES), vectors()).run(classify)


@sound("A module of the user's own with parameters of its own.")
def parameters_of_its_own(_: Path) -> lmdp.PrivacyEngine:
    class Radial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres, self.width = nn.Parameter(torch.randn(WIDTH, FEATURES)), nn.Parameter(torch.ones(()))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            off = (x[:, None] - self.centres).square().sum(2)
            logits: Tensor = self.head((-off * self.width.exp()).exp())
            return logits

    return private(Radial(), vectors(), generic=[""]).run(classify)
