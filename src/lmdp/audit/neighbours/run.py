"""One run of a training, and the record of all that it gave out: as an outsider sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lmdp.accounting import Mechanism
from lmdp.audit.neighbours.chance import dropping_nothing, lowest_precision, state_of_chance, without_dropout
from lmdp.audit.neighbours.training import Staged, StagedEngine, Train, content, heard, with_places
from lmdp.gradients import randomness
from lmdp.guards.delivery import Delivery
from lmdp.private.sampling import PoissonLoader

NEVER, ALWAYS = 2.0, -1.0
"""In place of a uniform number: it is below no rate, or below every one."""

UNCLIPPED = 1e12
MOST_BATCHES = 1000
"""Handed out in a row without a step, these end a run: a loop may wait for a batch that never comes."""


@dataclass(frozen=True)
class World:
    """Who is in the data and who is drawn. The extra examples have the last places.

    others   whether the common examples are drawn as they come (at least one), or never
    present  which extra examples are in the data; the place of another holds a copy of the first common example
    drawn    which of them is in every draw, if any
    """

    name: str
    others: bool
    present: frozenset[int] = frozenset()
    drawn: int | None = None

    def alter(self, uniforms: Tensor, common: int) -> Tensor:
        altered = torch.full_like(uniforms, NEVER)
        if self.others:
            altered[:common] = uniforms[:common]
            altered[uniforms[:common].argmin()] = ALWAYS
        if self.drawn is not None:
            altered[common + self.drawn] = ALWAYS
        return altered


@dataclass(frozen=True)
class Release:
    """One step: what it started from, and what it gave out."""

    state: str
    chance: str
    gradient: Tensor
    statistic: Tensor | None
    weights: tuple[float, ...] | None
    noise_drawn: list[int]


@dataclass
class Record:
    """One run as an outsider sees it (and the released values, before they were replaced by the leader's)."""

    name: str
    releases: list[Release] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    returned: Any = None
    final_state: str = ""
    stated: Mechanism | None = None
    saved: str = ""
    steps: int = 0
    precisions: set[torch.dtype] = field(default_factory=set)
    error: str | None = None
    raised: Exception | None = None


@dataclass(frozen=True)
class Setting:
    """What the runs of one check have in common.

    limit  after so many steps a run is ended
    bare   whether gradients are summed as they are, without clipping and noise
    """

    train: Train
    common: Dataset[Any]
    extras: list[Any]
    seed: int
    limit: int | None
    bare: bool = False

    def run(self, world: World, leader: Record | None = None) -> Record:
        """The training in this world, from the leader's released values after the first step."""
        record, size = Record(world.name), len(self.common)  # type: ignore[arg-type]
        recorder = _Recorder(lambda uniforms: world.alter(uniforms, size), record, leader, self.limit)
        present = [k in world.present for k in range(len(self.extras))]
        data = with_places(self.common, self.extras, present, seed=self.seed)
        with contextlib.ExitStack() as stack:
            engine = (_BareEngine if self.bare else _WatchedEngine)(self.seed, recorder, stack)
            said = stack.enter_context(heard())
            for context in (randomness.same(self.seed), without_dropout()):
                stack.enter_context(context)
            record.precisions = stack.enter_context(lowest_precision())
            try:
                record.returned = content(self.train(engine, data))
            except _Ended:
                record.returned = "not returned yet"
            except Exception as error:  # whatever it is: that it depends on one example is what matters
                record.error, record.raised = f"{type(error).__name__}: {error}", error
            if engine.attached:
                record.final_state, record.steps = engine.watched(), engine.steps
                saved = {key: value for key, value in engine.state_dict().items() if key != "run"}  # a random name
                record.saved = repr(content(saved))
            elif record.raised is None:
                raise ValueError("train() never called engine.make_private on the engine that it was given")
        record.said = said
        return record


class _Ended(BaseException):
    """Enough steps. No error, so that no loop holds on to it."""


class _Recorder(Staged):
    """Records every release; a follower then goes on with the leader's values in place of its own."""

    def __init__(
        self, alter: Callable[[Tensor], Tensor], record: Record, leader: Record | None, limit: int | None
    ) -> None:
        super().__init__(alter)
        self.record, self._leader, self._limit = record, leader, limit
        self.engine: _WatchedEngine | None = None
        self._handed_out = 0
        self._state, self._chance = "", ""
        self._statistic: Tensor | None = None

    def handed_out(self) -> None:
        """A batch, to the loop."""
        self._handed_out += 1
        if self._handed_out > MOST_BATCHES:
            raise RuntimeError(f"{MOST_BATCHES} batches were handed out without a step; every batch drawn is a step")

    def before_release(self) -> None:
        assert self.engine is not None
        if len(self.record.releases) == self._limit:
            raise _Ended
        self.noises.clear()
        self._state, self._chance, self._statistic = self.engine.watched(), state_of_chance(), None

    def statistic(self, noisy_sum: Tensor) -> Tensor:
        """Noted, and replaced by the leader's."""
        self._statistic = noisy_sum.detach().clone()
        at = len(self.record.releases)
        lead = self._leader.releases[at].statistic if self._leader and at < len(self._leader.releases) else None
        return noisy_sum if lead is None or lead.shape != noisy_sum.shape else lead.clone()

    def after_release(self) -> None:
        assert self.engine is not None
        parameters, record, at = self.engine.trained, self.record, len(self.record.releases)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        record.gradients.append([g.clone() for g in gradients])
        flat = torch.cat([g.detach().flatten().double() for g in gradients])
        drawn = [noise.drawn for noise in self.noises]
        record.releases.append(
            Release(self._state, self._chance, flat, self._statistic, self.engine.layer_weights, drawn)
        )
        self._handed_out = 0
        if self._leader is not None and at < len(self._leader.gradients):
            for parameter, lead in zip(parameters, self._leader.gradients[at]):
                if parameter.shape == lead.shape:  # it is not where shapes follow the data: that is for the findings
                    parameter.grad = lead.clone()


class _WatchedEngine(StagedEngine):
    """Knows what its recorder looks at. What it does to the model is undone when the stack closes."""

    def __init__(self, seed: int, recorder: _Recorder, stack: contextlib.ExitStack) -> None:
        super().__init__(seed, recorder)
        self._recorder, self._stack = recorder, stack

    def make_private(self, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        module, optimizer, loader = super().make_private(**options)
        self._module, self._optimizer, self._recorder.engine = module, optimizer, self
        self.trained = [p for p in module.parameters() if p.requires_grad]
        record = self._recorder.record
        record.stated = self.mechanism
        record.precisions |= {p.dtype for p in self.trained}
        self._stack.enter_context(dropping_nothing(module))
        assert isinstance(loader, PoissonLoader)  # as asked for, in StagedEngine
        self._stack.enter_context(mock.patch.object(loader.log, "deliver", self._counted(loader.log.deliver)))
        return module, optimizer, loader

    def _counted(self, deliver: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        def counted(delivery: Delivery) -> None:
            deliver(delivery)
            if delivery.first:
                self._recorder.handed_out()

        return counted

    def watched(self) -> str:
        """Parameters, buffers and extra state, and what the optimizer remembers and is set to."""
        saved = content(self._module.state_dict(), strict=False)
        buffers = content(dict(self._module.named_buffers()), strict=False)
        states = [content(state, strict=False) for state in self._optimizer.state.values()]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return repr((saved, buffers, states, content(settings, strict=False)))


class _BareEngine(_WatchedEngine):
    """Sums gradients as they are: what clipping may hide at one moment, it does not hide for all data."""

    def make_private(self, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        bare = {"method": "dpsgd", "noise_multiplier": 0.0, "max_grad_norm": UNCLIPPED}
        return super().make_private(**(options | bare))

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, epochs: float, max_grad_norm: float, **options: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        return self.make_private(**options)
