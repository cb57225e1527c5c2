"""Examples meet in the loss: inside the model, in a module around it, in the loop, or in what the loss divides by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from tests.certified.case import Table, private
from tests.certified.hub import Sentences, of_columns, positions, sentence_loss, transformer
from tests.certified.parts import CLASSES, FEATURES, Tagger, Texts, per_token, perceptron, texts, vectors

broken = Table()


def with_its_loss(kind: str) -> Callable[[Path], lmdp.PrivacyEngine]:
    """A model of transformers that is given labels, with -100 on padding, and returns its mean over what is left."""

    def run(_: Path) -> lmdp.PrivacyEngine:
        classes = CLASSES if "Classification" in kind else None

        def loss(model: nn.Module, batch: Any) -> Tensor:
            tokens, mask = batch["input_ids"], batch["attention_mask"]
            labels = torch.where(mask > 0, tokens % classes if classes else tokens, -100)
            told = {"attention_mask": mask, "position_ids": positions(tokens)}
            value: Tensor = model(input_ids=tokens, labels=labels, **told).loss
            return value

        return private(transformer(kind), Texts()).run(loss)

    return run


for kind, factor in {
    "LlamaForCausalLM": "4.7-6.8; 54 on bad data",
    "GPT2LMHeadModel": "4.7-6.8; 54 on bad data",
    "BertForMaskedLM": "4.7-6.8; 54 on bad data",
    "BertForTokenClassification": "4.7-6.8; 54 on bad data",
}.items():
    told = f"{kind} computes its loss itself, a mean over the labels of the batch that are not -100."
    broken.add(f"own_loss_of_{kind}", told, with_its_loss(kind), moves=factor)


def wrapped(name: str, labels: str, reduction: str = "mean", **options: Any) -> Callable[[Path], lmdp.PrivacyEngine]:
    def run(_: Path) -> lmdp.PrivacyEngine:
        training = private(
            sentence_loss(name, expand=True, **options), Sentences(labels=labels), loss_reduction=reduction
        )
        return training.run(of_columns)

    return run


WRAPPED = {
    "MultipleNegativesRankingLoss": wrapped("MultipleNegativesRankingLoss", "score"),
    "CoSENTLoss": wrapped("CoSENTLoss", "score", "sum"),
    "AnglELoss": wrapped("AnglELoss", "score", "sum"),
    "MegaBatchMarginLoss": wrapped("MegaBatchMarginLoss", "score", use_mini_batched_version=False),
    "OnlineContrastiveLoss": wrapped("OnlineContrastiveLoss", "pair", "sum"),
}
for name, run in WRAPPED.items():
    factor = "31" if name == "MultipleNegativesRankingLoss" else ""
    broken.add(
        f"wrapped_in_{name}", f"make_private(module=loss) with sentence-transformers' {name}.", run, moves=factor
    )


@broken("MegaBatchMarginLoss computes embeddings in small parts and goes backward itself, as it does by default.")
def wrapped_in_MegaBatchMarginLoss_by_parts(_: Path) -> lmdp.PrivacyEngine:
    training = private(sentence_loss("MegaBatchMarginLoss", expand=True, mini_batch_size=4), Sentences())
    return training.run(of_columns)


@broken("The same ranking loss, written by hand inside a module.")
def in_batch_negatives_inside_a_module(_: Path) -> lmdp.PrivacyEngine:
    class Ranking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            unit = F.normalize(self.model(x), dim=1)
            return F.cross_entropy(20 * unit @ unit.T, torch.arange(len(x)))

    return private(Ranking(), vectors()).run(lambda model, batch: model(batch[0]))


@broken("A contrastive loss outside the model.")
def contrastive_loss(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        unit = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(20 * unit @ unit.T, torch.arange(len(unit)))

    return private(perceptron(), vectors()).run(loss)


@broken("A contrastive loss with check_mixing=False, of which the statement says nothing.")
def check_mixing_off(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.cross_entropy(output - output.mean(0), batch[1])

    return private(perceptron(), vectors(), check_mixing=False).run(loss)


@broken(
    "The loss divides by one of two numbers, as the batch decides: taken for two losses in turn.",
    moves="54 on bad data",
)
def two_divisors(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum") / (10.0 if int(y.sum()) % 2 else 1.0)

    return private(perceptron(), vectors(), loss_reduction="sum").run(loss, passes=4)


@broken("A masked mean outside the model divides by the tokens that the batch has.")
def masked_mean(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, mask, _ = batch
        return (per_token(model, tokens) * mask).sum() / mask.sum()

    return private(Tagger(), texts()).run(loss)


@broken("A masked mean in bfloat16, whose quotients are too coarse to be judged.", moves="25")
def masked_mean_in_bfloat16(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, mask, _ = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(tokens)
            off = (output - F.one_hot(tokens % CLASSES, CLASSES).to(output)).abs().sum(2)
            return (off * mask).sum() / mask.sum()

    return private(Tagger(), texts()).run(loss)


@broken("Class weights are computed from the labels of the batch.")
def weights_of_the_batchs_classes(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weights = len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES).clamp(min=1))
        return (F.cross_entropy(model(x), y, reduction="none") * weights[y]).mean()

    return private(perceptron(), vectors()).run(loss)


@broken("Cross entropy with class weights is a mean that divides by the weights of the batch.")
def weighted_mean(_: Path) -> lmdp.PrivacyEngine:
    weights = torch.tensor([1.0, 2.0, 5.0])
    training = private(perceptron(), vectors())
    return training.run(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weights))


@broken("The model is called on nothing after the real call, and the loss is contrastive.")
def called_on_nothing_last(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = F.normalize(model(batch[0]), dim=1)
        model(batch[0][:0])
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    return private(perceptron(), vectors()).run(loss)


@broken("Only the hardest quarter of the batch is trained on.")
def hardest_examples(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.topk(max(1, len(each) // 4)).values.sum()

    return private(perceptron(), vectors(), loss_reduction="sum").run(loss, passes=24)


@broken("A regression target is standardised by the batch.")
def standardised_target(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        target = batch[0].sum(1)
        return F.mse_loss(model(batch[0]).squeeze(1), (target - target.mean()) / (target.std(correction=0) + 0.1))

    return private(perceptron(outputs=1), vectors()).run(loss)


@broken("A small auxiliary term pushes the mean of the batch back to zero: `lm` raises its layer.", moves="49 of lm")
def mean_of_the_batch_in_a_small_term(_: Path) -> lmdp.PrivacyEngine:
    torch.manual_seed(0)
    net = TwoHeads()
    data = vectors()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out, score = model(x)
        return F.cross_entropy(out, y) + 1e-3 * (score * (30 * score.detach().mean()).tanh()).mean()

    return private(net, data, method="lm").run(loss)


class TwoHeads(nn.Module):
    """Scores of classes, and one more that is held near zero on average."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.score = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)
        nn.init.zeros_(self.score.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))  # odd, so that the mean is near zero
        return self.head(hidden), self.score(hidden.detach()).squeeze(1)
