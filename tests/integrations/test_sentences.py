"""`DPSentenceTransformerTrainer`: losses of one row each train to the end, others are refused with one that fits."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from lmdp.integrations import DPSentenceTransformerTrainer
from lmdp.integrations.sentences import INSTEAD, REMEMBERING
from tests.certified.case import EXAMPLES
from tests.certified.hub import ATTENTION, COMMON
from tests.certified.parts import WIDTH
from tests.hub import saved_encoder
from tests.integrations.parts import EPSILON, STEPS, Interrupt, arguments, privacy, stated

WORDS = ["mail", "meeting", "budget", "lunch", "report", "draft", "contract", "noon", "secret"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("encoder"))


def saved(path: Path) -> Path:
    return saved_encoder(path, WORDS, **COMMON, **ATTENTION)


def encoder(folder: Path) -> Any:
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(WIDTH)], device="cpu")


def sentences(count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, 6))) for _ in range(count)]


def rows(columns: int, label: list[Any] | None = None, count: int = EXAMPLES) -> Any:
    content: dict[str, Any] = {f"text_{i}": sentences(count, i) for i in range(columns)}
    return datasets.Dataset.from_dict({**content, **({} if label is None else {"label": label})})


DICE = random.Random(1)
SCORES = [DICE.random() for _ in range(EXAMPLES)]
CLASSES = [DICE.randrange(2) for _ in range(EXAMPLES)]
VECTORS = [[DICE.gauss(0, 1) for _ in range(WIDTH)] for _ in range(EXAMPLES)]
BY_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "CosineSimilarityLoss": (lambda: rows(2, SCORES), {}),
    "ContrastiveLoss": (lambda: rows(2, CLASSES), {}),
    "TripletLoss": (lambda: rows(3), {}),
    "MSELoss": (lambda: rows(1, VECTORS), {}),
    "MarginMSELoss": (lambda: rows(3, SCORES), {}),
    "DistillKLDivLoss": (lambda: rows(3, [[s, 1 - s] for s in SCORES]), {}),
    "EmbedDistillLoss": (lambda: rows(2, VECTORS), {}),
    "SoftmaxLoss": (lambda: rows(2, CLASSES), {"embedding_dimension": WIDTH, "num_labels": 2}),
}


def trainer(where: Path, folder: Path, name: str = "CosineSimilarityLoss", **changes: Any) -> Any:
    made, options = BY_ROWS[name]
    model = encoder(folder)
    given = changes.pop("given", {})
    return DPSentenceTransformerTrainer(
        model=model,
        args=arguments(where, SentenceTransformerTrainingArguments, **changes),
        train_dataset=made(),
        loss=getattr(losses, name)(model, **options),
        privacy=given.pop("privacy", privacy(layers="block")),
        **given,
    )


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_loss_of_rows_trains_by_lm_and_ends_certified(tmp_path: Path, folder: Path, name: str) -> None:
    training = trainer(tmp_path, folder, name)
    before = [p.detach().clone() for p in training.model.parameters() if p.requires_grad]
    training.train()
    statement = training.privacy_statement
    assert statement.certified, statement.reasons
    assert statement.steps == training.state.global_step == STEPS
    assert 0.99 * EPSILON < statement.epsilon <= EPSILON
    assert statement.method == stated(tmp_path)["method"] == "lm"
    trained = [p for p in training.model.parameters() if p.requires_grad]
    assert not any(torch.equal(a, b) for a, b in zip(before, trained))


@pytest.mark.parametrize("name", INSTEAD)
def test_a_loss_in_which_examples_meet_is_refused_with_one_that_fits(folder: Path, tmp_path: Path, name: str) -> None:
    model, options = encoder(folder), {"guide": encoder(folder)} if "GIST" in name else {}
    with warnings.catch_warnings(action="ignore"):  # some say that they are made of others now
        loss = getattr(losses, name)(model, **options)
    given = {"args": arguments(tmp_path, SentenceTransformerTrainingArguments), "train_dataset": rows(2, SCORES)}
    with pytest.raises(ValueError, match=f"{name} compares the examples") as refused:
        DPSentenceTransformerTrainer(model=model, loss=loss, privacy=privacy(), **given)
    assert any(f"Use {fits}" in str(refused.value) for fits in BY_ROWS)


@pytest.mark.parametrize("name", [*REMEMBERING, "Matryoshka2dLoss"])
def test_a_loss_that_keeps_embeddings_is_refused_with_the_one_inside_it(
    tmp_path: Path, folder: Path, name: str
) -> None:
    model = encoder(folder)
    around = getattr(losses, name)(model, losses.CosineSimilarityLoss(model), *([[8, 4]] if "Matr" in name else []))
    given = {"args": arguments(tmp_path, SentenceTransformerTrainingArguments), "train_dataset": rows(2, SCORES)}
    with pytest.raises(ValueError, match=f"{name} keeps embeddings.*CosineSimilarityLoss, by itself"):
        DPSentenceTransformerTrainer(model=model, loss=around, privacy=privacy(), **given)


def test_the_default_loss_and_one_inside_another_are_refused(tmp_path: Path, folder: Path) -> None:
    model = encoder(folder)
    given = {"args": arguments(tmp_path, SentenceTransformerTrainingArguments), "train_dataset": rows(2, SCORES)}
    with pytest.raises(ValueError, match=r"CoSENTLoss compares.*Use CosineSimilarityLoss"):
        DPSentenceTransformerTrainer(model=model, privacy=privacy(), **given)
    inside = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [8, 4])
    with pytest.raises(ValueError, match="MultipleNegativesRankingLoss compares"):
        DPSentenceTransformerTrainer(model=model, loss=inside, privacy=privacy(), **given)


@pytest.mark.parametrize("name", ["CosineSimilarityLoss", "SoftmaxLoss"])
def test_an_interrupted_run_goes_on_with_its_account(tmp_path: Path, folder: Path, name: str) -> None:
    saved = {"save_strategy": "steps", "save_steps": 5}
    first = trainer(tmp_path, folder, name, given={"callbacks": [Interrupt(7)]}, **saved)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    rest = trainer(tmp_path, folder, name, **saved)
    rest.train(resume_from_checkpoint=True)
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert rest.privacy_statement.steps == STEPS
    assert rest.state.global_step == STEPS - 2
    assert rest.privacy_statement.epsilon <= EPSILON


@pytest.mark.slow
def test_the_best_checkpoint_is_loaded_with_the_parameters_of_its_loss_and_certified(
    tmp_path: Path, folder: Path
) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.3}
    every = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 15}
    public = {"privacy": privacy(public_evaluation=True), "eval_dataset": rows(2, CLASSES[:8], count=8)}
    training = trainer(tmp_path, folder, "SoftmaxLoss", given=public, **best, **every)
    training.train()
    assert training.state.best_model_checkpoint is not None
    assert training.privacy_statement.certified, training.privacy_statement.reasons


def test_nothing_of_the_data_is_in_a_checkpoint_its_card_or_a_log(tmp_path: Path, folder: Path) -> None:
    training = trainer(
        tmp_path, folder, save_strategy="steps", save_steps=5, max_steps=5, given={"eval_dataset": rows(2, SCORES)}
    )
    training.train()
    assert not any("loss" in key for row in training.state.log_history for key in row if not key.startswith("eval"))
    texts = {text for column in ("text_0", "text_1") for text in training.train_dataset[column] if " " in text}
    for path in (tmp_path / "checkpoint-5").rglob("*.[jm][sd]*"):
        content = path.read_text()
        assert not [text for text in texts if text in content], path
    card = (tmp_path / "checkpoint-5" / "README.md").read_text()
    assert "Training Loss" not in card


def test_a_pooler_that_nothing_is_read_from_is_frozen_and_all_else_is_trained(tmp_path: Path, folder: Path) -> None:
    model = encoder(folder)
    assert all(p.requires_grad for p in model.parameters())
    trained = {name for name, p in trainer(tmp_path, folder).model.named_parameters() if p.requires_grad}
    assert {name for name, _ in model.named_parameters()} - trained == {
        "0.model.pooler.dense.weight",
        "0.model.pooler.dense.bias",
    }


def test_several_datasets_and_chosen_batches_are_refused(tmp_path: Path, folder: Path) -> None:
    model = encoder(folder)
    args = arguments(tmp_path, SentenceTransformerTrainingArguments)
    loss = losses.CosineSimilarityLoss(model)
    two = {"a": rows(2, SCORES), "b": rows(2, SCORES)}
    with pytest.raises(ValueError, match=r"several training datasets.*one dataset with one loss"):
        DPSentenceTransformerTrainer(model=model, args=args, train_dataset=two, loss=loss, privacy=privacy())
    with pytest.raises(ValueError, match=r"TrainingArguments\(batch_sampler="):
        trainer(tmp_path, folder, batch_sampler="no_duplicates")


def test_accumulation_becomes_parts(tmp_path: Path, folder: Path) -> None:
    training = trainer(tmp_path, folder, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    training.train()
    assert training.privacy_statement.certified, training.privacy_statement.reasons
    assert training.privacy_statement.expected_batch_size == 16
    assert training.privacy_statement.steps == STEPS
