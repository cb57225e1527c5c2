"""Losses whose terms each depend on one example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from tests.certified import nets
from tests.certified.case import PASSES, Table, private
from tests.certified.parts import CLASSES, FEATURES, WIDTH, Tagger, pairs, per_token, perceptron, texts, vectors

sound = Table()

Loss = Callable[[Tensor, Tensor], Tensor]
FIXED = torch.tensor([1.0, 2.0, 5.0])
"""Weights of classes, from public knowledge."""


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).float()


def focal(output: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(output, y, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


def soft(y: Tensor) -> Tensor:
    return 0.8 * one_hot(y) + 0.2 / CLASSES


MEANS: dict[str, Loss] = {
    "label_smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "soft_targets": lambda o, y: F.cross_entropy(o, soft(y)),
    "squared_error": lambda o, y: F.mse_loss(o, one_hot(y)),
    "absolute_error": lambda o, y: F.l1_loss(o, one_hot(y)),
    "huber": lambda o, y: F.huber_loss(o, one_hot(y)),
    "smooth_l1": lambda o, y: F.smooth_l1_loss(o, one_hot(y)),
    "binary_cross_entropy": lambda o, y: F.binary_cross_entropy_with_logits(o, one_hot(y), pos_weight=FIXED),
    "multi_margin": lambda o, y: F.multi_margin_loss(o, y),
    "multilabel_soft_margin": lambda o, y: F.multilabel_soft_margin_loss(o, one_hot(y)),
    "kullback_leibler": lambda o, y: F.kl_div(o.log_softmax(1), soft(y), reduction="batchmean"),
    "negative_log_likelihood": lambda o, y: F.nll_loss(o.log_softmax(1), y),
    "poisson_likelihood": lambda o, y: F.poisson_nll_loss(o, one_hot(y)),
    "gaussian_likelihood": lambda o, y: F.gaussian_nll_loss(o[:, :1], y[:, None].float(), o[:, 1:2].exp()),
    "focal": focal,
    "class_weights_over_the_number_of_examples": lambda o, y: (
        F.cross_entropy(o, y, reduction="none") * FIXED[y]
    ).mean(),
    "two_terms": lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean(),
    "two_terms_of_one_factor": lambda o, y: F.cross_entropy(o, y) + o.square().sum(1).mean(),
    "two_terms_of_one_kind": lambda o, y: (
        F.cross_entropy(o, y) + F.kl_div(o.log_softmax(1), soft(y), reduction="batchmean")
    ),
    "with_entropy": lambda o, y: F.cross_entropy(o, y) - (o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    "with_a_hinge": lambda o, y: F.cross_entropy(o, y) + F.relu(1 - o.gather(1, y[:, None])).mean(),
    "summed_and_divided": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
}

SUMS: dict[str, Loss] = {
    "summed": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "summed_class_weights": lambda o, y: F.cross_entropy(o, y, weight=FIXED, reduction="sum"),
    "summed_without_one_class": lambda o, y: F.cross_entropy(o, y, ignore_index=0, reduction="sum"),
    "summed_over_a_constant": lambda o, y: F.cross_entropy(o, y, reduction="sum") / 16,
}


def of(loss: Loss, **options: Any) -> Callable[[Path], lmdp.PrivacyEngine]:
    return lambda _: private(perceptron(), vectors(), **options).run(lambda model, b: loss(model(b[0]), b[1]))


for name, loss in MEANS.items():
    sound.add(name, f"{name.replace('_', ' ').capitalize()}, a mean over the examples.", of(loss))
for name, loss in SUMS.items():
    sound.add(name, f"{name.replace('_', ' ').capitalize()}, told as a sum.", of(loss, loss_reduction="sum"))


@sound("Each example's tokens that count are averaged on their own.")
def masked_mean_of_each_example(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, mask, _ = batch
        return ((per_token(model, tokens) * mask).sum(1) / mask.sum(1)).mean()

    return private(Tagger(), texts()).run(loss)


@sound("A triplet within each example: three calls of the model.")
def triplet_within_an_example(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second, _ = batch
        return F.triplet_margin_loss(model(first), model(second), model(-second))

    return private(perceptron(), pairs()).run(loss)


@sound("Two calls of the model on the two halves of an example, and their cosine.")
def siamese(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second, y = batch
        return F.cosine_embedding_loss(model(first), model(second), (y > 0) * 2 - 1, margin=0.1)

    return private(perceptron(outputs=WIDTH), pairs()).run(loss)


@sound("An auxiliary head has a share of the loss.")
def auxiliary_head(_: Path) -> lmdp.PrivacyEngine:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.extra = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x).relu()
            return {"main": self.main(hidden), "extra": self.extra(hidden)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.cross_entropy(output["main"], batch[1]) + 0.3 * F.cross_entropy(output["extra"], batch[1])

    return private(Two(), vectors()).run(loss)


@sound("Distillation from a frozen public teacher.")
def distillation(_: Path) -> lmdp.PrivacyEngine:
    teacher = perceptron().eval().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        told = (teacher(batch[0]) / 2).log_softmax(1)
        output = model(batch[0])
        learnt = F.kl_div((output / 2).log_softmax(1), told, reduction="batchmean", log_target=True)
        return 4 * learnt + F.cross_entropy(output, batch[1])

    return private(perceptron(), vectors()).run(loss)


@sound("A variational autoencoder whose second term grows from step to step.", releases=24)
def variational_autoencoder(_: Path) -> lmdp.PrivacyEngine:
    steps: list[None] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        steps.append(None)
        output, mean, spread = model(batch[0])
        divergence = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
        return (output - batch[0]).square().sum(1).mean() + min(1, len(steps) / 30) * divergence

    return private(nets.Autoencoder(chance=True), vectors()).run(loss, passes=3 * PASSES)


@sound("An autoencoder.")
def autoencoder(_: Path) -> lmdp.PrivacyEngine:
    training = private(nets.Autoencoder(chance=False), vectors(), allow_unused=True)
    return training.run(lambda model, batch: F.mse_loss(model(batch[0])[0], batch[0]))


@sound("A denoising loss: noise is drawn for every example and told by the model.")
def denoising(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with training.engine.still():
            noise = torch.randn_like(batch[0])
            share = torch.rand(len(noise), 1)
        return F.mse_loss(model(batch[0] * (1 - share) + noise * share), noise)

    training = private(perceptron(outputs=FEATURES), vectors())
    return training.run(loss)


@sound("CTC divides each example's loss by its own length, and averages over examples.")
def ctc(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, _, y = batch
        spread = model(tokens).log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(tokens),), tokens.shape[1])
        return F.ctc_loss(spread, y[:, None].clamp(min=1), lengths, torch.ones_like(lengths))

    return private(Tagger(), texts()).run(loss)


@sound("A loss that is a module around the model, and averages over examples.")
def loss_around_the_model(_: Path) -> lmdp.PrivacyEngine:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptron()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y)

    return private(Around(), vectors()).run(lambda model, batch: model(*batch))


@sound("Ranking within an example: its true class against each other one.")
def ranking_within_an_example(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        right = output.gather(1, batch[1][:, None])
        return F.relu(1 - right + output).sum(1).mean()

    return private(perceptron(), vectors()).run(loss)


@sound("A variational autoencoder: the sample is drawn in the model, in evaluation too.")
def variational(_: Path) -> lmdp.PrivacyEngine:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tell, self.draw = nn.Linear(FEATURES, 2 * WIDTH), nn.Linear(WIDTH, FEATURES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, spread = self.tell(x).chunk(2, dim=1)
            return self.draw(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread

    def loss(model: nn.Module, batch: Any) -> Tensor:
        again, mean, spread = model(batch[0])
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        return F.mse_loss(again, batch[0]) + apart.mean()

    return private(Coder(), vectors()).run(loss)


@sound("Losses take turns; each is held still while it is looked at.", releases=1)
def losses_take_turns(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    kinds: list[Loss] = [F.cross_entropy, lambda o, y: F.mse_loss(o, one_hot(y))]
    calls = 0

    def in_turn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return kinds[calls % 2](model(batch[0]), batch[1])

    training.run(in_turn)
    for kind in kinds:
        with training.engine.looking():
            training.run(lambda model, batch, kind=kind: kind(model(batch[0]), batch[1]))
    return training.engine
