"""Tiny trainers of transformers, and what their tests ask of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from lmdp.integrations import DPTrainer, Privacy
from tests.certified.case import BATCH, EXAMPLES
from tests.certified.hub import transformer
from tests.certified.parts import Texts

DELTA, EPSILON = 1e-4, 8.0
PASS = EXAMPLES // BATCH
STEPS = 5 * PASS
"""More than 16: the first three looks are among them."""


def privacy(**changes: Any) -> Privacy:
    """By the accountant that is quickest."""
    settings = {"target_epsilon": EPSILON, "target_delta": DELTA, "max_grad_norm": 1.0, "accountant": "rdp", **changes}
    return Privacy(**settings)


def arguments(folder: Path, kind: type = TrainingArguments, **changes: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 5,
        "save_strategy": "no",
        **changes,
    }
    return kind(**settings)


def trainer(
    folder: Path,
    *,
    model: nn.Module | None = None,
    data: Dataset[Any] | None = None,
    private: Privacy | None = None,
    callbacks: Any = None,
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Whatever is left out is ordinary; `changes` are those of TrainingArguments, `given` those of the trainer."""
    return DPTrainer(
        model=transformer("BertForSequenceClassification") if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=data or Texts(),
        privacy=private or privacy(),
        callbacks=callbacks,
        **(given or {}),
    )


class Interrupt(TrainerCallback):  # type: ignore[misc]
    """As Ctrl-C would, after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            raise KeyboardInterrupt


class EachStep(TrainerCallback):  # type: ignore[misc]
    def __init__(self, do: Callable[[Any], object]) -> None:
        self.do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.do(state)


def stated(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "privacy.json").read_text())
    return content
