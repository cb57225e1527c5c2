"""What a case is, what became of it, and how its training is made private."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lmdp
from lmdp.guards.looks import steps_among

EXAMPLES, BATCH, PASSES = 64, 16, 6
DELTA = 1e-4
LIBRARY = str(Path(lmdp.__file__).parent)
REMEDIES = re.compile(
    r"(?:^|[.:;,] )(?:or )?(add|call|change|choose|compute|construct|convert|create|declare|detach|divide|do|draw|"
    r"freeze|give|keep|leave|let|load|make|move|name|pass|put|run|set|start|state|step|take|train|use|wait|write)\b",
    re.IGNORECASE,
)

CERTIFIED, NOT_CERTIFIED, REFUSED, CRASHED = "certified", "not certified", "refused", "crashed"
ENGINES: list[lmdp.PrivacyEngine] = []
"""Those of the case that is running, so that what was released before a refusal can be asked after it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a training: its kind, and the reason or the message."""

    kind: str
    text: str = ""
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind

    @property
    def names_a_remedy(self) -> bool:
        return bool(REMEDIES.search(self.text))


Run = Callable[[Path], "lmdp.PrivacyEngine | Outcome"]


@dataclass(frozen=True)
class Case:
    """A complete training.

    story     one sentence: what happens in it
    run       makes it, in a folder of its own; gives the engine, or the outcome if that is in another process
    delta     what its statement is asked for
    taints    whether steps that were made before a refusal are broken too, so that they must not be certified either
    releases  how many steps it is expected to make
    moves     how far one example moves the sum, in units of the stated sensitivity, where that was measured
    """

    name: str
    story: str
    run: Run
    delta: float = DELTA
    taints: bool = True
    releases: int = steps_among(PASSES * EXAMPLES // BATCH)
    moves: str = ""
    slow: bool = False

    def outcome(self, folder: Path) -> Outcome:
        """Run it; any exception is told, none is raised."""
        with _alone():
            return outcome_of(lambda: self.run(folder), self.delta, taints=self.taints)


@dataclass
class Table:
    """Cases by name, in the order in which they are written."""

    cases: dict[str, Case] = field(default_factory=dict)

    def __call__(self, story: str, **options: Any) -> Callable[[Run], Run]:
        def add(run: Run) -> Run:
            name = run.__name__
            assert name not in self.cases, f"two cases are named {name}"
            self.cases[name] = Case(name, story, run, **options)
            return run

        return add

    def add(self, name: str, story: str, run: Run, **options: Any) -> None:
        assert name not in self.cases, f"two cases are named {name}"
        self.cases[name] = Case(name, story, run, **options)


def joined(*tables: Table) -> dict[str, Case]:
    cases = [case for table in tables for case in table.cases.values()]
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


def parameters(table: dict[str, Case]) -> list[Any]:
    """For `pytest.mark.parametrize`."""
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in table.values()]


def outcome_of(run: Callable[[], lmdp.PrivacyEngine | Outcome], delta: float, *, taints: bool = True) -> Outcome:
    try:
        engine = run()
        if isinstance(engine, Outcome):
            return engine
        statement = engine.privacy_statement(delta)
        return Outcome(CERTIFIED if statement.certified else NOT_CERTIFIED, "; ".join(statement.reasons), engine.steps)
    except pytest.skip.Exception:
        raise
    except Exception as error:
        return _after(error, delta, taints)


def _after(error: Exception, delta: float, taints: bool) -> Outcome:
    message = " ".join(str(error).split())
    refused = isinstance(error, RuntimeError | ValueError | TypeError | AttributeError) and _raised_by_library(error)
    steps = sum(engine.steps for engine in ENGINES if engine.attached)
    if refused and taints and any(_is_certified(engine, delta) for engine in ENGINES):
        return Outcome(CERTIFIED, f"after {steps} steps and a refusal: {message}", steps)
    return Outcome(REFUSED if refused else CRASHED, message if refused else f"{type(error).__name__}: {message}", steps)


def _is_certified(engine: lmdp.PrivacyEngine, delta: float) -> bool:
    return engine.attached and engine.steps > 0 and engine.privacy_statement(delta).certified


def _raised_by_library(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(LIBRARY)


@contextmanager
def _alone() -> Iterator[None]:
    """Nothing of another case is left, and nothing of this one stays."""
    ENGINES.clear()
    torch.manual_seed(0)
    try:
        yield
    finally:
        for engine in ENGINES:
            if engine.attached:
                engine.detach()
        ENGINES.clear()


@dataclass
class Training:
    """What `make_private` gave, and the loop that everybody writes."""

    engine: lmdp.PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]

    def run(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        passes: int = PASSES,
        after_backward: Callable[[Any], None] = lambda batch: None,
        after_step: Callable[[Tensor], None] = lambda loss: None,
    ) -> lmdp.PrivacyEngine:
        for _ in range(passes):
            for batch in self.loader:
                self.optimizer.zero_grad()
                value = loss(self.model, batch)
                value.backward()
                after_backward(batch)
                self.optimizer.step()
                after_step(value.detach())
        return self.engine


def private(
    module: nn.Module,
    dataset: Dataset[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    batch_size: int = BATCH,
    loading: dict[str, Any] | None = None,
    accountant: str = "rdp",
    secure_mode: bool = False,
    **options: Any,
) -> Training:
    """Make a training private as users do; whatever is left out is ordinary."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trainable, lr=0.01)
    engine = lmdp.PrivacyEngine(accountant=accountant, secure_mode=secure_mode)
    ENGINES.append(engine)
    loader = DataLoader(dataset, batch_size=batch_size, **(loading or {}))
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "method": "dpsgd", **options}
    return Training(engine, *engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **settings))
