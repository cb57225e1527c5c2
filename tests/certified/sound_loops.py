"""What people do around a loop: methods, optimizers, schedules, precision, data, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import lmdp
from lmdp.guards.looks import steps_among
from tests.certified import nets
from tests.certified.case import BATCH, EXAMPLES, PASSES, Outcome, Table, private
from tests.certified.parts import CLASSES, FEATURES, Tagger, Texts, classify, generator, images, perceptron, vectors
from tests.certified.ranks import ranks
from tests.tables import certified

sound = Table()


def by(method: str, source: str) -> Callable[[Path], lmdp.PrivacyEngine]:
    public = {"public_data": vectors(48, seed=2)} if source == "public" else {}
    return lambda _: private(perceptron(), vectors(), method=method, weights=source, **public).run(classify)


for method, source in certified():
    sound.add(f"method_{method}_{source}", f"Method {method} with weights={source!r}.", by(method, source))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


def stepped_by(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Path], lmdp.PrivacyEngine]:
    def run(_: Path) -> lmdp.PrivacyEngine:
        model = perceptron()
        return private(model, vectors(), optimizer=make(model.parameters())).run(classify)

    return run


for name, make in OPTIMIZERS.items():
    sound.add(name, f"The optimizer is {name}.", stepped_by(make))

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "one_cycle": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=steps),
    "cosine": lambda o, steps: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=steps),
    "warm_up": lambda o, steps: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
}


def scheduled(make: Callable[[torch.optim.Optimizer, int], Any]) -> Callable[[Path], lmdp.PrivacyEngine]:
    def run(_: Path) -> lmdp.PrivacyEngine:
        training = private(perceptron(), vectors())
        scheduler = make(training.optimizer, PASSES * len(training.loader))
        return training.run(classify, after_step=lambda loss: scheduler.step())

    return run


for name, schedule in SCHEDULES.items():
    sound.add(name, f"A {name.replace('_', '-')} schedule, stepped in every iteration.", scheduled(schedule))


@sound("Groups of parameters with rates and decays of their own.")
def groups_of_parameters(_: Path) -> lmdp.PrivacyEngine:
    model = perceptron()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    return private(model, vectors(), optimizer=torch.optim.AdamW(groups, lr=1e-3)).run(classify)


@sound("The batch is de-normalised in place between backward() and step(), for a log: the engine kept a copy.")
def changed_between_backward_and_step(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    return training.run(classify, after_backward=lambda batch: batch[0].mul_(200).add_(5))


@sound("next(iter(loader)) until a batch suits: it is always the same one, until it is stepped.", releases=10)
def asked_for_again_until_it_suits(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    for _step in range(16):
        for _try in range(40):
            batch = next(iter(training.loader))
            if float(batch[0].sum()) > 0:
                break
        training.optimizer.zero_grad()
        classify(training.model, batch).backward()
        training.optimizer.step()
    return training.engine


@sound("A pass is broken off after any part of a batch: the next one goes on with the rest of it.", releases=20)
def left_after_any_part(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), max_physical_batch_size=4)
    while training.engine.steps < 20:
        for batch in training.loader:
            training.optimizer.zero_grad()
            classify(training.model, batch).backward()
            training.optimizer.step()
            if float(batch[0].sum()) > 0 or training.engine.steps == 20:
                break
    return training.engine


@sound("A pass is broken off at a batch that was seen and not stepped: the next one begins with it.")
def broken_off_at_a_batch(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    for _pass in range(PASSES * EXAMPLES // BATCH):
        for i, batch in enumerate(training.loader):
            if i == 1:
                break
            training.optimizer.zero_grad()
            classify(training.model, batch).backward()
            training.optimizer.step()
    return training.engine


@sound("The learning rate is lowered by hand after a pass.")
def rate_changed_by_hand(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    for _pass in range(PASSES):
        training.run(classify, passes=1)
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.5
    return training.engine


@sound("Forward in bfloat16 by autocast, the loss outside.")
def autocast(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch[0])
        return F.cross_entropy(output.float(), batch[1])

    return private(perceptron(), vectors()).run(loss)


@sound("Forward in bfloat16 by autocast, and the loss of its outputs in float32.")
def autocast_with_its_loss(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    return private(nets.resnet(), images()).run(loss)


@sound("Activations are computed again in backward (checkpointing).")
def checkpointing(_: Path) -> lmdp.PrivacyEngine:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(lambda x: self.body(x).relu(), x, use_reentrant=False)
            logits: Tensor = self.head(hidden)
            return logits

    return private(Again(), vectors()).run(classify)


@sound("Batches are handed out in parts of four examples.")
def in_parts(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), vectors(), max_physical_batch_size=4).run(classify)


@sound("Noise that floating point cannot undo (secure_mode).")
def secure_mode(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), vectors(), secure_mode=True).run(classify)


@sound("The accountant is pld.")
def pld(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), vectors(), accountant="pld").run(classify)


@sound("Noise is computed from a target epsilon.")
def target_epsilon(_: Path) -> lmdp.PrivacyEngine:
    engine, model = lmdp.PrivacyEngine(), perceptron()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(vectors(), batch_size=BATCH, shuffle=True, drop_last=True),
        target_epsilon=8.0,
        target_delta=1e-4,
        epochs=PASSES,
        max_grad_norm=1.0,
    )
    for _pass in range(PASSES):
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            classify(model, batch).backward()
            optimizer.step()
    return engine


@sound("Bytes become numbers in the loop: x.float() / 255, flattened.")
def bytes_normalised_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    x = torch.randint(0, 256, (EXAMPLES, 1, 4, 4), dtype=torch.uint8, generator=generator())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model((batch[0].float() / 255 - 0.5).flatten(1)), batch[1])

    return private(perceptron(16), TensorDataset(x, vectors().tensors[1])).run(loss)


@sound("x.to(device, dtype) in the loop.")
def moved_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (tensor.to("cpu") for tensor in batch)
        return F.cross_entropy(model(x.to(torch.float32).contiguous()), y)

    return private(perceptron(), vectors()).run(loss)


@sound("Random flips and noise, drawn for every example in the loop.")
def augmented_in_the_loop(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        with training.engine.still():
            flipped = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
            noisy = flipped + 0.1 * torch.randn_like(x)
        return F.cross_entropy(model(noisy), y)

    training = private(nets.resnet(), images())
    return training.run(loss)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Every look at an example is another one."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = vectors()[index]
        return x + 0.1 * torch.randn(FEATURES), y


@sound("Random augmentation in the dataset.")
def augmented_in_the_dataset(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), Augmented()).run(classify)


@sound("Two processes read the data.", releases=steps_among(2 * EXAMPLES // BATCH))
def two_workers(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), Augmented(), loading={"num_workers": 2}).run(classify, passes=2)


@sound("Two processes train one model together, one of them reading in parts.", releases=PASSES * EXAMPLES // BATCH)
def two_ranks(tmp: Path) -> Outcome:
    parts = [None, 4]
    return ranks(lambda rank: private(perceptron(), vectors(), max_physical_batch_size=parts[rank]).run(classify), tmp)


@sound("Two processes train one model together, each with a part of the data.", releases=PASSES * EXAMPLES // BATCH)
def two_ranks_with_parts(tmp: Path) -> Outcome:
    def work(rank: int) -> lmdp.PrivacyEngine:
        return private(perceptron(), Subset(vectors(), range(rank, EXAMPLES, 2)), sharded=True).run(classify)

    return ranks(work, tmp)


@sound("Batches are dictionaries.")
def dictionaries(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        mask = batch["attention_mask"]
        logits = (model(batch["input_ids"]) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return F.cross_entropy(logits, batch["labels"])

    return private(Tagger(), Texts()).run(loss)


def mean_over_text(model: nn.Module, batch: Any) -> Tensor:
    tokens, mask, y = batch
    return F.cross_entropy((model(tokens) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True), y)


def unpadded(examples: list[dict[str, Tensor]]) -> tuple[list[Tensor], Tensor]:
    return [e["input_ids"][e["attention_mask"] > 0] for e in examples], torch.stack([e["labels"] for e in examples])


@sound("collate_fn pads every text to a length that is fixed.")
def padded_to_a_length(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        texts, y = unpadded(examples)
        tokens = torch.stack([F.pad(text, (0, 10 - len(text))) for text in texts])
        return tokens, (tokens > 0).long(), y

    return private(Tagger(), Texts(), loading={"collate_fn": collate}).run(mean_over_text)


@sound("collate_fn pads to the longest text of the batch, and padding counts nowhere.")
def padded_to_the_longest(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        texts, y = unpadded(examples)
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return tokens, (tokens > 0).long(), y

    return private(Tagger(), Texts(), loading={"collate_fn": collate}).run(mean_over_text)


@sound("A part of a dataset, shuffled.")
def part_of_a_dataset(_: Path) -> lmdp.PrivacyEngine:
    data = Subset(vectors(2 * EXAMPLES), range(EXAMPLES))
    return private(perceptron(), data, loading={"shuffle": True}).run(classify)


@sound("collate_fn changes the type of every row, and nothing else.")
def collate_of_ones_own(_: Path) -> lmdp.PrivacyEngine:
    def collate(examples: list[Any]) -> Any:
        x, y = default_collate(examples)
        return x.double().float(), y

    return private(perceptron(), vectors(), loading={"collate_fn": collate}).run(classify)


@sound("The model is evaluated on validation data between passes, under no_grad.")
def evaluated_between_passes(_: Path) -> lmdp.PrivacyEngine:
    training = private(nn.Sequential(nn.Dropout(0.1), *perceptron().children()), vectors())
    for _pass in range(PASSES):
        training.run(classify, passes=1)
        training.model.eval()
        with torch.no_grad():
            for batch in DataLoader(vectors(48, seed=2), batch_size=20):
                classify(training.model, batch)
        training.model.train()
    return training.engine


@sound("An average of the weights is kept beside the model.")
def average_of_the_weights(_: Path) -> lmdp.PrivacyEngine:
    model = perceptron()
    average = copy.deepcopy(model).requires_grad_(False)

    def follow(_: Tensor) -> None:
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters()):
                mean.lerp_(p, 0.1)

    return private(model, vectors()).run(classify, after_step=follow)


@sound("The loss is logged, and weights are saved after every pass.")
def logged_and_saved(tmp: Path) -> lmdp.PrivacyEngine:
    training, losses = private(perceptron(), vectors()), []
    for i in range(PASSES):
        training.run(classify, passes=1, after_step=lambda loss: losses.append(loss.item()))
        torch.save(training.model.state_dict(), tmp / f"{i}.pt")
    return training.engine


@sound("clip_grad_norm_ is called before the step, as trainers do.")
def gradients_clipped_by_habit(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())

    def clip(_: Any) -> None:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)

    return training.run(classify, after_backward=clip)


@sound("A training is stopped and resumed from what was saved.", releases=2 * steps_among(2 * EXAMPLES // BATCH))
def resumed(tmp: Path) -> lmdp.PrivacyEngine:
    first = private(perceptron(), vectors())
    first.run(classify, passes=2)
    saved = {"model": first.model.state_dict(), "engine": first.engine.state_dict()}
    torch.save({**saved, "optimizer": first.optimizer.state_dict()}, tmp / "saved.pt")
    state, model = torch.load(tmp / "saved.pt"), perceptron()
    model.load_state_dict(state["model"])
    second = private(model, vectors())
    second.optimizer.load_state_dict(state["optimizer"])
    second.engine.load_state_dict(state["engine"])
    return second.run(classify, passes=2)
