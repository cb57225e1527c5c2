"""The account of one trainer's run: its engine, when it must stop, what is saved beside checkpoints, privacy.json.

    output_dir/privacy.json                     the statement, when the training ends
    output_dir/privacy_steps.json               how many steps each run here has made, written before one is released
    output_dir/checkpoint-N/privacy_state.json  what a run that goes on from this checkpoint must know

A run that is interrupted loses the steps after its last checkpoint, but somebody may have seen what came of them (an
evaluation, a log). So they stay charged: a resumed run makes as many steps fewer. A checkpoint knows where the steps of
its run are noted; where that file is nowhere to be found, nobody knows what was spent, and the statement says so.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from lmdp.accounting import check_delta
from lmdp.guards import NOT_ESTABLISHED, VIOLATED, Verdict, unnoised
from lmdp.guards.looks import steps_among
from lmdp.integrations.left import Left
from lmdp.integrations.privacy import Privacy
from lmdp.private import PrivacyEngine, PrivacyStatement
from lmdp.private.sampling import PoissonLoader
from lmdp.processes import sample_rate_of, steps_per_pass

STATE, STEPS, STATEMENT = "privacy_state.json", "privacy_steps.json", "privacy.json"
PRIVATE = ("loss", "train_loss")
UNPUBLISHED = ("grad_norm", "total_flos", "num_input_tokens_seen", "train_tokens_per_second")
"""Follow from who was drawn, or say nothing here: gradients appear only inside the private step."""
SHARE_OF_EPSILONS = 0.01
"""Of the time of a training, at most, for epsilons that are only logged."""


class TrainerAccount:
    """Of one run. Make it, `attach` it when there are model, optimizer and loader, `close` it at the end."""

    def __init__(self, privacy: Privacy, output_dir: str | Path) -> None:
        self.privacy, self.output_dir = privacy, Path(output_dir)
        self.statement: PrivacyStatement | None = None
        self.lost_steps = 0
        self._engine: PrivacyEngine | None = None
        self._loader: PoissonLoader | None = None
        self._last: dict[str, Any] | None = None
        self._most, self._name, self._epsilon_due = 0, secrets.token_hex(16), 0.0
        self._saved_whole: nn.Module | None = None
        self._rest: dict[str, str] = {}
        self._changed: set[str] = set()
        self._released: set[str] = set()
        self._left: Left | None = None
        self._not_noted = ""

    @property
    def attached(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> PrivacyEngine:
        if self._engine is None:
            raise RuntimeError("the training has not begun: there is no account yet. Call train() or fit() first.")
        return self._engine

    @property
    def loader(self) -> PoissonLoader:
        if self._loader is None:
            raise RuntimeError("batches are drawn only while the trainer trains. Call train() or fit().")
        return self._loader

    @property
    def steps(self) -> int:
        return self.engine.steps

    @property
    def exhausted(self) -> bool:
        """Whether no further step may be made."""
        return self._engine is None or self.steps >= self._most

    @property
    def epsilon(self) -> float:
        return self.engine.get_epsilon(self.privacy.target_delta, quiet=True)

    def attach(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        steps: int,
        state: Mapping[str, Any] | None = None,
        saved_whole: nn.Module | None = None,
        looks_besides: bool = True,
    ) -> None:
        """Make a training of so many steps private; `state`: go on from there.

        saved_whole    what checkpoints hold, where that is more than the module
        looks_besides  whether batches that are only looked at come besides those of a pass; else the steps are that
                       many batches, and looks take the place of some
        """
        privacy, engine = self.privacy, PrivacyEngine(self.privacy.accountant, secure_mode=self.privacy.secure_mode)
        rate, size = sample_rate_of(loader)
        allowed = bool(privacy.options.get("allow_large_delta"))
        check_delta(privacy.target_delta, size, allowed=allowed)
        parts: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": loader}
        options = {**privacy.made_private_with(), "looks_besides": looks_besides}
        if privacy.noise_multiplier is not None:
            *_, drawn = engine.make_private(**parts, **options, noise_multiplier=privacy.noise_multiplier)
        else:
            target: dict[str, Any] = {"target_epsilon": privacy.target_epsilon, "target_delta": privacy.target_delta}
            *_, drawn = engine.make_private_with_epsilon(
                **parts, **options, **target, epochs=steps / steps_per_pass(rate)
            )
        assert isinstance(drawn, PoissonLoader)
        try:
            apart = looks_besides or privacy.max_physical_batch_size or not privacy.options.get("check_mixing", True)
            self._most = self._affordable(engine, steps if apart else steps_among(steps))
            self._go_on(engine, state)
        except BaseException:
            engine.detach()
            raise
        self._engine, self._loader, self._module = engine, drawn, module
        note = weakref.WeakMethod(self.step_made)  # what outlives this account does not keep it
        engine._attached.ledger.noting = lambda: (noting := note()) and noting()
        if saved_whole is not None:
            self._saved_whole, self._rest = saved_whole, unnoised(saved_whole)
        if privacy.options.get("seed") is None:
            draw_secret_seeds()

    def _affordable(self, engine: PrivacyEngine, steps: int) -> int:
        """How many of the steps fit the target."""
        target, delta = self.privacy.target_epsilon, self.privacy.target_delta
        if self.privacy.noise_multiplier is None or target is None:
            return steps
        fits, more = 0, steps + 1
        while more - fits > 1:
            middle = (fits + more) // 2
            fits, more = (middle, more) if engine.mechanism.epsilon(middle, delta) <= target else (fits, middle)
        if not fits:
            raise ValueError(
                f"one step with noise_multiplier {self.privacy.noise_multiplier} spends epsilon "
                f"{engine.mechanism.epsilon(1, delta):.4g}, above the target {target}. Raise noise_multiplier, or "
                "leave it out: it is then computed from the target."
            )
        return fits

    def _go_on(self, engine: PrivacyEngine, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            engine.load_state_dict(state)
            self._name = str(state["name"])
        delta = self.privacy.target_delta
        charged = engine.steps + engine._attached.open_lineage().lost  # of this training, whichever were resumed
        together, alone = engine.get_epsilon(delta, quiet=True), engine.mechanism.epsilon(charged, delta)
        if together > alone and not self.privacy.compose:
            raise ValueError(
                f"the model begins with weights that earlier private trainings released: with those, epsilon is "
                f"{together:.4g} before the first step, and target_epsilon would not hold for all of them together. "
                "Begin with weights that no private training released, or pass Privacy(compose=True): the target is "
                "then that of this training alone, and the statement adds up all."
            )

    def step_made(self) -> None:
        """A step is about to be released: note it in `output_dir`, so that it stays charged whatever happens."""
        if self.statement is not None:
            return  # what the optimizer does from now on is no part of this training
        path = self.output_dir / STEPS
        write_json(path, {**_steps_noted(path), self._name: self.steps}, lasting=False)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. Whatever it holds of random generators, the next step draws from others."""
        if self._last is not None:
            return self._last
        state, changed = self.engine.state_dict(), self._changes()
        self._released.add(state["parameters"])
        state |= {"name": self._name, "lost_steps": self.lost_steps, "changed": changed}
        state |= {"noted_in": str((self.output_dir / STEPS).absolute()), "not_noted": self._not_noted}
        state["released"] = sorted(self._released)
        if self.privacy.options.get("seed") is None:
            draw_secret_seeds()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: into a training that was just attached, before its first step."""
        self._go_on(self.engine, self.charged(state))
        if self.privacy.options.get("seed") is None:
            draw_secret_seeds()

    def save(self, folder: Path) -> None:
        """Beside a checkpoint."""
        write_json(folder / STATE, self.state_dict())

    def read(self, folder: Path) -> dict[str, Any]:
        """What `save` wrote, with all steps that are known to have been made since."""
        path = folder / STATE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {STATE}: nobody knows what its weights have cost. Resume from a checkpoint that a "
                "private trainer has saved, or begin a new training without resuming."
            )
        try:
            state = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not readable ({error}). Resume from another checkpoint.") from None
        return self.charged(state, folder, folder.parent)

    def charged(self, state: Mapping[str, Any], *beside: Path) -> dict[str, Any]:
        """A state with all steps of its run that are noted in `output_dir`, `beside`, or where its run noted them: lost
        ones are paid for too."""
        try:
            name, steps = str(state["name"]), int(state["steps"])
            lost, changed = int(state.get("lost_steps", 0)), [str(name) for name in state.get("changed", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the saved privacy state lacks {error}. Resume from another checkpoint.") from None
        places = dict.fromkeys(at / STEPS for at in (self.output_dir, *beside))
        places |= {Path(at): None for at in [state.get("noted_in")] if isinstance(at, str)}
        noted = [steps_of[name] for steps_of in map(_steps_noted, places) if name in steps_of]
        charged = max([steps, *noted])
        self._not_noted = str(state.get("not_noted") or "")
        if not noted:
            self._not_noted = (
                f"how many steps the run made after its checkpoint is noted in none of {[str(at) for at in places]}. "
                f"Copy {STEPS} of the interrupted run into {self.output_dir}, and resume again"
            )
            logging.getLogger(__name__).warning("not certified: %s", self._not_noted)
        self.lost_steps = lost + charged - steps
        self._changed.update(changed)
        self._released.update(map(str, state.get("released", ())))
        if charged > steps:
            logging.getLogger(__name__).warning(
                "%d steps after the checkpoint were lost; they stay charged, and as many fewer are made",
                charged - steps,
            )
        return {**state, "steps": charged}

    def public(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """A trainer's log without what follows from private data; now and then with epsilon, which takes time."""
        shown = {name: value for name, value in logs.items() if name not in (*PRIVATE, *UNPUBLISHED)}
        if self.privacy.log_private_loss:
            shown |= {f"not_private_{name}": logs[name] for name in PRIVATE if name in logs}
        begun = time.monotonic()
        if self.statement is None and self.attached and "learning_rate" in logs and begun >= self._epsilon_due:
            shown["epsilon"] = self.epsilon
            done = time.monotonic()
            self._epsilon_due = done + (done - begun) / SHARE_OF_EPSILONS
        return shown

    def _changes(self) -> list[str]:
        """Names in the saved whole that training has changed without noise."""
        if self._saved_whole is not None:
            now = unnoised(self._saved_whole)
            self._changed |= {name for name in {*now, *self._rest} if now.get(name) != self._rest.get(name)}
        return sorted(self._changed)

    def privacy_statement(self) -> PrivacyStatement:
        """What the steps so far promise; once the training is over, of the model as it left it."""
        if self.statement is not None and self._left is not None:
            return _for_other_content(self.statement, self._left.said())
        statement = self.engine.privacy_statement(self.privacy.target_delta)
        if self._not_noted and statement.verdicts["account"].state != VIOLATED:
            account = Verdict(NOT_ESTABLISHED, self._not_noted)
            statement = replace(statement, verdicts={**statement.verdicts, "account": account})
        changed, carry = self._changes(), "changed in training, carry no noise, and are saved with the model"
        told = f"{changed} {carry}; keep what is measured in training in a plain attribute" if changed else ""
        return _for_other_content(statement, told)

    def stated(self, model: nn.Module | None = None) -> dict[str, Any]:
        """The content of privacy.json, beside what was trained or the `model` that is saved."""
        statement = self.privacy_statement()
        if model is not None and self._left is not None and not self._left.holds(model):
            statement = _for_other_content(statement, "what is saved is not the model that was trained")
        said = {
            f"{self.lost_steps} of the steps were lost in an interruption, and stay charged": self.lost_steps,
            "training losses were logged: they are not private, and not covered": self.privacy.log_private_loss,
            "evaluation data were declared public": self.privacy.public_evaluation,
        }
        return {**statement.to_dict(), "account": [sentence for sentence, holds in said.items() if holds]}

    def publish(self, folder: str | Path | None = None, model: nn.Module | None = None) -> None:
        """Write privacy.json beside what is released."""
        if self.attached:
            write_json(Path(folder or self.output_dir) / STATEMENT, self.stated(model))

    def close(self) -> None:
        """State what was spent, write it, and make the model ordinary again."""
        if self._engine is None or self.statement is not None:
            return
        statement, self._last = self.privacy_statement(), self.state_dict()
        run = self._engine._attached
        self._left = Left(self._saved_whole or self._module, run.capture.parameters, self._released)
        self.statement = statement
        self._engine.detach()
        self._loader = None
        self.publish()


def _for_other_content(statement: PrivacyStatement, said: str) -> PrivacyStatement:
    """The same, of a model of which this is said; nothing has to be."""
    if not said:
        return statement
    return replace(statement, verdicts={**statement.verdicts, "content": Verdict(VIOLATED, said)})


def draw_secret_seeds() -> None:
    """Dropout and augmentation hide who was drawn only from those who do not know their randomness: the seed that a
    trainer sets is public, and so are random states in checkpoints."""
    torch.seed()
    random.seed(secrets.randbits(256))
    np.random.seed(secrets.randbits(32))  # noqa: NPY002  (datasets of others draw from it)


def write_json(path: Path, content: Any, *, lasting: bool = True) -> None:
    """Whole or not at all; `lasting`: on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    beside.replace(path)


def _steps_noted(path: Path) -> dict[str, int]:
    """Run → steps."""
    if not path.is_file():
        return {}
    try:
        return {str(run): int(steps) for run, steps in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{path} is damaged: how many steps were made cannot be told any more. Begin a new training in another "
            "folder; what this one has shown counts as spent."
        ) from None
