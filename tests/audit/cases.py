"""Trainings whose guarantee is broken, each in its own way, and sound ones that look like them: for `lmdp.check`.

A case is (train, dataset). Looks of the engine are switched off: here the check has to find things by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

COMMON, WIDTH, CLASSES, TOKENS, LENGTH = 12, 6, 3, 11, 5
Case = tuple[Callable[..., Any], Any]
CASES: dict[str, Case] = {}
SOUND: dict[str, Case] = {}


def vectors(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, WIDTH, generator=generator) + 0.3 * torch.randn(COMMON, WIDTH, generator=generator)
    return TensorDataset(x.to(dtype), torch.arange(COMMON) % CLASSES)


def sentences(padded: bool = True) -> list[dict[str, Any]]:
    """Tokens, mask and labels; −100 where there is padding. Or lists of their own length, for a collate function."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for i in range(COMMON):
        ids = torch.randint(1, TOKENS, (LENGTH,), generator=generator)
        count = 2 + i % (LENGTH - 1)
        here = torch.arange(LENGTH) < count
        labels = (ids % CLASSES).masked_fill(~here, -100)
        if padded:
            examples.append({"input_ids": ids * here, "attention_mask": here.long(), "labels": labels})
        else:
            examples.append({"input_ids": ids[:count].tolist(), "labels": labels[:count].tolist()})
    return examples


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def broken(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make()
    return make


def sound(make: Callable[[], Case]) -> Callable[[], Case]:
    SOUND[make.__name__] = make()
    return make


class Parts:
    """What a step of a loop may look at."""

    def __init__(self, engine: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        self.engine, self.model, self.optimizer, self.loader = engine, model, optimizer, loader


def training(
    make: Callable[[], nn.Module] = mlp,
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    *,
    before: Callable[[Parts, Any], Any] = lambda parts, batch: None,
    between: Callable[[Parts, Any], Any] = lambda parts, batch: None,
    after: Callable[[Parts, Any], Any] = lambda parts, batch: None,
    start: Callable[[nn.Module], Any] = lambda model: None,
    collate: Callable[..., Any] = default_collate,
    passes: int = 1,
    **options: Any,
) -> Callable[..., Any]:
    """An ordinary loop, with something done before, between and after backward and step. `before` may give a batch."""

    def train(engine: Any, dataset: Any) -> Any:
        model = make()
        start(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        three = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(trained, lr=0.5),
            data_loader=DataLoader(dataset, batch_size=6, collate_fn=collate),
            **({"noise_multiplier": 1.0, "max_grad_norm": 1.0, "method": "dpsgd", "check_mixing": False} | options),
        )
        parts = Parts(engine, *three)
        for _ in range(passes):
            for batch in parts.loader:
                parts.optimizer.zero_grad()
                first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
                if len(first):
                    changed = before(parts, batch)
                    batch = batch if changed is None else changed
                    loss(parts.model, batch).backward()
                    between(parts, batch)
                parts.optimizer.step()
                after(parts, batch)
        return model

    return train


# -- examples meet ----------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Tokens → classes, with its loss inside, as transformers have it: a mean over the labels that count."""

    def __init__(self, *, each: bool = False, sort: bool = False) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.each, self.sort = each, sort

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        if self.sort:
            order = attention_mask.sum(1).argsort(stable=True)
            h = torch.tanh(self.inner(h[order]))[order.argsort()]
        else:
            h = torch.tanh(self.inner(h))
        logits = self.head(h)
        if self.each:
            lengths = (labels != -100).sum(1).clamp(min=1)
            loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1) / lengths
            return {"loss": loss.mean(), "logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def its_own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch)["loss"]  # type: ignore[no-any-return]


@broken
def a_loss_inside_the_model_that_divides_by_the_labels_of_all() -> Case:
    return training(Tagger, its_own_loss), sentences()


@broken
def rows_sorted_by_length_inside_the_model() -> Case:
    return training(lambda: Tagger(each=True, sort=True), its_own_loss, max_grad_norm=0.1), sentences()


@sound
def a_loss_inside_the_model_with_a_mean_of_each_example() -> Case:
    return training(lambda: Tagger(each=True), its_own_loss), sentences()


class Ranking(nn.Module):
    """A loss module around the model: every other example of the batch is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a = F.normalize(self.model(x), dim=1)
        b = F.normalize(self.model(x + 0.1), dim=1)
        return F.cross_entropy(20 * a @ b.T, torch.arange(len(x)))


@broken
def a_loss_module_around_the_model_with_negatives_from_the_batch() -> Case:
    return training(Ranking, lambda model, batch: model(*batch)), vectors()


@broken
def two_towers_that_return_their_similarities() -> Case:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) @ self.b(x).T  # type: ignore[no-any-return]

    return training(Towers, lambda model, batch: (s := model(batch[0])).logsumexp(1).sub(s.diag()).mean()), vectors()


@broken
def a_masked_mean_in_bfloat16() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            kept = (batch[1] != 0).to(losses.dtype)
            return (losses * kept).sum() / kept.sum().clamp(min=1)

    return training(loss=loss, max_grad_norm=10.0), vectors()


@broken
def labels_of_others_in_a_broadcast() -> Case:
    return training(loss=lambda model, batch: (model(batch[0])[:, :1] - batch[1]).square().mean(1).mean()), vectors()


@broken
def a_custom_backward_that_normalises_over_the_batch() -> Case:
    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / grad.norm().clamp(min=1e-12)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(Normalised.apply(model(batch[0])), batch[1])  # type: ignore[no-untyped-call]

    return training(loss=loss), vectors()


@broken
def a_backward_hook_that_centres_over_the_batch() -> Case:
    def start(model: nn.Module) -> None:
        model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] - grads[0].mean(0),))  # type: ignore[index]

    return training(start=start), vectors()


@broken
def mixup_in_the_collate_function() -> Case:
    def collate(examples: list[Any]) -> Any:
        x, y = default_collate(examples)
        return [0.7 * x + 0.3 * x.roll(1, 0), y]

    return training(collate=collate), vectors()


@broken
def examples_packed_in_the_collate_function() -> Case:
    """As many rows as examples, filled one after the other."""

    def collate(examples: list[Any]) -> Any:
        words = [w for example in examples for w in example["input_ids"]]
        words = (words + [0] * LENGTH * len(examples))[: LENGTH * len(examples)]
        ids = torch.tensor(words).view(len(examples), LENGTH)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids % CLASSES}

    return training(lambda: Tagger(each=True), its_own_loss, collate=collate), sentences(padded=False)


@sound
def examples_padded_in_the_collate_function() -> Case:
    def collate(examples: list[Any]) -> Any:
        def column(key: str, fill: int) -> Tensor:
            rows = [(example[key] + [fill] * LENGTH)[:LENGTH] for example in examples]
            return torch.tensor(rows)

        ids = column("input_ids", 0)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": column("labels", -100)}

    return training(lambda: Tagger(each=True), its_own_loss, collate=collate), sentences(padded=False)


# -- the batch, and who is drawn --------------------------------------------------------------------------------------


@sound
def the_batch_is_changed_between_backward_and_step() -> Case:
    """The engine keeps a copy of what it was shown."""
    return training(between=lambda parts, batch: batch[0].mul_(batch[0].abs().max())), vectors()


@broken
def batches_are_redrawn_until_they_suit() -> Case:
    def before(parts: Parts, batch: Any) -> Any:
        while not batch[0].abs().max() < 50:
            batch = next(iter(parts.loader))
        return batch

    return training(before=before), vectors()


@broken
def rows_are_replaced_by_the_hardest_of_the_dataset() -> Case:
    def before(parts: Parts, batch: Any) -> Any:
        x, y = parts.loader.dataset.tensors
        with torch.no_grad():
            losses = F.cross_entropy(parts.model(x), y, reduction="none").nan_to_num()
        hardest = losses.topk(len(batch[0])).indices
        return [x[hardest], y[hardest]]

    return training(before=before), vectors()


@broken
def a_batch_is_left_after_its_first_part() -> Case:
    def train(engine: Any, dataset: Any) -> Any:
        model = mlp()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(dataset, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=3,
            check_mixing=False,
        )
        for _ in range(4):
            x, y = next(iter(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model

    return train, vectors()


# -- un-noised content ------------------------------------------------------------------------------------------------


@broken
def a_layer_unfrozen_later_under_a_second_optimizer() -> Case:
    def after(parts: Parts, batch: Any) -> None:
        if len(batch[0]):
            layer: Any = parts.model[0]  # type: ignore[index]
            layer.requires_grad_(True)
            loss = F.cross_entropy(parts.model(batch[0]), batch[1])
            grads = torch.autograd.grad(loss, [layer.weight])
            with torch.no_grad():
                layer.weight.sub_(0.1 * grads[0].nan_to_num())
            layer.requires_grad_(False)

    return training(start=lambda model: model[0].requires_grad_(False), after=after), vectors()  # type: ignore[index]


@broken
def an_adapter_added_later() -> Case:
    def after(parts: Parts, batch: Any) -> None:
        if not hasattr(parts.model, "adapter"):
            parts.model.adapter = nn.Linear(WIDTH, 1, bias=False)  # type: ignore[assignment]
        with torch.no_grad():
            parts.model.adapter.weight.copy_(batch[0][:1])  # type: ignore[union-attr, operator]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    return training(Named, after=lambda parts, batch: after(parts, batch) if len(batch[0]) else None), vectors()


@broken
def an_initialisation_from_the_first_batch() -> Case:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.head, self.ready = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready and len(x):
                self.ready, self.shift.bias.data = True, -x.mean(0)
            return self.head(self.shift(x))  # type: ignore[no-any-return]

    return training(ActNorm), vectors()


class Remembering(nn.Module):
    """Keeps rows of the batch: as a buffer, saved or not, or as extra state."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = mlp(), how
        self.rows = torch.zeros(1, WIDTH)
        if how != "extra":
            rows = self.__dict__.pop("rows")
            self.register_buffer("rows", rows, persistent=how == "saved")

    def forward(self, x: Tensor) -> Tensor:
        if len(x):
            self.rows = x[-1:].detach().clone()
        return self.body(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"rows": self.rows.tolist(), "kind": object} if self.how == "extra" else {}

    def set_extra_state(self, state: Any) -> None: ...


for kind in ("saved", "unsaved", "extra"):
    CASES[f"rows_of_the_batch_as_{kind}_state"] = (
        training(lambda kind=kind: Remembering(kind)),  # type: ignore[misc]
        vectors(),
    )


@broken
def a_buffer_restored_before_the_end() -> Case:
    def train(engine: Any, dataset: Any) -> Any:
        model = training(lambda: Remembering("saved"))(engine, dataset)
        model.rows.zero_()
        return None

    return train, vectors()


@broken
def weights_trained_elsewhere_and_loaded_back() -> Case:
    def after(parts: Parts, batch: Any) -> None:
        x, y = parts.loader.dataset.tensors
        other = mlp()
        other.load_state_dict(parts.model.state_dict())
        F.cross_entropy(other(x), y).backward()
        with torch.no_grad():
            for p in other.parameters():
                p.sub_(0.1 * p.grad.nan_to_num())  # type: ignore[union-attr]
        parts.model.load_state_dict(other.state_dict())

    return training(after=after), vectors()


@broken
def a_scheduler_fed_by_the_training_loss() -> Case:
    def after(parts: Parts, batch: Any) -> None:
        if len(batch[0]):
            with torch.no_grad():
                value = float(F.cross_entropy(parts.model(batch[0]), batch[1]))
            parts.optimizer.param_groups[0]["lr"] = 0.1 if value < 5 else 0.01

    return training(after=after), vectors()


@broken
def a_shape_that_follows_the_data() -> Case:
    def train(engine: Any, dataset: Any) -> Any:
        width = 4 + int((dataset.tensors[0].abs() > 50).any())
        return training(lambda: nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, CLASSES)))(engine, dataset)

    return train, vectors()


# -- sound trainings that look odd ------------------------------------------------------------------------------------


@sound
def an_ordinary_training() -> Case:
    return training(passes=2), vectors()


@sound
def layer_weights() -> Case:
    return training(method="lm", max_physical_batch_size=2), vectors()


@sound
def double_precision() -> Case:
    return training(lambda: mlp().double()), vectors(torch.float64)


@sound
def autocast() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch[0])
        return F.cross_entropy(output.float(), batch[1])

    return training(loss=loss), vectors()


@sound
def dropout_of_every_kind() -> Case:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
            self.drop, self.head = nn.Dropout(0.4), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(self.block(self.embed(x.unsqueeze(2))), 0.5, self.training)
            return self.head(self.drop(h.mean(1)))  # type: ignore[no-any-return]

    return training(Dropping), vectors()


@sound
def augmentation_where_examples_are_read() -> Case:
    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return COMMON

        def __getitem__(self, at: int) -> Any:
            x, y = vectors()[at]
            return x + 0.1 * torch.randn(WIDTH), y

    return training(), Augmented()


@sound
def a_schedule_by_steps() -> Case:
    def after(parts: Parts, batch: Any) -> None:
        parts.optimizer.param_groups[0]["lr"] = 0.5 / (1 + parts.engine.steps)

    return training(after=after, passes=2), vectors()


@sound
def a_progress_bar() -> Case:
    from tqdm import tqdm

    def train(engine: Any, dataset: Any) -> Any:
        with contextlib.closing(tqdm(total=3)) as bar:
            return training(after=lambda parts, batch: bar.update())(engine, dataset)

    return train, vectors()
