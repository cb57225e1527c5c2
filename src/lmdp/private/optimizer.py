"""The private step of an optimizer: what the user's `optimizer.step()` and `zero_grad()` do.

The optimizer stays the user's object, of its own class. Its step first turns the last backward pass into released
gradients, then runs as always. Without this `.grad` stays empty, so nothing is ever trained without noise.
"""

from __future__ import annotations

from typing import Any

import torch

from lmdp.accounting import Ledger
from lmdp.guards import Watch, refuse_scaler
from lmdp.guards.delivery import Delivery, DeliveryLog
from lmdp.private.step import PrivateStep
from lmdp.processes import Parted


class PrivateOptimizer:
    """Stands in for `step` and `zero_grad` of one optimizer until it is detached."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, step: PrivateStep, ledger: Ledger, log: DeliveryLog | None, watch: Watch
    ) -> None:
        self.optimizer = optimizer
        self.foreign_steps = 0
        self._step = step
        self._ledger = ledger
        self._log = log
        self._watch = watch
        self._dtypes = {id(p): p.dtype for p in step.capture.parameters.values()}
        attachment = step.capture.attachment
        attachment.set(optimizer, "_step_supports_amp_scaling", True)  # or GradScaler fails before it calls step
        self._original_step = attachment.replace(optimizer, "step", self._private_step)
        self._original_zero_grad = attachment.replace(optimizer, "zero_grad", self._private_zero_grad)

    def _private_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._step.capture.discard()
        self._original_zero_grad(*args, **kwargs)

    def _private_step(self, closure: Any = None) -> Any:
        with self._step.options.held.group.reaching_all():
            return self._checked_step(closure)

    def _checked_step(self, closure: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        refuse_scaler(self.optimizer)
        self._watch.check()
        delivery = self._check_batch()
        if last := delivery is None or delivery.last:
            self._ledger.check_next()
        if delivery is not None and delivery.empty:
            self._step.capture.discard()  # what the model was run on in its place counts for nothing
        elif delivery is not None and delivery.company:
            self._watch.in_company(self._step.capture.take(), delivery)  # handed out to be looked at, and for nothing
        else:
            try:
                self._step.absorb()
                self._watch.absorbed()
            except BaseException:
                self._mark_lost()
                raise
        if last:
            self._meet(delivery)
            self._ledger.record_step()  # before anything is released: a crash from here on has been paid for
            self._step.options.observer.before_release()
            self._step.release(self._ledger.steps)
            self._step.options.observer.after_release()
            with self._watch.released(self.optimizer):
                self._original_step()
            self._watch.settle()
        return loss

    def _meet(self, delivery: Delivery | None) -> None:
        """All processes are about to release the same step, or none does."""
        held, draw = self._step.options.held, -1 if delivery is None else delivery.number
        try:
            held.group.meet(self._ledger.steps + 1, draw, held.compared(self._watch.content, self.optimizer))
        except Parted:
            self._mark_lost()
            raise

    def _check_parameters(self) -> None:
        """Nothing may have become trainable, or stopped being, since the privacy analysis was made."""
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            private = id(p) in self._dtypes
            if private and p.dtype != self._dtypes[id(p)]:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} became {p.dtype} after make_private: bounds and noise "
                    f"were set up for {self._dtypes[id(p)]}. Convert the model first; autocast is fine."
                )
            if private != p.requires_grad or (not private and p.grad is not None):
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was added to the optimizer, frozen or unfrozen after "
                    "make_private: it would be trained without noise, or counted without being trained. Call "
                    "engine.detach() and make_private again."
                )

    def _check_batch(self) -> Delivery | None:
        """What the loader delivered for this step (None if it did not), and that the model saw the same."""
        delivery = None if self._log is None else self._log.mark_used()
        seen = self._step.capture.batch_size
        if delivery is None or delivery.first:
            self._step.forget()  # parts of a batch that was abandoned or interrupted must not join another batch
        if delivery is None:
            self.foreign_steps += self._log is not None
            return None
        if seen is not None and seen != delivery.size and not delivery.empty:
            self._mark_lost()  # and without the numbers: the size of a batch is private
            raise RuntimeError(
                "the model was run on another number of examples than the data loader handed out. Pass whole examples "
                "to the model, batch first (fewer at once: max_physical_batch_size in make_private); views of one as "
                "lmdp.Views or unit=lmdp.Unit('example', views). A wrapper that fetches ahead must go: use num_workers."
            )
        return delivery

    def _mark_lost(self) -> None:
        """A loop that catches the error and goes on has skipped a batch."""
        if self._log is not None:
            self._log.mark_lost()
