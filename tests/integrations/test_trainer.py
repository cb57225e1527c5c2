"""`DPTrainer`: ends certified, counts what the engine counts, stops in time, and keeps what is private to itself."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import EarlyStoppingCallback, default_data_collator

from lmdp import PerUser, PrivacyEngine
from lmdp.integrations import Privacy
from lmdp.integrations.account import TrainerAccount
from tests.certified.case import BATCH, EXAMPLES
from tests.certified.hub import transformer
from tests.certified.parts import Texts, texts
from tests.integrations.parts import DELTA, EPSILON, PASS, STEPS, EachStep, privacy, stated, trainer


def lora() -> nn.Module:
    import peft

    torch.manual_seed(0)  # the weights that stay as they are, which adapters are saved without
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model: nn.Module = peft.get_peft_model(transformer("BertForSequenceClassification"), config)
    return model


def columns() -> Any:
    """As people bring them: texts of different lengths, and a column that the model does not take."""
    tokens, mask, labels = texts().tensors
    ids = [row[m > 0].tolist() for row, m in zip(tokens, mask)]
    content = {"input_ids": ids, "labels": labels.tolist(), "sender": [f"person {i}" for i in range(EXAMPLES)]}
    return datasets.Dataset.from_dict(content)


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(e["input_ids"]) for e in examples], batch_first=True)
    labels = torch.tensor([e["labels"] for e in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


SOUND: dict[str, dict[str, Any]] = {
    "all weights": {},
    "blocks": {"private": privacy(layers="block")},
    "dpsgd": {"private": privacy(method="dpsgd")},
    "pld": {"private": privacy(accountant="pld")},
    "lora": {"model": lora},
    "columns, padded to the longest": {"data": columns, "given": {"data_collator": padded}},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "in parts": {"private": privacy(max_physical_batch_size=5)},
    "epochs": {"max_steps": -1, "num_train_epochs": 4.7},
    "bfloat16": {"bf16": True},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 7, "given": {"eval_dataset": Texts(10)}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "two workers": {"dataloader_num_workers": 2},
}


@pytest.mark.parametrize("case", SOUND.values(), ids=SOUND.keys())
def test_it_ends_certified_with_as_many_steps_as_the_trainer_counts(tmp_path: Path, case: dict[str, Any]) -> None:
    case = {key: value() if callable(value) else value for key, value in case.items()}
    training = trainer(tmp_path, **case)
    training.train()
    statement = training.privacy_statement
    assert statement.certified, statement.reasons
    steps = math.ceil(4.7 * PASS) if case.get("max_steps") else STEPS
    assert statement.steps == training.state.global_step == training.lr_scheduler.last_epoch == steps
    assert statement.expected_batch_size == BATCH
    assert 0.99 * EPSILON < statement.epsilon <= EPSILON
    assert {**statement.to_dict(), "account": []} == stated(tmp_path)


def test_weights_that_are_trained_are_those_of_the_model(tmp_path: Path) -> None:
    training = trainer(tmp_path, max_steps=2)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.train()
    assert not any(torch.equal(a, b) for a, b in zip(before, training.model.parameters()))
    assert "step" not in vars(training.optimizer.optimizer)  # the engine is detached


def test_empty_batches_are_steps(tmp_path: Path) -> None:
    training = trainer(tmp_path, data=Texts(), per_device_train_batch_size=1, max_steps=24)
    sizes: list[int] = []
    original = training.compute_loss

    def noting(model: nn.Module, inputs: Any, **given: Any) -> Any:
        assert given["num_items_in_batch"] is None
        sizes.append(training.account.loader.log._current.size)
        return original(model, inputs, **given)

    training.compute_loss = noting
    training.train()
    assert 0 in sizes
    assert training.privacy_statement.steps == 24
    assert training.privacy_statement.certified, training.privacy_statement.reasons


def test_an_empty_batch_of_a_dataset_of_columns_is_a_step(tmp_path: Path) -> None:
    training = trainer(
        tmp_path, data=columns(), given={"data_collator": padded}, per_device_train_batch_size=1, max_steps=8
    )
    training.train()
    assert training.privacy_statement.steps == 8


@pytest.mark.parametrize("noise", [0.9, 1.3])
def test_a_training_with_noise_of_ones_own_stops_before_the_step_that_would_pass_the_target(
    tmp_path: Path, noise: float
) -> None:
    training = trainer(tmp_path, private=privacy(noise_multiplier=noise, target_epsilon=5.0), max_steps=60)
    training.train()
    steps, mechanism = training.privacy_statement.steps, training.engine.mechanism
    assert 1 < steps == training.state.global_step < 60
    assert mechanism.epsilon(steps, DELTA) <= 5.0 < mechanism.epsilon(steps + 1, DELTA)
    assert training.privacy_statement.certified, training.privacy_statement.reasons


def test_noise_with_which_no_step_fits_the_target_is_refused_and_the_remedy_works(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one step with noise_multiplier 0.2 .* leave it out"):
        trainer(tmp_path, private=privacy(noise_multiplier=0.2)).train()
    trainer(tmp_path, max_steps=2).train()


def test_without_a_target_all_steps_are_made(tmp_path: Path) -> None:
    training = trainer(tmp_path, private=privacy(noise_multiplier=0.9, target_epsilon=None), max_steps=3)
    training.train()
    assert training.privacy_statement.steps == 3


PUBLIC_KEYS = {"learning_rate", "epsilon", "epoch", "step", "train_runtime", "train_samples_per_second"}


class Losses:
    """What the training's loss is, batch by batch."""

    def __init__(self, training: Any) -> None:
        self.values: list[float] = []
        self._original, training.compute_loss = training.compute_loss, self

    def __call__(self, *args: Any, **given: Any) -> Any:
        loss = self._original(*args, **given)
        self.values.append(loss.item())
        return loss


def test_nothing_that_is_logged_printed_or_saved_tells_of_a_private_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = trainer(
        tmp_path, logging_steps=1, save_strategy="steps", save_steps=10, include_num_input_tokens_seen="no"
    )
    losses, logged = Losses(training), []
    training.add_callback(EachStep(lambda state: logged.append(float(training._tr_loss))))
    output = training.train()
    assert len(losses.values) > STEPS
    assert set(logged) == {0.0}
    assert {key for row in training.state.log_history for key in row} <= PUBLIC_KEYS | {"train_steps_per_second"}
    assert math.isnan(output.training_loss)
    assert "train_loss" not in output.metrics
    assert "loss" not in capsys.readouterr().out
    saved = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    assert saved["total_flos"] == 0
    assert saved["num_input_tokens_seen"] == 0
    assert "loss" not in json.dumps(saved["log_history"])
    training.create_model_card()
    assert "Training Loss" not in (tmp_path / "README.md").read_text()


def test_a_private_loss_is_logged_if_asked_for_and_marked(tmp_path: Path) -> None:
    training = trainer(tmp_path, private=privacy(log_private_loss=True), logging_steps=1, max_steps=4)
    losses = Losses(training)
    output = training.train()
    shown = [row["not_private_loss"] for row in training.state.log_history if "not_private_loss" in row]
    assert shown[0] == pytest.approx(losses.values[0])
    assert not {"loss", "train_loss"} & {key for row in training.state.log_history for key in row}
    assert "not_private_train_loss" in output.metrics
    assert "training losses were logged: they are not private, and not covered" in stated(tmp_path)["account"]


def drawn() -> tuple[float, ...]:
    return torch.initial_seed(), random.random(), np.random.rand()  # noqa: NPY002  (what datasets of others draw from)


def test_no_random_state_is_saved_and_the_public_seed_is_not_used(tmp_path: Path) -> None:
    seeds = []
    for run in ("a", "b"):
        training = trainer(tmp_path / run, max_steps=2, save_strategy="steps", save_steps=1, seed=42)
        training.add_callback(EachStep(lambda _: seeds.append(drawn())))
        training.train()
        assert not list((tmp_path / run).rglob("rng_state*"))
    for kind in zip(*seeds):
        assert len(set(kind)) == len(kind)


def test_evaluation_on_the_training_data_is_refused_and_on_others_it_is_not(tmp_path: Path) -> None:
    data = Texts()
    half, rest = Subset(data, range(0, len(data), 2)), Subset(data, range(1, len(data), 2))
    parts = [(data, data), (data, rest), (half, Subset(half, [1])), (half, Subset(data, [1, 2]))]
    for trained, seen in [*parts, (PerUser(data, range(len(data)), rows=1), rest)]:
        with pytest.raises(ValueError, match="eval_dataset has training data in it"):
            trainer(tmp_path, data=trained, given={"eval_dataset": {"seen": seen}})
    trainer(tmp_path, data=data, given={"eval_dataset": {"others": Texts(8)}})
    training = trainer(tmp_path, data=half, given={"eval_dataset": rest})
    with pytest.raises(ValueError, match="eval_dataset has training data in it"):
        training.evaluate(data)
    assert "eval_loss" in training.evaluate()


def test_a_collator_of_rows_is_refused_for_users_and_the_remedies_train(tmp_path: Path) -> None:
    def joined(units: list[list[Any]]) -> Any:
        return default_data_collator([row for unit in units for row in unit])

    users = PerUser(Texts(), [row // 3 for row in range(EXAMPLES)], rows=2)
    with pytest.raises(TypeError, match=r"data_collator=dataset\.collate"):
        trainer(tmp_path, data=users, max_steps=1).train()
    for collate in (users.collate, joined):
        training = trainer(tmp_path, data=users, max_steps=1, given={"data_collator": collate})
        training.train()
        assert training.engine.mechanism.unit == "user"


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    training = trainer(tmp_path, max_steps=2)
    training.train()
    with pytest.raises(RuntimeError, match="trained already"):
        training.train()


def test_weights_of_an_earlier_private_training_are_refused_unless_both_are_to_be_added_up(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", max_steps=4)
    first.train()
    state = {name: value.clone() for name, value in first.model.state_dict().items()}

    def second(folder: str, **changes: Any) -> Any:
        model = transformer("BertForSequenceClassification")
        model.load_state_dict(state)
        return trainer(tmp_path / folder, model=model, private=privacy(**changes), max_steps=4)

    with pytest.raises(ValueError, match=r"earlier private trainings .*compose=True"):
        second("refused").train()
    both = second("both", compose=True)
    both.train()
    assert both.privacy_statement.epsilon > EPSILON
    assert both.privacy_statement.certified, both.privacy_statement.reasons


def test_the_best_checkpoint_by_public_data_is_loaded_and_the_run_is_certified(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    every = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 10}
    training = trainer(
        tmp_path,
        private=privacy(public_evaluation=True),
        given={"eval_dataset": Texts(8)},
        callbacks=[EarlyStoppingCallback(5)],
        **best,
        **every,
    )
    training.train()
    assert training.state.best_model_checkpoint is not None
    assert training.privacy_statement.certified, training.privacy_statement.reasons
    assert stated(tmp_path)["account"] == ["evaluation data were declared public"]
    other = tmp_path / f"checkpoint-{15 - int(training.state.best_model_checkpoint.rpartition('-')[2])}"
    training._load_from_checkpoint(str(other))
    assert training.privacy_statement.certified, training.privacy_statement.reasons
    _only_what_was_trained_is_certified(training, tmp_path / "released")


def _only_what_was_trained_is_certified(training: Any, folder: Path) -> None:
    """Not what somebody makes of it afterwards."""
    trained, model = next(training.model.parameters()), training.model
    embeddings = next(module for module in model.modules() if "position_ids" in dict(module.named_buffers()))

    def saved() -> dict[str, Any]:
        training.save_model(str(folder))
        return stated(folder)

    assert saved()["certified"]
    with torch.no_grad():
        trained.mul_(2)
        assert not training.privacy_statement.certified
        assert "the trained parameters were changed after the training" in saved()["verdicts"]["content"]["how"]
        trained.div_(2)
        assert saved()["certified"]
        embeddings.position_ids += 1
        assert "position_ids'] were changed after the training" in saved()["verdicts"]["content"]["how"]
        embeddings.position_ids -= 1
    training.model = transformer("BertForSequenceClassification")
    assert "not the model that was trained" in saved()["verdicts"]["content"]["how"]
    training.model = model
    assert saved()["certified"]


def test_save_model_leaves_a_statement_beside_the_weights(tmp_path: Path) -> None:
    training = trainer(tmp_path, max_steps=2)
    training.train()
    training.save_model(str(tmp_path / "released"))
    assert stated(tmp_path / "released")["steps"] == 2


def test_a_subclass_that_computes_its_own_loss_is_private_too(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.compute_loss = lambda model, inputs, **_: nn.functional.cross_entropy(
        model(inputs["input_ids"], inputs["attention_mask"]).logits, inputs["labels"]
    )
    training.train()
    assert training.privacy_statement.certified, training.privacy_statement.reasons


def with_labels(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For a language model: every token is a label, padding is none."""
    ids, mask = (torch.stack([e[name] for e in examples]) for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def mean_of_each_text(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    following = labels[:, 1:]
    each = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), following, reduction="none")
    return (each.sum(1) / (following != -100).sum(1).clamp(min=1)).mean()


def test_a_mean_over_the_tokens_of_a_batch_is_refused_and_the_mean_of_each_text_trains(tmp_path: Path) -> None:
    def training(**given: Any) -> Any:
        model = transformer("GPT2LMHeadModel")
        return trainer(tmp_path, model=model, given={"data_collator": with_labels, **given}, max_steps=4)

    with pytest.raises(RuntimeError, match="ignore_index"):
        training().train()
    by_text = training(compute_loss_func=mean_of_each_text)
    by_text.train()
    assert by_text.privacy_statement.steps == 4


def test_a_delta_that_is_too_large_is_refused_before_the_training(tmp_path: Path) -> None:
    for noise in (None, 1.0):
        with pytest.raises(ValueError, match="not below 1 / 64"):
            trainer(tmp_path, private=privacy(target_delta=0.1, noise_multiplier=noise)).train()


def test_the_accountant_is_that_of_the_engine_unless_told_otherwise() -> None:
    settings = Privacy(target_epsilon=EPSILON, target_delta=DELTA, max_grad_norm=1.0)
    assert settings.accountant == PrivacyEngine().accountant.name


def test_a_part_of_a_dataset_is_the_part(tmp_path: Path) -> None:
    data: Dataset[Any] = Subset(Texts(), range(32))
    training = trainer(tmp_path, data=data, max_steps=2)
    training.train()
    assert training.privacy_statement.sample_rate == BATCH / 32


def test_an_account_that_was_never_attached_says_so(tmp_path: Path) -> None:
    account = TrainerAccount(privacy(), tmp_path)
    with pytest.raises(RuntimeError, match="has not begun"):
        _ = account.engine
    with pytest.raises(RuntimeError, match="while the trainer trains"):
        list(trainer(tmp_path).get_train_dataloader())
