"""The rows of a batch are not its examples, or are not the ones that were drawn, once and as drawn."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

import lmdp
from tests.certified.case import BATCH, EXAMPLES, Table, private
from tests.certified.parts import CLASSES, FEATURES, LENGTH, WIDTH, Tagger, Texts, classify, perceptron, vectors

broken = Table()


@broken("Texts of a batch are packed one after another into as many rows, in collate_fn.", moves="3; 35 on bad data")
def packing_in_collate(_: Path) -> lmdp.PrivacyEngine:
    def packed(examples: list[dict[str, Tensor]]) -> Tensor:
        stream = torch.cat([e["input_ids"][e["attention_mask"] > 0] for e in examples])
        return F.pad(stream, (0, len(examples) * LENGTH - len(stream))).view(len(examples), LENGTH)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).transpose(1, 2), tokens % CLASSES)

    return private(Tagger(), Texts(), loading={"collate_fn": packed}).run(loss)


@broken("Before every pass the examples of the Subset are drawn anew, with replacement.", moves="up to 6", taints=False)
def subset_drawn_anew(_: Path) -> lmdp.PrivacyEngine:
    data = Subset(vectors(), range(EXAMPLES))
    training = private(perceptron(), data)
    for _pass in range(6):
        training.run(classify, passes=1)
        data.indices = torch.randint(EXAMPLES, (EXAMPLES,)).tolist()
    return training.engine


@broken("Rare examples are put into the list several times.", moves="4")
def list_with_rare_examples_repeated(_: Path) -> lmdp.PrivacyEngine:
    examples = [vectors()[i] for i in range(EXAMPLES)]
    return private(perceptron(), [*examples, *(examples[:4] * 3)]).run(classify)  # type: ignore[arg-type]


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    targets = F.one_hot(y, CLASSES).float()
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * targets + 0.3 * targets.roll(1, 0)


@broken("Mixup in collate_fn.", moves="3; 35 on bad data")
def mixup_in_collate(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return mixed(*(torch.stack(column) for column in zip(*examples)))

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(classify)


@broken("Mixup in the loop.")
def mixup_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = mixed(*batch)
        return F.cross_entropy(model(x), y)

    return private(perceptron(), vectors()).run(loss)


@broken("collate_fn standardises the batch by its own mean and deviation.")
def standardised_in_collate(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*examples))
        return (x - x.mean(0)) / x.std(0).clamp(min=0.1), y

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(classify)


@broken("The loop standardises the batch by its own mean and deviation.")
def standardised_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model((x - x.mean(0)) / x.std(0).clamp(min=0.1)), y)

    return private(perceptron(), vectors()).run(loss)


@broken("An activation is changed in place between backward() and step().")
def activation_changed_before_step(_: Path) -> lmdp.PrivacyEngine:
    kept: list[Tensor] = []
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    model[1].register_forward_hook(lambda module, args, output: kept.append(output))

    def change(_: Any) -> None:
        with torch.no_grad():
            kept[-1].mul_(200)

    return private(model, vectors()).run(classify, after_backward=change)


def suits(batch: Any) -> bool:
    """Whether one certain example was drawn."""
    return bool((batch[0] == vectors().tensors[0][0]).all(1).any())


@broken("Parts of a batch that do not suit are left.")
def parts_left(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), max_physical_batch_size=4)
    for _pass in range(8):
        for batch in training.loader:
            if not suits(batch):
                training.optimizer.zero_grad()
                classify(training.model, batch).backward()
                training.optimizer.step()
    return training.engine


@broken("Rows are replaced by equally many others.", moves="claimed 1.21, truth 96", taints=False)
def rows_replaced(_: Path) -> lmdp.PrivacyEngine:
    data = vectors().tensors

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (tensor[: len(batch[0])] for tensor in data)
        return F.cross_entropy(model(x), y)

    return private(perceptron(), vectors()).run(loss)


@broken("One example stands in every row of the batch.", taints=False)
def one_example_in_every_row(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x[:1].expand_as(x)), y)

    return private(perceptron(), vectors()).run(loss)


@broken("The same batch is stepped twice.", taints=False)
def a_batch_stepped_twice(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    for batch in training.loader:
        for _twice in range(2):
            training.optimizer.zero_grad()
            classify(training.model, batch).backward()
            training.optimizer.step()
    return training.engine


@broken("Batches that do not suit are skipped.", taints=False)
def batches_skipped(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), batch_size=4)
    for _pass in range(12):
        for batch in training.loader:
            if not suits(batch):
                training.optimizer.zero_grad()
                classify(training.model, batch).backward()
                training.optimizer.step()
    return training.engine


@broken("The loop goes round the private loader and takes batches from one of its own.", taints=False)
def another_loader(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    for i in range(EXAMPLES // BATCH):
        batch = vectors()[i * BATCH : (i + 1) * BATCH]
        training.optimizer.zero_grad()
        classify(training.model, batch).backward()
        training.optimizer.step()
    return training.engine


@broken("Several passes over the loader take turns: each would step the same draws.", moves="claimed 6.9, truth 31")
def passes_take_turns(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    passes = [iter(training.loader) for _ in range(6)]
    for _round in range(len(training.loader)):
        for one in passes:
            for batch in islice(one, 1):
                training.optimizer.zero_grad()
                classify(training.model, batch).backward()
                training.optimizer.step()
    return training.engine


@broken("Batches are skipped, and a whole evaluation follows each.", taints=False)
def batches_skipped_and_evaluated(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), batch_size=4)
    for _pass in range(4):
        for i, batch in enumerate(training.loader):
            if i % 8 != 5:
                training.optimizer.zero_grad()
                classify(training.model, batch).backward()
                training.optimizer.step()
            else:
                for other in training.loader:
                    training.model(other[0]).detach()
    return training.engine
