"""Examples meet in the model, and a look at made-up inputs does not see it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lmdp
from tests.certified.case import BATCH, EXAMPLES, Table, private
from tests.certified.hub import clip
from tests.certified.parts import CLASSES, FEATURES, LENGTH, WIDTH, Tagger, classify, images, pairs, texts, vectors

broken = Table()


def centred(features: Tensor) -> Tensor:
    """Every example minus the mean of its batch."""
    return features - features.mean(0)


class Base(nn.Module):
    def __init__(self, inputs: int = FEATURES) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, CLASSES)

    def mix(self, hidden: Tensor) -> Tensor:
        return centred(hidden)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self.first(x).tanh()))
        return logits


@broken("A model subtracts the mean of the batch.")
def batch_statistic(_: Any) -> lmdp.PrivacyEngine:
    return private(Base(), vectors()).run(classify)


@broken("An activation kept on self makes a copy of the model fail, and the look at it is left out.", moves="38")
def activation_kept_on_self(_: Any) -> lmdp.PrivacyEngine:
    class Keeping(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.first(x).tanh()
            logits: Tensor = self.head(centred(self.last))
            return logits

    model = Keeping()
    model(torch.zeros(2, FEATURES))  # a first forward, as for a summary of the model
    return private(model, vectors()).run(classify)


class MixingInTraining(Base):
    def mix(self, hidden: Tensor) -> Tensor:
        return centred(hidden) if self.training else hidden


@broken("One evaluation pass without no_grad, in which nothing mixes, uses the look at the model up.", moves="5.9")
def evaluation_without_no_grad_first(_: Any) -> lmdp.PrivacyEngine:
    training = private(MixingInTraining(), vectors())
    training.model.eval()
    for x, _y in [vectors()[:BATCH]] * 3:
        training.model(x)
    training.model.train()
    return training.run(classify)


@broken("The model mixes only after its first steps.")
def mixing_begins_later(_: Any) -> lmdp.PrivacyEngine:
    class Late(Base):
        calls = 0

        def mix(self, hidden: Tensor) -> Tensor:
            self.calls += torch.is_grad_enabled()
            return centred(hidden) if self.calls > 4 else hidden

    return private(Late(), vectors()).run(classify)


@broken("Examples meet through the second input only, and only the first is varied.", moves="4.2")
def only_the_second_input_matters(_: Any) -> lmdp.PrivacyEngine:
    class TwoInputs(Base):
        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            logits: Tensor = self.head(self.first(x).tanh() - context.mean(0).norm())
            return logits

    return private(TwoInputs(), pairs()).run(lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]))


@broken("The model rejects made-up inputs, because a column is the sum of the others.", moves="5.9")
def made_up_inputs_are_rejected(_: Any) -> lmdp.PrivacyEngine:
    class Checking(Base):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.allclose(x[:, 0], x[:, 1:].sum(1), atol=1e-4):
                raise ValueError("the checksum of a record is wrong")
            return super().forward(x)

    x, y = vectors().tensors
    data = TensorDataset(torch.cat([x[:, 1:].sum(1, keepdim=True), x[:, 1:]], dim=1), y)
    return private(Checking(), data).run(classify)


def contrast(similarity: Tensor) -> Tensor:
    ours = torch.arange(len(similarity))
    return (F.cross_entropy(similarity, ours) + F.cross_entropy(similarity.T, ours)) / 2


@broken("Two towers return their [B, B] matrix of similarities.")
def two_towers(_: Any) -> lmdp.PrivacyEngine:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return F.normalize(self.left(a), dim=1) @ F.normalize(self.right(b), dim=1).T

    return private(Towers(), pairs()).run(lambda model, batch: contrast(model(*batch[:2])))


def _pictures_and_texts() -> TensorDataset:
    tokens, mask, _ = texts().tensors
    return TensorDataset(tokens.clamp(min=3), mask, images().tensors[0])


def _clip_output(model: nn.Module, batch: Any, **options: Any) -> Any:
    tokens, mask, pictures = batch
    return model(input_ids=tokens, attention_mask=mask, pixel_values=pictures, **options)


@broken("CLIP returns a [B, B] matrix of similarities, and the loss contrasts its rows.")
def clip_matrix(_: Any) -> lmdp.PrivacyEngine:
    training = private(clip(), _pictures_and_texts())
    return training.run(lambda model, batch: contrast(_clip_output(model, batch).logits_per_image))


@broken("CLIP computes its contrastive loss inside the model.")
def clip_own_loss(_: Any) -> lmdp.PrivacyEngine:
    training = private(clip(), _pictures_and_texts())
    return training.run(lambda model, batch: _clip_output(model, batch, return_loss=True).loss)


def _mixed(grad: Tensor) -> Tensor:
    return grad - grad.mean(0) + grad.norm()


@broken("A backward hook of a module mixes the gradients of the batch.", moves="49-93 on bad data")
def module_backward_hook(_: Any) -> lmdp.PrivacyEngine:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (_mixed(outputs[0]),))
    return private(model, vectors()).run(classify)


@broken("A backward pre-hook of a module mixes the gradients of the batch.", moves="49-93 on bad data")
def module_backward_pre_hook(_: Any) -> lmdp.PrivacyEngine:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    model[1].register_full_backward_pre_hook(lambda module, outputs: (_mixed(outputs[0]),))
    return private(model, vectors()).run(classify)


@broken("A hook on an activation mixes the gradients of the batch.", moves="49-93 on bad data")
def tensor_hook(_: Any) -> lmdp.PrivacyEngine:
    class Hooked(Base):
        def mix(self, hidden: Tensor) -> Tensor:
            if hidden.requires_grad:
                hidden.register_hook(_mixed)
            return hidden

    return private(Hooked(), vectors()).run(classify)


@broken("A hook on the model's output, set in the loop, mixes the gradients of the batch.")
def hook_on_the_output(_: Any) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        output.register_hook(_mixed)
        return F.cross_entropy(output, batch[1])

    return private(nn.Sequential(nn.Linear(FEATURES, CLASSES)), vectors()).run(loss)


class MixingBackward(torch.autograd.Function):
    """The same forward; gradients of the batch meet backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _mixed(grad)


@broken("A function with a backward of its own mixes the gradients of the batch.", moves="49-93 on bad data")
def custom_backward(_: Any) -> lmdp.PrivacyEngine:
    class Custom(Base):
        def mix(self, hidden: Tensor) -> Tensor:
            mixed: Tensor = MixingBackward.apply(hidden)
            return mixed

    return private(Custom(), vectors()).run(classify)


class Sorting(Tagger):
    """Sorts the rows by length, as for packed sequences, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        order = (tokens > 0).sum(1).argsort(descending=True)
        hidden = self.middle(hidden[order]).tanh()
        logits: Tensor = self.head(hidden[order.argsort()])
        return logits


@broken("Rows are sorted by length inside the model, and put back.", moves="2.3; 446 on bad data")
def rows_sorted_in_the_model(_: Any) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[0] % CLASSES)

    return private(Sorting(), texts()).run(loss)


@broken("Attention runs across the batch instead of the tokens.")
def attention_across_the_batch(_: Any) -> lmdp.PrivacyEngine:
    class Across(Base):
        def mix(self, hidden: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None])[0]

    return private(Across(), vectors()).run(classify)


assert EXAMPLES % BATCH == 0
assert LENGTH != BATCH
