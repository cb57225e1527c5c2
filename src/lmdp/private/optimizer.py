"""The door between the user's loop and the private step: `optimizer.step` and `optimizer.zero_grad`.

The optimizer stays the user's object, of its own class. Its step first turns the last backward pass into released
gradients, then runs as always. Without this door `.grad` stays empty, so nothing is ever trained without noise.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from lmdp.accounting import Ledger
from lmdp.private.sampling import Feed, Handout
from lmdp.private.step import PrivateStep


class Door:
    """Stands in front of one optimizer until `remove`."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: PrivateStep, ledger: Ledger, feed: Feed | None) -> None:
        self.optimizer = optimizer
        self.step = step
        self.ledger = ledger
        self.feed = feed
        self.foreign_steps = 0
        self._private = {id(p): p.dtype for p in step.tape.parameters.values()}
        self._before = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
        original_step, original_zero_grad = optimizer.step, optimizer.zero_grad

        def private_step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            return self._pass(original_step, closure)

        def private_zero_grad(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            step.tape.discard()
            original_zero_grad(*args, **kwargs)

        # Bound methods, because learning-rate schedulers rebind `optimizer.step.__func__`.
        vars(optimizer)["step"] = types.MethodType(private_step, optimizer)
        vars(optimizer)["zero_grad"] = types.MethodType(private_zero_grad, optimizer)

    def remove(self) -> None:
        for name, before in self._before.items():
            if before is None:
                vars(self.optimizer).pop(name, None)
            else:
                vars(self.optimizer)[name] = before

    def _pass(self, original_step: Any, closure: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        handed = self._check_batch()
        last = handed is None or handed.last
        if last:
            self.ledger.check_next()
        if handed is None or not handed.empty or self.step.tape.complete:
            self._absorb()
        if last:
            self.ledger.record_step()  # before anything is released: a crash from here on has been paid for
            self.step.release(self.ledger.steps)
            original_step()
        return loss

    def _absorb(self) -> None:
        try:
            self.step.absorb()
        except BaseException:
            if self.feed is not None:
                self.feed.lose()  # a loop that catches this and goes on has skipped a batch
            raise

    def _check_parameters(self) -> None:
        """Nothing may have become trainable, or stopped being, since the privacy analysis was made."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._private and p.dtype != self._private[id(p)]:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} became {p.dtype} after make_private: bounds and noise "
                        f"were set up for {self._private[id(p)]}. Convert the model first; autocast is fine."
                    )
                if (id(p) in self._private) != p.requires_grad or (id(p) not in self._private and p.grad is not None):
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} was added to the optimizer, frozen or unfrozen after "
                        "make_private: it would be trained without noise, or counted without being trained. Call "
                        "engine.detach() and make_private again."
                    )

    def _check_batch(self) -> Handout | None:
        """What the loader handed out for this step (None if it did not), and that the model saw the same."""
        handed = None if self.feed is None else self.feed.take()
        seen = self.step.tape.batch_size
        if handed is None or handed.first:
            self.step.forget()  # parts of a batch that was abandoned or interrupted must not join another batch
        if handed is None:
            self.foreign_steps += self.feed is not None
            return None
        if seen is not None and seen != handed.size:  # without the numbers: the size of a batch is private
            assert self.feed is not None
            self.feed.lose()
            raise RuntimeError(
                "the model was run on another number of examples than the data loader handed out: rows of the batch "
                "would be mistaken for examples. Pass whole examples to the model, batch first; for several views of "
                "an example call the model once per view."
            )
        return handed
