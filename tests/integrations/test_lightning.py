"""`DPCallback`: a training by Lightning ends certified, resumes with its account, stops in time, and logs no loss."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmdp.gradients.attach import is_attached
from lmdp.integrations import DPCallback
from lmdp.integrations.lightning import REFUSALS
from tests.certified.case import BATCH, EXAMPLES
from tests.certified.parts import CLASSES, perceptron, vectors
from tests.integrations.parts import DELTA, EPSILON, PASS, STEPS, privacy, stated

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec"),  # Lightning asks torch by an old name
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(L.LightningModule):  # type: ignore[misc]
    """As people write them; `call` names what training_step calls."""

    def __init__(self, call: str = "model") -> None:
        super().__init__()
        self.model, self.call = perceptron(), call
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x) if self.call == "model" else self(x), y)
        self.losses.append(loss.item())
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"batch": float(len(y)), "loss_too": loss})
        return {"loss": loss} if self.call == "model" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


class TwoParts(Lit):
    def __init__(self) -> None:
        super().__init__("forward")
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.model(x).tanh())
        return logits


class KeepsAnAverage(Lit):
    """Of the loss, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.average.lerp_(output["loss"].detach(), 0.1)
        return output


class ByHand(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OnPlateau(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def loader(batch_size: int = BATCH, examples: int = EXAMPLES) -> Any:
    return DataLoader(vectors(examples), batch_size=batch_size, shuffle=True)


def trainer(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    settings = {
        "max_epochs": STEPS // PASS,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **changes,
    }
    return L.Trainer(callbacks=list(callbacks), **settings)


def fit(
    folder: Path, model: Any = None, private: Any = None, *callbacks: Any, data: Any = None, **changes: Any
) -> tuple[Any, Any]:
    """(callback, trainer), after the training."""
    private = DPCallback(privacy() if private is None else private)
    training = trainer(folder, private, *callbacks, **changes)
    training.fit(model or Lit(), private.loader(loader() if data is None else data))
    return private, training


SOUND: dict[str, Any] = {
    "calls its model": lambda folder: fit(folder),
    "calls itself": lambda folder: fit(folder, Lit("forward")),
    "of two parts": lambda folder: fit(folder, TwoParts()),
    "bfloat16": lambda folder: fit(folder, precision="bf16-mixed"),
    "in parts": lambda folder: fit(folder, private=privacy(max_physical_batch_size=5)),
    "steps": lambda folder: fit(folder, max_epochs=-1, max_steps=STEPS),
    "short epochs": lambda folder: fit(folder, max_epochs=STEPS // 2, limit_train_batches=2),
}


@pytest.mark.parametrize("run", SOUND.values(), ids=SOUND.keys())
def test_a_training_ends_certified_with_as_many_steps_as_the_trainer_counts(tmp_path: Path, run: Any) -> None:
    private, training = run(tmp_path)
    statement = private.privacy_statement
    assert statement.certified, statement.reasons
    assert statement.steps == training.global_step == STEPS
    assert 0.99 * EPSILON < statement.epsilon <= EPSILON
    assert stated(tmp_path) == {**statement.to_dict(), "account": []}
    assert not is_attached(training.lightning_module)


def test_empty_batches_are_steps(tmp_path: Path) -> None:
    private, training = fit(tmp_path, data=loader(1, 16), max_epochs=2)
    assert private.privacy_statement.steps == training.global_step == 32
    assert private.privacy_statement.certified, private.privacy_statement.reasons


def test_a_training_stops_before_the_step_that_would_pass_the_target(tmp_path: Path) -> None:
    private, training = fit(tmp_path, private=privacy(noise_multiplier=0.9, target_epsilon=5.0), max_epochs=30)
    steps, mechanism = private.privacy_statement.steps, private.engine.mechanism
    assert 1 < steps == training.global_step < 30 * PASS
    assert mechanism.epsilon(steps, DELTA) <= 5.0 < mechanism.epsilon(steps + 1, DELTA)
    assert private.privacy_statement.certified, private.privacy_statement.reasons


class Interrupt(L.Callback):  # type: ignore[misc]
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.after:
            raise RuntimeError("interrupted")


def saving(folder: Path) -> Any:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=5)


def test_an_interrupted_run_and_its_continuation_spend_what_one_run_spends(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(tmp_path / "parts", None, None, saving(tmp_path / "parts"), Interrupt(7))
    assert stated(tmp_path / "parts")["steps"] == 7
    rest = DPCallback(privacy())
    training = trainer(tmp_path / "parts", rest, saving(tmp_path / "parts"))
    training.fit(Lit(), rest.loader(loader()), ckpt_path=tmp_path / "parts" / "step=5.ckpt")
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons
    assert rest.privacy_statement.steps == whole.privacy_statement.steps == STEPS
    assert rest.privacy_statement.epsilon == whole.privacy_statement.epsilon
    assert training.global_step == STEPS - 2
    assert stated(tmp_path / "parts")["account"] == ["2 of the steps were lost in an interruption, and stay charged"]


class Uploading(L.Callback):  # type: ignore[misc]
    """Sees weights before other callbacks do, and is interrupted."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("interrupted")


def test_a_step_is_noted_before_a_callback_sees_its_weights(tmp_path: Path) -> None:
    private = DPCallback(privacy())
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer(tmp_path, Uploading(), private).fit(Lit(), private.loader(loader()))
    assert list(json.loads((tmp_path / "privacy_steps.json").read_text()).values()) == [2]


class Averaging(L.Callback):  # type: ignore[misc]
    """Whatever it writes, it does so when the training is over."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            next(pl_module.parameters()).mul_(0.5)


def test_what_is_written_into_the_model_after_its_training_is_not_certified(tmp_path: Path) -> None:
    private, training = fit(tmp_path, None, None, Averaging())
    for verdicts in (private.privacy_statement.to_dict()["verdicts"], stated(tmp_path)["verdicts"]):
        assert "the trained parameters were changed after the training ended" in verdicts["content"]["how"]
    assert not stated(tmp_path)["certified"]
    with torch.no_grad():
        next(training.lightning_module.parameters()).mul_(2)
    assert private.privacy_statement.certified, private.privacy_statement.reasons


def test_a_checkpoint_of_the_training_that_is_loaded_again_is_certified(tmp_path: Path) -> None:
    private, training = fit(tmp_path, None, None, saving(tmp_path))
    training.validate(training.lightning_module, loader(8, 16), ckpt_path=tmp_path / "step=5.ckpt", verbose=False)
    assert private.privacy_statement.certified, private.privacy_statement.reasons


def test_evaluation_on_the_training_data_is_refused(tmp_path: Path) -> None:
    private, data = DPCallback(privacy()), loader()
    with pytest.raises(ValueError, match="a data loader of evaluation has training data in it"):
        trainer(tmp_path, private).fit(Lit(), private.loader(data), DataLoader(data.dataset))


def each_epoch(folder: Path) -> Any:
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1)


def test_a_run_goes_on_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    first = DPCallback(privacy())
    training = trainer(
        tmp_path / "a", first, ModelCheckpoint(tmp_path / "a", "{epoch}", save_top_k=-1), Interrupt(2 * PASS + 1)
    )
    with pytest.raises(RuntimeError, match="interrupted"):
        training.fit(Lit(), first.loader(loader()))
    rest = DPCallback(privacy())
    training = trainer(tmp_path / "a", rest, each_epoch(tmp_path / "a"))
    training.fit(Lit(), rest.loader(loader()), ckpt_path=tmp_path / "a" / "epoch=1.ckpt")
    assert rest.privacy_statement.steps == STEPS
    assert training.global_step == STEPS - 1
    assert rest.privacy_statement.certified, rest.privacy_statement.reasons


def test_a_checkpoint_without_an_account_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, saving(tmp_path), max_steps=5).fit(Lit(), loader())
    private = DPCallback(privacy())
    with pytest.raises(ValueError, match=r"has no account.*without ckpt_path"):
        trainer(tmp_path, private, saving(tmp_path)).fit(
            Lit(), private.loader(loader()), ckpt_path=tmp_path / "step=5.ckpt"
        )


def logged(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def test_nothing_private_reaches_a_logger_the_progress_bar_or_other_callbacks(tmp_path: Path, capsys: Any) -> None:
    private, model = DPCallback(privacy()), Lit()
    seen: set[str] = set()

    class Seeing(L.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.update(trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            self.log("callback_loss", model.losses[-1])
            self.log_dict({"callback_losses": model.losses[-1]})

    quick = {"log_every_n_steps": 1, "enable_progress_bar": True, "logger": CSVLogger(tmp_path)}
    training = trainer(tmp_path, private, Seeing(), **quick)
    training.fit(model, private.loader(loader()), loader(8, 16))
    assert len(model.losses) > STEPS
    assert {name for name in seen if "loss" in name or "batch" in name} <= {"val_loss"}
    columns = {name for row in logged(tmp_path) for name in row}
    assert columns == {"epoch", "step", "val_loss"}
    assert "train_loss" not in "".join(capsys.readouterr())
    assert "log" not in vars(model)


def test_a_private_loss_is_logged_if_asked_for_and_marked(tmp_path: Path) -> None:
    private, model = DPCallback(privacy(log_private_loss=True)), Lit()
    training = trainer(tmp_path, private, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    training.fit(model, private.loader(loader()))
    columns = {name for row in logged(tmp_path) for name in row} - {"epoch", "step"}
    assert columns
    assert all(name.startswith("not_private_") for name in columns)
    assert "training losses were logged: they are not private, and not covered" in stated(tmp_path)["account"]


def test_what_is_saved_beside_the_trained_part_and_changes_is_not_certified(tmp_path: Path) -> None:
    private, _ = fit(tmp_path, KeepsAnAverage())
    assert not private.privacy_statement.certified
    assert "['average'] changed in training" in private.privacy_statement.reasons[0]


PUBLIC = privacy(public_evaluation=True)
BROKEN: dict[str, tuple[Any, Any]] = {
    "devices": (lambda at: {"strategy": "ddp", "devices": 2}, lambda at: {}),
    "accumulate_grad_batches": (
        lambda at: {"accumulate_grad_batches": 4},
        lambda at: {"private": privacy(max_physical_batch_size=4)},
    ),
    "gradient_clip_val": (lambda at: {"gradient_clip_val": 1.0}, lambda at: {"private": privacy(max_grad_norm=1.0)}),
    "precision": (lambda at: {"precision": "bf16-true"}, lambda at: {"precision": "bf16-mixed"}),
    "overfit_batches": (lambda at: {"overfit_batches": 2}, lambda at: {}),
    "reload_dataloaders_every_n_epochs": (lambda at: {"reload_dataloaders_every_n_epochs": 1}, lambda at: {}),
    "automatic_optimization": (lambda at: {"model": ByHand()}, lambda at: {}),
    "EarlyStopping": (
        lambda at: {"callbacks": [EarlyStopping("val_loss")]},
        lambda at: {"callbacks": [EarlyStopping("val_loss")], "private": PUBLIC},
    ),
    "ModelCheckpoint(monitor)": (
        lambda at: {"callbacks": [ModelCheckpoint(at, monitor="val_loss")]},
        lambda at: {"callbacks": [ModelCheckpoint(at, monitor="val_loss")], "private": PUBLIC},
    ),
    "BatchSizeFinder": (lambda at: {"callbacks": [BatchSizeFinder()]}, lambda at: {}),
    "LearningRateFinder": (lambda at: {"callbacks": [LearningRateFinder()]}, lambda at: {}),
}


def test_every_refusal_is_tried() -> None:
    assert {refusal.setting for refusal in REFUSALS} == set(BROKEN)


def tried(folder: Path, given: dict[str, Any]) -> DPCallback:
    private = DPCallback(given.pop("private", privacy()))
    model, callbacks = given.pop("model", None) or Lit(), given.pop("callbacks", [])
    training = trainer(folder, private, *callbacks, max_epochs=1, **given)
    if training.world_size > 1:
        training.strategy._lightning_module = model
        private.setup(training, model, "fit")
    if any(isinstance(each, BatchSizeFinder) for each in callbacks):
        model.batch_size, model.train_dataloader = 4, lambda: private.loader(loader(model.batch_size))
        training.fit(model)
    training.fit(model, private.loader(loader()), loader(8, 16))
    return private


@pytest.mark.parametrize("setting", BROKEN)
def test_a_setting_that_breaks_the_account_is_refused_by_name_and_its_remedy_trains(
    tmp_path: Path, setting: str
) -> None:
    broken, remedied = BROKEN[setting]
    with pytest.raises(ValueError) as refused:
        tried(tmp_path, broken(tmp_path))
    assert str(refused.value).startswith(f"{setting}: ")
    if given := remedied(tmp_path):  # else it is left out, as in all other trainings of these tests
        assert tried(tmp_path, given).privacy_statement.steps == PASS


def test_other_loaders_optimizers_schedules_and_endless_trainings_are_refused(tmp_path: Path) -> None:
    private = DPCallback(privacy())
    with pytest.raises(ValueError, match=r"not Poisson-sampled.*callback.loader"):
        trainer(tmp_path, private).fit(Lit(), loader())
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau.*CosineAnnealingLR"):
        tried(tmp_path, {"model": OnPlateau()})
    with pytest.raises(ValueError, match="has no end"):
        fit(tmp_path, max_epochs=-1)


def test_a_callback_keeps_one_account(tmp_path: Path) -> None:
    private, _ = fit(tmp_path, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"seen a training already.*new"):
        trainer(tmp_path, private).fit(Lit(), private.loader(loader()))


def test_the_layers_are_those_of_the_part_that_is_trained(tmp_path: Path) -> None:
    risk = {"0": 0.4, "2": 0.3}
    private, _ = fit(tmp_path, None, privacy(risk=risk), max_epochs=1)
    assert list(private.engine.layers.names) == ["0", "2"]


class SkipsBatches(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return None if self.trainer.global_step == 2 else output


def test_a_training_step_without_a_loss_is_refused_in_a_sentence(tmp_path: Path) -> None:
    private, model = DPCallback(privacy()), SkipsBatches()
    with pytest.raises(ValueError, match=r"training_step returned None.*Return a loss for every batch"):
        trainer(tmp_path, private).fit(model, private.loader(loader()))
    assert "training_step" not in vars(model)
    assert stated(tmp_path)["steps"] == 2
