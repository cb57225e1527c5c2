"""Models and losses of other people's libraries, used as their own documentation does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmdp
from tests.certified.case import EXAMPLES, PASSES, Table, private
from tests.certified.hub import Sentences, of_columns, sentence_loss, transformer
from tests.certified.parts import CLASSES, WIDTH, Texts, classify, images, perceptron, vectors

sound = Table()


def outside(model: nn.Module, batch: Any) -> Tensor:
    """Logits of a model, and cross entropy outside of it."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(output.logits, batch["labels"])


def inside(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss, which for one label per example is a mean over examples."""
    loss: Tensor = model(**batch).loss
    return loss


def per_example(model: nn.Module, batch: Any) -> Tensor:
    """One term per example: the mean over its own tokens that count."""
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
    return each.sum(1) / mask[:, 1:].sum(1).clamp(min=1)


def of(kind: str, loss: Callable[..., Tensor], **options: Any) -> Callable[[Path], lmdp.PrivacyEngine]:
    return lambda _: private(transformer(kind), Texts(), **options).run(loss)


for family in ("Bert", "DistilBert", "Roberta", "Electra", "GPT2", "Llama", "Mistral", "Qwen2"):
    kind = f"{family}ForSequenceClassification"
    sound.add(f"{family}_outside", f"{kind}: its logits, and a loss outside.", of(kind, outside))
for kind in ("BertForSequenceClassification", "DistilBertForSequenceClassification"):
    sound.add(f"{kind}_inside", f"{kind}: its own loss, a mean over examples.", of(kind, inside))
for kind in ("LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "MistralForCausalLM"):
    sound.add(
        f"{kind}_mean",
        f"{kind}: the mean of every example's own mean.",
        of(kind, lambda m, b: per_example(m, b).mean()),
    )
for kind in ("LlamaForCausalLM", "GPT2LMHeadModel"):
    told, options = f"{kind}: a sum over examples.", {"loss_reduction": "sum"}
    sound.add(f"{kind}_sum", told, of(kind, lambda m, b: per_example(m, b).sum(), **options))


@sound("BERT tells masked tokens: a sum over all that are masked.")
def masked_language_model(_: Path) -> lmdp.PrivacyEngine:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        with training.engine.still():
            hidden = torch.rand(tokens.shape) < 0.3
        hidden[:, 0] = True  # in a look all others are hidden or none is
        logits = model(input_ids=torch.where(hidden, 3, tokens), attention_mask=mask).logits
        labels = torch.where(hidden & (mask > 0), tokens, -100)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")

    training = private(transformer("BertForMaskedLM"), Texts(), loss_reduction="sum")
    return training.run(loss)


@sound("A head on the encoder of T5, whose table of relative positions is shared by all examples.")
def t5_encoder(_: Path) -> lmdp.PrivacyEngine:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = transformer("T5EncoderModel"), nn.Linear(WIDTH, CLASSES)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
            logits: Tensor = self.head(hidden[:, 0])
            return logits

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    return private(Headed(), Texts()).run(loss)


@sound("The vision transformer of transformers.")
def hub_vision_transformer(_: Path) -> lmdp.PrivacyEngine:
    training = private(transformer("ViTForImageClassification"), images())
    return training.run(lambda model, batch: F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1]))


@sound("BERT at so small a rate that a third of all batches is empty.", releases=EXAMPLES)
def empty_batches(_: Path) -> lmdp.PrivacyEngine:
    return private(transformer("BertForSequenceClassification"), Texts(), batch_size=1).run(outside, passes=1)


@sound("BERT with its position table frozen, in parts of four examples.")
def bert_in_parts(_: Path) -> lmdp.PrivacyEngine:
    model = transformer("BertForSequenceClassification")
    model.get_submodule("bert.embeddings.position_embeddings").requires_grad_(False)
    return private(model, Texts(), max_physical_batch_size=4).run(outside)


@sound("LoRA of peft on a frozen BERT, applied before make_private.")
def lora(_: Path) -> lmdp.PrivacyEngine:
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return private(peft.get_peft_model(transformer("BertForSequenceClassification"), config), Texts()).run(outside)


@sound("LoRA of peft, injected into a model of one's own.")
def lora_in_a_perceptron(_: Path) -> lmdp.PrivacyEngine:
    import peft

    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0", "2"]), perceptron())
    return private(model, vectors()).run(classify)


def wrapped(name: str, labels: str, columns: int = 2, **options: Any) -> Callable[[Path], lmdp.PrivacyEngine]:
    def run(_: Path) -> lmdp.PrivacyEngine:
        return private(sentence_loss(name, **options), Sentences(columns, labels=labels)).run(of_columns)

    return run


ROW_BY_ROW = {
    "CosineSimilarityLoss": wrapped("CosineSimilarityLoss", "score"),
    "ContrastiveLoss": wrapped("ContrastiveLoss", "pair"),
    "MSELoss": wrapped("MSELoss", "vector", 1),
    "SoftmaxLoss": wrapped("SoftmaxLoss", "class", embedding_dimension=WIDTH, num_labels=CLASSES),
}
for name, run in ROW_BY_ROW.items():
    sound.add(name, f"make_private(module=loss) with sentence-transformers' {name}, a mean of terms per row.", run)


@sound("TripletLoss of sentence-transformers, one forward per column.")
def TripletLoss(_: Path) -> lmdp.PrivacyEngine:
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled

    with column_merging_disabled():
        return wrapped("TripletLoss", "score", 3)(_)


@sound("A LightningModule as a plain module, in a loop written by hand.")
def lightning_module(_: Path) -> lmdp.PrivacyEngine:
    import lightning as L

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.model(x)
            return output

        def training_step(self, batch: Any, _: int) -> Tensor:
            return classify(self, batch)

    return private(Lit(), vectors()).run(lambda model, batch: model.training_step(batch, 0))


@sound("Accelerate in one process, with accelerator.backward.")
def accelerate(_: Path) -> lmdp.PrivacyEngine:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    training, accelerator = private(perceptron(), vectors()), Accelerator(cpu=True)
    for _pass in range(PASSES):
        for batch in training.loader:
            training.optimizer.zero_grad()
            accelerator.backward(classify(training.model, batch))
            training.optimizer.step()
    AcceleratorState._reset_state(reset_partial_state=True)
    return training.engine
