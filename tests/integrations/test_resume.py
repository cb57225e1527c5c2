"""A run that is interrupted and resumed spends what one that was not would have spent: not one step is uncharged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from lmdp.integrations.account import STEPS as NOTED
from tests.certified.hub import transformer
from tests.certified.parts import Texts
from tests.integrations.parts import (
    DELTA,
    EPSILON,
    PASS,
    STEPS,
    EachStep,
    Interrupt,
    arguments,
    privacy,
    stated,
    trainer,
)
from tests.integrations.test_trainer import lora

SAVED = {"save_strategy": "steps", "save_steps": 5}


def interrupted(folder: Path, after: int, **changes: Any) -> Any:
    training = trainer(folder, callbacks=[Interrupt(after)], **{**SAVED, **changes})
    with pytest.raises(KeyboardInterrupt):
        training.train()
    return training


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_interrupted_run_and_its_continuation_spend_what_one_run_spends(tmp_path: Path, lost: int) -> None:
    whole = trainer(tmp_path / "whole", **SAVED)
    whole.train()
    interrupted(tmp_path / "parts", 5 + lost)
    assert stated(tmp_path / "parts")["steps"] == 5 + lost
    steps: list[int] = []
    rest = trainer(tmp_path / "parts", callbacks=[EachStep(lambda state: steps.append(state.global_step))], **SAVED)
    rest.train(resume_from_checkpoint=True)
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert rest.privacy_statement.steps == whole.privacy_statement.steps == STEPS
    assert rest.privacy_statement.epsilon == whole.privacy_statement.epsilon
    assert steps == list(range(6, STEPS - lost + 1))  # as many fewer as were lost
    said = f"{lost} of the steps were lost in an interruption, and stay charged"
    assert stated(tmp_path / "parts")["account"] == [said]


class Uploading(TrainerCallback):  # type: ignore[misc]
    """Whatever is seen of a step by the first who can see it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.noted = folder / NOTED, [0]

    def sees(self, *_: Any) -> None:
        self.noted += json.loads(self.path.read_text()).values() if self.path.exists() else [0]

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.sees()
        if len(self.noted) > 6:
            raise ConnectionError


def test_a_step_is_noted_before_a_hook_sees_its_gradients_or_a_callback_its_weights(tmp_path: Path) -> None:
    model, upload = transformer("BertForSequenceClassification"), Uploading(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(upload.sees)
    training = trainer(
        tmp_path, model=model, callbacks=[upload], given={"optimizers": (optimizer, None)}, max_steps=6, **SAVED
    )
    with pytest.raises(ConnectionError):
        training.train()
    assert upload.noted == [0, 1, 1, 2, 2, 3, 3]


def test_nothing_is_lost_where_the_checkpoint_is_of_the_last_step(tmp_path: Path) -> None:
    first = trainer(tmp_path, **SAVED)
    first.add_callback(EachStep(lambda state: setattr(first.control, "should_training_stop", state.global_step == 10)))
    first.train()
    assert first.state.global_step == 10
    rest = trainer(tmp_path, **SAVED)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert rest.state.global_step == rest.privacy_statement.steps == rest.lr_scheduler.last_epoch == STEPS
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert stated(tmp_path)["account"] == []


def test_a_run_resumed_in_the_midst_of_an_epoch_ends_that_epoch_where_it_would_have_ended(tmp_path: Path) -> None:
    interrupted(tmp_path, 6)
    rest = trainer(tmp_path, eval_strategy="epoch", given={"eval_dataset": Texts(8)}, **SAVED)
    rest.train(resume_from_checkpoint=True)
    epochs = [row["epoch"] for row in rest.state.log_history if "eval_loss" in row]
    assert epochs == [2.0, 3.0, 4.0, 4.75]
    assert rest.state.global_step == 5 * PASS - 1


def test_adapters_go_on_with_their_account(tmp_path: Path) -> None:
    interrupted(tmp_path, 7, model=lora())
    rest = trainer(tmp_path, model=lora(), **SAVED)
    rest.train(resume_from_checkpoint=True)
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert rest.privacy_statement.steps == STEPS


def test_what_was_lost_stays_charged_in_every_continuation(tmp_path: Path) -> None:
    interrupted(tmp_path, 7)
    second = trainer(tmp_path, callbacks=[Interrupt(9)], **SAVED)
    with pytest.raises(KeyboardInterrupt):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    third = trainer(tmp_path, **SAVED)
    third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert third.privacy_statement.steps == STEPS
    assert third.account.lost_steps == 2 + 4
    assert third.state.global_step == STEPS - 6
    assert third.privacy_statement.epsilon <= EPSILON


def test_a_run_whose_steps_are_all_lost_makes_none(tmp_path: Path) -> None:
    interrupted(tmp_path, STEPS)
    rest = trainer(tmp_path, **SAVED)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert rest.state.global_step == 5
    assert rest.privacy_statement.steps == STEPS


def test_a_checkpoint_without_its_account_is_refused_and_another_one_is_not(tmp_path: Path) -> None:
    interrupted(tmp_path, 11)
    (tmp_path / "checkpoint-10" / "privacy_state.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-10 has no privacy_state.json"):
        trainer(tmp_path, **SAVED).train(resume_from_checkpoint=True)
    rest = trainer(tmp_path, **SAVED)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert rest.privacy_statement.steps == STEPS


def test_a_checkpoint_of_a_trainer_without_privacy_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=5, **SAVED)
    Trainer(transformer("BertForSequenceClassification"), args, train_dataset=Texts()).train()
    with pytest.raises(ValueError, match="nobody knows what its weights have cost"):
        trainer(tmp_path, **SAVED).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("content", ["", "[]", '{"steps": 3}', '{"name": "a", "steps": "many"}'])
def test_a_damaged_account_is_refused(tmp_path: Path, content: str) -> None:
    interrupted(tmp_path, 6)
    (tmp_path / "checkpoint-5" / "privacy_state.json").write_text(content)
    with pytest.raises(ValueError, match="Resume from another checkpoint"):
        trainer(tmp_path, **SAVED).train(resume_from_checkpoint=True)


def test_damaged_notes_of_steps_are_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 6)
    (tmp_path / "privacy_steps.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="how many steps were made cannot be told any more"):
        trainer(tmp_path, **SAVED).train(resume_from_checkpoint=True)


def test_a_run_of_other_settings_cannot_be_resumed(tmp_path: Path) -> None:
    interrupted(tmp_path, 6)
    with pytest.raises(ValueError, match=r"belongs to another run.*noise_multiplier"):
        trainer(tmp_path, private=privacy(target_epsilon=4.0), **SAVED).train(resume_from_checkpoint=True)


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint .* without resume_from_checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer(tmp_path, max_steps=1).train(resume_from_checkpoint=False)


def test_a_checkpoint_states_what_its_own_weights_have_cost(tmp_path: Path) -> None:
    training = trainer(tmp_path, **SAVED)
    training.train()
    for steps in (5, 10):
        beside = stated(tmp_path / f"checkpoint-{steps}")
        assert beside["steps"] == steps
        assert beside["epsilon"] == training.engine.mechanism.epsilon(steps, DELTA)
        assert json.loads((tmp_path / f"checkpoint-{steps}" / "privacy_state.json").read_text())["steps"] == steps


def test_a_checkpoint_that_was_moved_knows_where_its_steps_are_noted(tmp_path: Path) -> None:
    interrupted(tmp_path / "first", 7)
    shutil.copytree(tmp_path / "first" / "checkpoint-5", tmp_path / "moved" / "checkpoint-5")
    rest = trainer(tmp_path / "second", **SAVED)
    rest.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-5"))
    assert rest.account.lost_steps == 2
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert rest.privacy_statement.steps == STEPS


def test_a_run_whose_steps_are_noted_nowhere_is_not_certified_until_the_note_is_copied(tmp_path: Path) -> None:
    interrupted(tmp_path / "first", 7)
    note = (tmp_path / "first" / NOTED).rename(tmp_path / "kept.json")
    lost = trainer(tmp_path / "second", callbacks=[Interrupt(6)], **SAVED)
    with pytest.raises(KeyboardInterrupt):
        lost.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert not lost.privacy_statement.certified
    assert f"Copy {NOTED} of the interrupted run into {tmp_path / 'second'}" in " ".join(lost.privacy_statement.reasons)

    (tmp_path / "third").mkdir()
    shutil.copy(note, tmp_path / "third" / NOTED)  # the remedy
    rest = trainer(tmp_path / "third", **SAVED)
    rest.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    assert rest.account.lost_steps == 2
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
