"""`accelerated`: a loop of one's own with Accelerate ends certified, resumes with its account, and stops in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from lmdp.guards.looks import steps_among
from lmdp.integrations import accelerated
from lmdp.integrations.accelerate import REFUSALS
from tests.certified.case import BATCH
from tests.certified.parts import classify, perceptron, vectors
from tests.integrations.parts import DELTA, EPSILON, PASS, STEPS, privacy, stated

EPOCHS = STEPS // PASS


@pytest.fixture(autouse=True)
def _one_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """As Accelerate's own documentation writes it."""

    def __init__(
        self, folder: Path, *, private: Any = None, epochs: int = EPOCHS, examples: int = 64, **given: Any
    ) -> None:
        self.accelerator = Accelerator(cpu=True, **given)
        model, size = perceptron(), BATCH if examples == 64 else 1
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.account, self.model, self.optimizer, self.loader = accelerated(
            self.accelerator,
            model,
            optimizer,
            DataLoader(vectors(examples), batch_size=size, shuffle=True),
            privacy=private or privacy(),
            epochs=epochs,
            output_dir=folder,
        )
        self.scheduler = self.accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
        self.epochs = epochs

    def run(self, until: int = 10**6) -> Any:
        for _ in range(self.epochs):
            for batch in self.loader:
                self.optimizer.zero_grad()
                with self.accelerator.autocast():
                    loss = classify(self.model, batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                if self.account.steps == until:
                    return self.account.privacy_statement()
        self.account.close()
        return self.account.privacy_statement()


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "ordinary": ({}, steps_among(STEPS)),
    "bfloat16": ({"mixed_precision": "bf16"}, steps_among(STEPS)),
    "in parts": ({"private": privacy(max_physical_batch_size=5)}, STEPS),
    "empty batches": ({"examples": 16, "epochs": 2}, steps_among(32)),
}


@pytest.mark.parametrize("given, steps", CASES.values(), ids=CASES.keys())
def test_a_loop_ends_certified(tmp_path: Path, given: dict[str, Any], steps: int) -> None:
    loop = Loop(tmp_path, **given)
    statement = loop.run()
    assert statement.certified, statement.reasons
    assert statement.steps == steps
    assert 0.99 * EPSILON < statement.epsilon <= EPSILON
    assert stated(tmp_path) == {**statement.to_dict(), "account": []}


def test_a_loop_stops_before_the_step_that_would_pass_the_target(tmp_path: Path) -> None:
    loop = Loop(tmp_path, private=privacy(noise_multiplier=0.9, target_epsilon=5.0), epochs=30)
    steps, mechanism = loop.run().steps, loop.account.engine.mechanism
    assert mechanism.epsilon(steps, DELTA) <= 5.0 < mechanism.epsilon(steps + 1, DELTA)


def test_an_interrupted_loop_and_its_continuation_spend_what_one_loop_spends(tmp_path: Path) -> None:
    whole = Loop(tmp_path / "whole").run()
    AcceleratorState._reset_state(reset_partial_state=True)
    first = Loop(tmp_path / "parts")
    first.run(until=5)
    first.accelerator.save_state(str(tmp_path / "saved"))
    first.run(until=7)
    AcceleratorState._reset_state(reset_partial_state=True)
    rest = Loop(tmp_path / "parts")
    rest.accelerator.load_state(str(tmp_path / "saved"))
    assert rest.account.steps == 7
    statement = rest.run()
    assert statement.certified, statement.reasons
    assert statement.steps == whole.steps
    assert statement.epsilon == whole.epsilon
    assert stated(tmp_path / "parts")["account"] == ["2 of the steps were lost in an interruption, and stay charged"]


def test_a_model_that_is_changed_after_its_training_is_not_certified(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    assert loop.run().certified
    with torch.no_grad():
        next(loop.model.parameters()).mul_(2)
    loop.account.publish(tmp_path / "released")
    assert "changed after the training ended" in stated(tmp_path / "released")["verdicts"]["content"]["how"]
    assert not loop.account.privacy_statement().certified


def test_a_state_without_an_account_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
    accelerator.save_state(str(tmp_path / "saved"))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="Registered objects: 1"):
        Loop(tmp_path).accelerator.load_state(str(tmp_path / "saved"))


def test_random_states_that_are_saved_are_not_those_of_the_next_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run(until=2)
    before = torch.get_rng_state()
    loop.accelerator.save_state(str(tmp_path / "saved"))
    assert not torch.equal(before, torch.get_rng_state())
    (kept,) = (tmp_path / "saved").glob("random_states_*")
    saved = torch.load(kept, weights_only=False)["torch_manual_seed"]
    assert not torch.equal(saved, before)  # whoever knows that knows the dropout of the steps before
    assert not torch.equal(saved, torch.get_rng_state())
    AcceleratorState._reset_state(reset_partial_state=True)
    rest = Loop(tmp_path)
    rest.accelerator.load_state(str(tmp_path / "saved"))
    assert not torch.equal(before, torch.get_rng_state())


class TwoProcesses(Accelerator):  # type: ignore[misc]
    num_processes = 2


class Halved(Accelerator):  # type: ignore[misc]
    mixed_precision = "fp16"


BROKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_processes": (lambda: TwoProcesses(cpu=True), {}),
    "gradient_accumulation_steps": (
        lambda: Accelerator(cpu=True, gradient_accumulation_steps=4),
        {"private": privacy(max_physical_batch_size=4)},
    ),
    "mixed_precision": (lambda: Halved(cpu=True), {"mixed_precision": "bf16"}),
}


def test_every_refusal_is_tried() -> None:
    assert {refusal.setting for refusal in REFUSALS} == set(BROKEN)


@pytest.mark.parametrize("setting", BROKEN)
def test_what_breaks_the_account_is_refused_by_name_and_its_remedy_trains(tmp_path: Path, setting: str) -> None:
    broken, remedied = BROKEN[setting]
    model = perceptron()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(vectors(), batch_size=BATCH)
    with pytest.raises(ValueError, match=rf"Accelerator\({setting}\)"):
        accelerated(broken(), model, optimizer, loader, privacy=privacy(), epochs=1, output_dir=tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Loop(tmp_path, epochs=1, **remedied).run().steps > 0
