"""What makes a trainer of transformers private: the part that `DPTrainer` and its twin have in common.

Only what a Trainer lets one override is used: its loader, its batches, its training step, its log, and its callbacks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lmdp.integrations.account import TrainerAccount
from lmdp.integrations.arguments import adapted, refuse_followers
from lmdp.integrations.loading import TrainerLoader, drawn_by, refuse_collation, refuse_members, refuse_stream
from lmdp.integrations.privacy import Privacy
from lmdp.private import PrivacyEngine, PrivacyStatement

if TYPE_CHECKING:
    from transformers import Trainer as Following
else:
    Following = object  # any trainer of transformers, or one made of it, follows in the order of bases

CARRIED = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class PrivateTraining(Following):  # type: ignore[misc]
    """Before a class of trainers in the order of bases. `privacy=` is what it takes more than they do."""

    args: Any
    optimizer: Any

    def __init__(self, model: Any = None, args: Any = None, *more: Any, privacy: Privacy, **given: Any) -> None:
        if args is not None:
            args, privacy = adapted(args, privacy)
        self.privacy = privacy
        super().__init__(model, args, *more, **given)
        if args is None:
            self.args, self.privacy = adapted(self.args, privacy)  # those that the trainer makes where there are none
        self.account = TrainerAccount(self.privacy, self.args.output_dir)
        self.resumed_from: Path | None = None
        self._state: dict[str, Any] | None = None
        self._ends_at = math.inf
        others = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        refuse_members("eval_dataset", others, self.train_dataset)
        self.callback_handler.callbacks.insert(0, KeepAccount(self))

    @property
    def engine(self) -> PrivacyEngine:
        """Of the training that has begun."""
        return self.account.engine

    @property
    def privacy_statement(self) -> PrivacyStatement:
        """What the training so far promises."""
        return self.account.privacy_statement()

    def private_module(self) -> nn.Module:
        """What is made private: all that is trained."""
        model: nn.Module = self.model
        return model

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **given: Any) -> Any:
        """As the trainer's own. Ends with privacy.json in output_dir."""
        if trial is not None:
            self.hyperparameter_search()
        if self.account.attached:
            raise RuntimeError(
                "this trainer has trained already, and what it spent is stated. Make a new trainer with a new model; "
                "to go on from a checkpoint, call its train(resume_from_checkpoint=...)."
            )
        refuse_followers(self.callback_handler.callbacks, self.lr_scheduler, self.privacy)
        folder = self._checkpoint(resume_from_checkpoint)
        self._state = None if folder is None else self.account.read(folder)
        self.resumed_from = folder
        try:
            output = super().train(None if folder is None else str(folder), trial, *more, **given)
        finally:
            self.account.close()
        metrics = self.account.public(output.metrics)
        shown = output.training_loss if self.privacy.log_private_loss else math.nan
        return output._replace(training_loss=shown, metrics=metrics)

    def _checkpoint(self, resume: Any) -> Path | None:
        if resume is None or resume is False:
            return None
        if resume is not True:
            return Path(resume)
        newest: str | None = get_last_checkpoint(self.args.output_dir)
        if newest is None:
            raise ValueError(
                f"there is no checkpoint in {self.args.output_dir}. Call train() without resume_from_checkpoint."
            )
        return Path(newest)

    def attach(self) -> None:
        """Everything is there: model, optimizer, schedule, and what was loaded from a checkpoint."""
        refuse_followers(self.callback_handler.callbacks, self.lr_scheduler, self.privacy)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # not the one that Accelerate puts around it
        plain = drawn_by(self.callback_handler.train_dataloader, self)
        self.account.attach(self.private_module(), optimizer, plain, steps=self.state.max_steps, state=self._state)

    def save_account(self, folder: Path) -> None:
        """Beside a checkpoint."""
        self.account.save(folder)

    def get_train_dataloader(self) -> Any:
        """The trainer's own data and collation, drawn by Poisson sampling while it trains."""
        refuse_stream(self.train_dataset)
        its: DataLoader[Any] = super().get_train_dataloader()
        refuse_collation(its)
        carried = {name: getattr(its, name) for name in CARRIED}
        if its.num_workers:
            carried |= {"prefetch_factor": its.prefetch_factor, "persistent_workers": its.persistent_workers}
        plain: DataLoader[Any] = DataLoader(its.dataset, batch_size=self._train_batch_size, shuffle=True, **carried)
        return TrainerLoader(plain, self.account, self._pass_over)

    def _pass_over(self, batch: Any) -> None:
        """A batch of which no step is made, through all that one goes through."""
        self.current_gradient_accumulation_steps = 1
        (batch,), _ = self.get_batch_samples(iter([batch]), 1, self.args.device)
        self.training_step(self.model_wrapped, batch, None)
        self.optimizer.step()
        self.model_wrapped.zero_grad()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *more: Any) -> tuple[list[Any], None]:
        """Without `num_items_in_batch`: a loss divided by it would depend on who else was drawn."""
        if self.state.global_step >= self._ends_at:
            return [], None
        batches: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, *more)
        return batches[0], None

    def training_step(self, *args: Any, **given: Any) -> Tensor:
        """The loss, if it is to be logged; else zero, so that nothing that adds it up holds anything."""
        loss: Tensor = super().training_step(*args, **given)
        return loss if self.privacy.log_private_loss else torch.zeros_like(loss)

    def compute_loss_context_manager(self) -> Any:
        """Accelerate switches bfloat16 on inside the model, where guards that compare examples do not see it."""
        contexts = super().compute_loss_context_manager()
        contexts.enter_context(self.accelerator.autocast())
        return contexts

    def log(self, logs: dict[str, float], *args: Any, **given: Any) -> None:
        super().log(self.account.public(logs), *args, **given)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the number follows from how many examples were drawn."""
        return 0

    def save_model(self, output_dir: str | None = None, *more: Any, **given: Any) -> None:
        """With privacy.json beside it."""
        self.account.publish(output_dir or self.args.output_dir, self.model)
        super().save_model(output_dir, *more, **given)

    def evaluate(self, eval_dataset: Any = None, *more: Any, **given: Any) -> Any:
        """As the trainer's own; what it measures is logged, so that training data are refused."""
        others = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        refuse_members("eval_dataset", others, self.train_dataset)
        return super().evaluate(eval_dataset, *more, **given)

    def hyperparameter_search(self, *args: Any, **given: Any) -> Any:
        raise ValueError(
            "hyperparameter_search trains on the same people many times, and chooses: together that spends more than "
            "any of the trainings states. Search on public data, or train one after another and add up what they spend."
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Not saved: whoever knows it knows the dropout of the steps that follow."""

    def _load_best_model(self) -> None:
        self.account.close()  # what is loaded was released by one of these steps, which the account sees
        super()._load_best_model()


class KeepAccount(TrainerCallback):  # type: ignore[misc]
    """What a private training does at the events of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.attach()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An epoch in which a run was interrupted has only its rest of steps."""
        each = len(self._trainer.callback_handler.train_dataloader)
        self._trainer._ends_at = (state.global_step // each + 1) * each

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        state.epoch = state.global_step / len(trainer.callback_handler.train_dataloader)
        control.should_training_stop |= trainer.account.exhausted

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.save_account(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
