"""`DPCallback`: what makes a Lightning trainer private.

private = DPCallback(Privacy(target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0))
L.Trainer(callbacks=[private], max_epochs=3).fit(model, private.loader(loader))
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lmdp.integrations.account import TrainerAccount
from lmdp.integrations.arguments import BY_EVALUATION, PUBLIC, Refusal
from lmdp.integrations.loading import TrainerLoader, refuse_members
from lmdp.integrations.privacy import Privacy
from lmdp.private import PrivacyEngine, PrivacyStatement

KEY = "lmdp"
"""Of the account, in a checkpoint."""
PRECISIONS = ("32-true", "64-true", "bf16-mixed")


def _follows(kind: type) -> Callable[[Any], bool]:
    return lambda trainer: any(
        isinstance(each, kind) and getattr(each, "monitor", None) is not None for each in trainer.callbacks
    )


def _has(kind: type) -> Callable[[Any], bool]:
    return lambda trainer: any(isinstance(each, kind) for each in trainer.callbacks)


REFUSALS = (
    Refusal(
        "devices",
        lambda trainer: trainer.world_size > 1,
        "each process would state its own epsilon, and together they spend more",
        "Train in one process: devices=1, num_nodes=1.",
    ),
    Refusal(
        "accumulate_grad_batches",
        lambda trainer: trainer.accumulate_grad_batches != 1,
        "gradients of several batches would be added up before they are clipped",
        "Leave it out, multiply the batch_size of the data loader by it, and pass Privacy(max_physical_batch_size=...) "
        "with the batch_size before.",
    ),
    Refusal(
        "gradient_clip_val",
        lambda trainer: trainer.gradient_clip_val is not None,
        "it would clip the sum of a batch, which protects nobody; what is clipped is each example's gradient",
        "Leave it out, and pass Privacy(max_grad_norm=...).",
    ),
    Refusal(
        "precision",
        lambda trainer: str(trainer.precision) not in PRECISIONS,
        "parameters in half precision cannot be trained privately, and a GradScaler leaves out steps",
        f"Use one of {', '.join(PRECISIONS)}.",
    ),
    Refusal(
        "overfit_batches",
        lambda trainer: bool(trainer.overfit_batches),
        "the same batches would be taken again instead of being drawn",
        "Leave it out.",
    ),
    Refusal(
        "reload_dataloaders_every_n_epochs",
        lambda trainer: bool(trainer.reload_dataloaders_every_n_epochs),
        "draws go on in one data loader, and another one would draw for itself",
        "Leave it out.",
    ),
    Refusal(
        "automatic_optimization",
        lambda trainer: not trainer.lightning_module.automatic_optimization,
        "a training_step that steps by itself is not followed by this callback",
        "Let Lightning step, or call PrivacyEngine.make_private in a loop of your own.",
    ),
    Refusal(
        "EarlyStopping",
        _follows(EarlyStopping),
        f"when the training ends would follow from a measurement: {BY_EVALUATION}",
        f"Leave it out, {PUBLIC}",
        unless="public_evaluation",
    ),
    Refusal(
        "ModelCheckpoint(monitor)",
        _follows(ModelCheckpoint),
        f"which checkpoints stay would follow from a measurement: {BY_EVALUATION}",
        f"Leave monitor out, {PUBLIC}",
        unless="public_evaluation",
    ),
    Refusal(
        "BatchSizeFinder",
        _has(BatchSizeFinder),
        "another batch size is another sampling rate, for which epsilon was not computed",
        "Leave it out; for batches that do not fit into memory pass Privacy(max_physical_batch_size=...).",
    ),
    Refusal(
        "LearningRateFinder",
        _has(LearningRateFinder),
        "the learning rate would follow private losses",
        "Leave it out, and choose the rate on public data.",
    ),
)


class DPCallback(L.Callback):  # type: ignore[misc]
    """Keeps the account of one `fit`: stops it at the target epsilon, saves and resumes it with the trainer's
    checkpoints, keeps what `training_step` logs to itself, and ends with privacy.json in `output_dir` (the trainer's
    default_root_dir unless given). The trainer's `global_step` counts the engine's steps.

    `training_step` calls either the LightningModule itself or, where all that is trained is in one of its children,
    that child.
    """

    def __init__(self, privacy: Privacy, output_dir: str | Path | None = None) -> None:
        self.privacy = privacy
        self.account = TrainerAccount(privacy, output_dir or "")
        self._output_dir = output_dir
        self._loader: TrainerLoader | None = None
        self._saved: Mapping[str, Any] | None = None
        self._trainer: Any = None
        self._passing_over = False

    def loader(self, loader: DataLoader[Any]) -> Any:
        """What `fit` is given in the place of a data loader: the same data, Poisson-sampled, a batch for every step."""
        self._loader = TrainerLoader(loader, self.account, self._pass_over)
        return self._loader

    @property
    def engine(self) -> PrivacyEngine:
        return self.account.engine

    @property
    def privacy_statement(self) -> PrivacyStatement:
        return self.account.privacy_statement()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if self.account.attached:
            raise RuntimeError(
                "this DPCallback has seen a training already, and what it spent is stated. Make a new one, with a new "
                "model and a new trainer; to go on from a checkpoint, call its fit(..., ckpt_path=...)."
            )
        self._refuse(trainer)
        self._trainer = trainer
        self.account.output_dir = Path(self._output_dir or trainer.default_root_dir)
        for logging in (pl_module, *trainer.callbacks):  # Lightning has given callbacks the module's own
            object.__setattr__(logging, "log", self._gate(logging.log))
        object.__setattr__(pl_module, "training_step", _with_a_loss(pl_module.training_step))

    def _refuse(self, trainer: Any) -> None:
        for refusal in (each for each in REFUSALS if each.applies(trainer, self.privacy)):
            raise ValueError(f"{refusal.setting}: {refusal.why}. {refusal.remedy}")

    def _gate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is logged while it trains follows from private data; what is measured in validation does not."""

        def log(name: str, *args: Any, **given: Any) -> None:
            if not self._trainer.training:
                original(name, *args, **given)
            elif self.privacy.log_private_loss and not self._passing_over:
                original(f"not_private_{name}", *args, **given)

        return log

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        if KEY not in checkpoint:
            raise ValueError(
                "the checkpoint has no account: nobody knows what its weights have cost. Resume from one that was "
                "saved with a DPCallback, or begin a new training without ckpt_path."
            )
        self._saved = checkpoint[KEY]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.account.attached:
            checkpoint[KEY] = self.account.state_dict()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is there: model, optimizer, and what was loaded from a checkpoint."""
        self._refuse(trainer)  # once more: finders train before `setup`
        if self._loader is None or trainer.train_dataloader is not self._loader:
            raise ValueError(
                "the trainer was given a data loader that is not Poisson-sampled. Pass it through this callback: "
                "trainer.fit(model, callback.loader(loader))."
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(f"there are {len(trainer.optimizers)} optimizers; a private training has 1. Use one.")
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise ValueError(
                "the learning rate follows a number that is measured (ReduceLROnPlateau). Use a schedule that follows "
                "the steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
            )
        if trainer.global_step and self._saved is None:
            raise ValueError(
                "the training goes on from a checkpoint without an account: nobody knows what its weights have cost. "
                "Resume from one that was saved with a DPCallback."
            )
        steps = trainer.estimated_stepping_batches
        if not (steps > 0 and math.isfinite(steps)):
            raise ValueError("the training has no end, so that no noise fits it. Set max_epochs or max_steps.")
        beside = [] if trainer.ckpt_path is None else [Path(trainer.ckpt_path).parent]
        state = None if self._saved is None else self.account.charged(self._saved, *beside)
        parts = private_module(pl_module), trainer.optimizers[0], self._loader.plain
        self.account.attach(*parts, steps=int(steps), state=state, saved_whole=pl_module)

    def _pass_over(self, batch: Any) -> None:
        """A batch of which no step is made, through all that one goes through."""
        trainer, self._passing_over = self._trainer, True
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        try:
            batch = module.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            self._tell(trainer, "on_train_batch_start", batch, trainer.global_step)
            numbered = len(inspect.signature(module.training_step).parameters) > 1
            output = trainer.strategy.training_step(batch, *([trainer.global_step] if numbered else []))
            loss = output["loss"] if isinstance(output, Mapping) else output
            loss = loss / trainer.accumulate_grad_batches  # as Lightning does, so that both have one graph
            optimizer.zero_grad()
            self._tell(trainer, "on_before_backward", loss)
            module.backward(loss)
            self._tell(trainer, "on_after_backward")
            self._tell(trainer, "on_before_optimizer_step", optimizer)
            optimizer.step()
        finally:
            self._passing_over = False

    def _tell(self, trainer: Any, event: str, *args: Any) -> None:
        """Callbacks of the user and the module of what comes before a step: what they make of a batch counts too."""
        module = trainer.lightning_module
        for callback in trainer.callbacks:
            if callback is not self and not type(callback).__module__.startswith(("lightning.", "pytorch_lightning.")):
                getattr(callback, event)(trainer, module, *args)
        getattr(module, event)(*args)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._refuse_members(trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._refuse_members(trainer.test_dataloaders)

    def _refuse_members(self, loaders: Any) -> None:
        if self._loader is not None and loaders is not None:
            data = [getattr(each, "dataset", None) for each in CombinedLoader(loaders, "sequential").flattened]
            refuse_members("a data loader of evaluation", data, self._loader.dataset)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.account.exhausted:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(pl_module)
        if stage == "fit":
            self.account.publish()  # once more: others have had their on_train_end since

    def _end(self, module: Any) -> None:
        self.account.close()
        for name in ("log", "training_step"):
            vars(module).pop(name, None)


def _with_a_loss(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """The same; one that gives no loss is refused. Lightning would skip the batch: a step that nobody makes."""

    @functools.wraps(training_step)
    def step(*args: Any, **given: Any) -> Any:
        output = training_step(*args, **given)
        if (output.get("loss") if isinstance(output, Mapping) else output) is None:
            raise ValueError(
                "training_step returned None in the place of a loss: Lightning would skip the batch, and who is in it "
                "would decide whether a step is made. Return a loss for every batch; of one without rows it may be "
                "0 * output.sum()."
            )
        return output

    return step


def private_module(module: Any) -> Any:
    """The child of a LightningModule that holds all that is trained, if there is one: people call `self.model(x)` as
    often as `self(x)`, and the whole is never called then."""
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    holding = [child for child in module.children() if trained & {id(p) for p in child.parameters()}]
    alone = len(holding) == 1 and trained <= {id(p) for p in holding[0].parameters()}
    return holding[0] if alone else module
