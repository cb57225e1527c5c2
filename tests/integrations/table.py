"""Each trainer: is it certified, does it resume, does it stop? `python -m tests.integrations.table` prints it."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from lmdp import PrivacyStatement
from lmdp.integrations import DPCallback
from tests.integrations import test_accelerate as accelerate
from tests.integrations import test_lightning as lightning
from tests.integrations import test_sentences as sentences
from tests.integrations.parts import Interrupt, privacy, trainer

OWN_NOISE = privacy(noise_multiplier=0.9, target_epsilon=5.0)
SAVED = {"save_strategy": "steps", "save_steps": 5}


@dataclass(frozen=True)
class Row:
    """whole    a training to its end
    resumed  one that was interrupted two steps after a checkpoint, and its continuation
    stopped  one with noise of its own, which spends its target before its steps are made
    """

    name: str
    whole: Callable[[Path], PrivacyStatement]
    resumed: Callable[[Path], PrivacyStatement]
    stopped: Callable[[Path], PrivacyStatement]


def of_transformers(name: str, make: Callable[..., Any]) -> Row:
    def run(training: Any, **given: Any) -> PrivacyStatement:
        training.train(**given)
        statement: PrivacyStatement = training.privacy_statement
        return statement

    def resumed(at: Path) -> PrivacyStatement:
        with contextlib.suppress(KeyboardInterrupt):
            run(make(at, callbacks=[Interrupt(7)], **SAVED))
        return run(make(at, **SAVED), resume_from_checkpoint=True)

    return Row(name, lambda at: run(make(at)), resumed, lambda at: run(make(at, private=OWN_NOISE, max_steps=60)))


def encoder_trainer(at: Path, *, private: Any = None, callbacks: Any = None, **changes: Any) -> Any:
    given = {"privacy": private or privacy(layers="block"), "callbacks": callbacks}
    return sentences.trainer(at / "run", sentences.saved(at), given=given, **changes)


def of_lightning() -> Row:
    def resumed(at: Path) -> PrivacyStatement:
        with contextlib.suppress(RuntimeError):
            lightning.fit(at, None, None, lightning.saving(at), lightning.Interrupt(7))
        rest = DPCallback(privacy())
        training = lightning.trainer(at, rest, lightning.saving(at))
        training.fit(lightning.Lit(), rest.loader(lightning.loader()), ckpt_path=at / "step=5.ckpt")
        return rest.privacy_statement

    def whole(at: Path, **given: Any) -> PrivacyStatement:
        statement: PrivacyStatement = lightning.fit(at, **given)[0].privacy_statement
        return statement

    return Row("Lightning: `DPCallback`", whole, resumed, lambda at: whole(at, private=OWN_NOISE, max_epochs=30))


def of_accelerate() -> Row:
    def loop(at: Path, **given: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Loop(at, **given)

    def resumed(at: Path) -> PrivacyStatement:
        first = loop(at)
        first.run(until=5)
        first.accelerator.save_state(str(at / "saved"))
        first.run(until=7)
        rest = loop(at)
        rest.accelerator.load_state(str(at / "saved"))
        statement: PrivacyStatement = rest.run()
        return statement

    return Row(
        "Accelerate: `accelerated`",
        lambda at: loop(at).run(),
        resumed,
        lambda at: loop(at, private=OWN_NOISE, epochs=30).run(),
    )


ROWS = (
    of_transformers("transformers: `DPTrainer`", trainer),
    of_transformers("sentence-transformers: `DPSentenceTransformerTrainer`", encoder_trainer),
    of_lightning(),
    of_accelerate(),
)


def told(statement: PrivacyStatement) -> str:
    certified = ", certified" if statement.certified else ", NOT certified"
    return f"{statement.steps} steps, epsilon {statement.epsilon:.3f}{certified}"


def lines() -> Iterable[str]:
    yield "| trainer | to its end (target 8) | interrupted and resumed | noise of its own, target 5 |"
    yield "|---|---|---|---|"
    for row in ROWS:
        cells = []
        for run in (row.whole, row.resumed, row.stopped):
            with tempfile.TemporaryDirectory() as folder:
                cells.append(told(run(Path(folder))))
        yield f"| {row.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(*lines(), sep="\n")  # noqa: T201
