"""Trainers of others with the three objects of `make_private`, without an integration: they work as they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from lmdp.guards.looks import steps_among
from tests.certified.case import private
from tests.certified.hub import transformer
from tests.certified.parts import Texts
from tests.integrations.parts import DELTA, STEPS, arguments


def test_a_plain_trainer_with_the_three_objects_is_private_and_counts_batches(tmp_path: Path) -> None:
    training = private(transformer("BertForSequenceClassification"), Texts())

    class Private(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return training.loader

    trainer = Private(training.model, arguments(tmp_path), optimizers=(training.optimizer, None))
    trainer.train()
    statement = training.engine.privacy_statement(DELTA)
    assert statement.certified, statement.reasons
    assert trainer.state.global_step == STEPS
    assert statement.steps == steps_among(STEPS) < STEPS  # looks take the place of steps
    assert any("loss" in row for row in trainer.state.log_history)  # which is why there is a trainer of ours
