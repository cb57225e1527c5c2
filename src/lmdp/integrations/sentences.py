"""`DPSentenceTransformerTrainer`: the trainer of sentence-transformers, private."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn

from lmdp.integrations.training import PrivateTraining

try:
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled as column_by_column
except ImportError:  # a version that puts no columns into one forward pass

    def column_by_column() -> AbstractContextManager[None]:
        return nullcontext()


LOSS = "privacy_loss.safetensors"
SCORED, PAIRED = "CosineSimilarityLoss", "ContrastiveLoss"
NEGATIVES = (
    "TripletLoss, with a column of negatives; MarginMSELoss, with a teacher's margins; or ContrastiveLoss on pairs"
)
INSTEAD = {
    "AnglELoss": SCORED,
    "CoSENTLoss": SCORED,
    "BatchAllTripletLoss": "TripletLoss",
    "BatchHardSoftMarginTripletLoss": "TripletLoss",
    "BatchHardTripletLoss": "TripletLoss",
    "BatchSemiHardTripletLoss": "TripletLoss",
    "CachedGISTEmbedLoss": NEGATIVES,
    "CachedMultipleNegativesRankingLoss": NEGATIVES,
    "CachedMultipleNegativesSymmetricRankingLoss": NEGATIVES,
    "ContrastiveTensionLoss": PAIRED,
    "ContrastiveTensionLossInBatchNegatives": PAIRED,
    "GISTEmbedLoss": NEGATIVES,
    "GlobalOrthogonalRegularizationLoss": "MSELoss, to a teacher's embeddings",
    "MegaBatchMarginLoss": NEGATIVES,
    "MultipleNegativesRankingLoss": NEGATIVES,
    "MultipleNegativesSymmetricRankingLoss": NEGATIVES,
    "OnlineContrastiveLoss": PAIRED,
}
"""Losses in which the examples of a batch meet → one that is a mean of terms of one example each."""
REMEMBERING = ("MatryoshkaLoss", "AdaptiveLayerLoss")
"""Losses around another one that use embeddings of one call of the model in the next."""


class DPSentenceTransformerTrainer(PrivateTraining, SentenceTransformerTrainer):  # type: ignore[misc]
    """A `SentenceTransformerTrainer` that trains privately, with a loss that is a mean of terms of one example each.

        trainer = DPSentenceTransformerTrainer(
            model=model, args=args, train_dataset=pairs, loss=CosineSimilarityLoss(model),
            privacy=Privacy(target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0, layers="block"))
        trainer.train()

    An example is a row of the dataset, with all its columns. The model card shows nothing of the data. A pooler that
    comes with an encoder and that nothing is read from is frozen: it would be trained on noise alone.
    """

    train_dataset: Any
    eval_dataset: Any

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        freeze_unused_poolers(self.model)
        if isinstance(self.loss, dict) or isinstance(self.train_dataset, dict):
            raise ValueError(
                "there are several training datasets, or several losses: which of them a batch is made of is not drawn "
                "example by example. Pass one dataset with one loss."
            )
        refuse_in_batch(self.loss)
        refuse_remembering(self.loss)

    def private_module(self) -> nn.Module:
        """The model; the loss around it, where that is trained as well."""
        module: nn.Module = self.loss if self._of_loss() else self.model
        return module

    def compute_loss(self, *args: Any, **given: Any) -> Any:
        with column_by_column():  # rows of one forward pass must be examples
            return super().compute_loss(*args, **given)

    def attach(self) -> None:
        """Parameters of the loss are not in the checkpoints of sentence-transformers."""
        if self.resumed_from is not None:
            self._load_loss(self.resumed_from)
        super().attach()

    def _load_loss(self, folder: Path) -> None:
        if mine := self._of_loss():
            for name, tensor in load_file(folder / LOSS).items():
                mine[name].data.copy_(tensor)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_loss(Path(self.state.best_model_checkpoint))

    def save_account(self, folder: Path) -> None:
        if mine := self._of_loss():
            save_file({name: p.detach().cpu().contiguous() for name, p in mine.items()}, folder / LOSS)
        super().save_account(folder)

    def _of_loss(self) -> dict[str, Tensor]:
        models = {id(p) for p in self.model.parameters()}
        return {name: p for name, p in self.loss.named_parameters() if p.requires_grad and id(p) not in models}

    def add_model_card_callback(self, *args: Any, **given: Any) -> None:
        """A model card shows examples of the data, and statistics of its columns: it sees none."""
        data = self.train_dataset, self.eval_dataset
        self.train_dataset, self.eval_dataset = None, data[1] if self.privacy.public_evaluation else None
        super().add_model_card_callback(*args, **given)
        self.train_dataset, self.eval_dataset = data


def freeze_unused_poolers(model: Any) -> None:
    """Those of an encoder that a made-up text does not reach, because pooling reads its tokens instead."""
    poolers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "pooler"]
    parameters = [p for module in poolers for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    features = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in model.preprocess(["a text"]).items()
    }
    embedding = model(features)["sentence_embedding"]
    reached = torch.autograd.grad(embedding.sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, reached):
        parameter.requires_grad_(gradient is not None)


def refuse_in_batch(loss: nn.Module) -> None:
    """Raise where examples meet in a loss, or in one inside it."""
    for module in loss.modules():
        name = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in INSTEAD), "")
        if name:
            raise ValueError(
                f"{name} compares the examples of a batch with each other: one of them could then change what all "
                f"others contribute, and no epsilon would hold. Use {INSTEAD[name]}."
            )


def refuse_remembering(loss: nn.Module) -> None:
    """Raise where a loss, or one inside it, would mix the embeddings of a batch with those of a look at it."""
    remembering = [module for module in loss.modules() if _remembers(module)]
    if remembering:
        inner = next(type(m.loss).__name__ for m in remembering if not _remembers(m.loss))
        raise ValueError(
            f"{type(remembering[0]).__name__} keeps embeddings from one call of the model to the next, and looks at a "
            f"batch call it in between, with other rows. Use the loss inside it, {inner}, by itself."
        )


def _remembers(loss: Any) -> bool:
    return any(kind.__name__ in REMEMBERING for kind in type(loss).__mro__)
