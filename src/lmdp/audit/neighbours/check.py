"""One whole training on neighbouring datasets, with shared randomness: what does one example move?

Four runs on the same draws, noise and initial weights:

    without   the dataset                          with    the dataset and the outlier, drawn in every step
    empty     every draw comes out empty           alone   every draw holds the outlier and nothing else

(with, without) and (alone, empty) are neighbours. `without` leads: its released values are put in place of those of
the others, so that every step is compared at equal parameters, weights and optimizer state. What is then released may
differ by at most the sensitivity, since the noise is the same and cancels; all else that leaves must not differ at all.
with − without − alone + empty is what the outlier did to the *other* examples' contributions: nothing, if none meet.

The whole of it is measured from outside, on what `release` gives out: nothing inside has to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmdp.accounting import Mechanism
from lmdp.audit.neighbours.compare import compare
from lmdp.audit.neighbours.result import Finding, NeighbourReport
from lmdp.audit.neighbours.training import Staged, StagedEngine, Train, as_dataset, content, heard, with_places
from lmdp.guards import fingerprints, same_randomness

__all__ = ["Finding", "NeighbourReport", "check_neighbours"]


def check_neighbours(
    train: Train, dataset: Any, outlier: Any, *, seed: int = 0, tolerance: float | None = None
) -> NeighbourReport:
    """Run a training with and without one example, and compare all that leaves it with what its statement promises.

    train      train(engine, dataset): builds everything, calls engine.make_private and runs the loop; a few steps are
               enough. What it returns counts as published
    dataset    the common examples: a dataset, or a tuple of tensors
    outlier    one more example, as extreme as you can think of: huge, aligned with the others, zero, NaN
    tolerance  for rounding, in units of the sensitivity: 1e-3 in float32 and 1e-6 in float64 unless given

    Use a model in float64 if you can (`model.double()`): rounding in float32 hides small influences between examples.
    Dropout draws one mask for the whole batch, which cannot be shared between batches of different size: switch it off.
    A pass means that this example, in this training, was bounded as stated. It is a test and not a proof.
    """
    common = as_dataset(dataset)
    leader = _run(train, common, outlier, "without", seed, None)
    others = [_run(train, common, outlier, name, seed, leader) for name in ("with", "alone", "empty")]
    records = [leader, *others]
    if leader.error is not None and all(record.error == leader.error for record in records):
        assert leader.raised is not None
        raise leader.raised
    return compare({record.name: record for record in records}, tolerance)


@dataclass(frozen=True)
class Release:
    """One step: what it started from, and what it gave out."""

    state: str
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
    dtype: torch.dtype = torch.float32
    error: str | None = None
    raised: BaseException | None = None


def _run(train: Train, common: Any, outlier: Any, name: str, seed: int, leader: Record | None) -> Record:
    size, present = len(common), name in ("with", "alone")
    record = Record(name)
    engine = _WatchedEngine(seed, _Recorder(_alteration(name, size), record, leader))
    with same_randomness(seed), heard() as said:
        try:
            record.returned = content(train(engine, with_places(common, [outlier], [present])))
        except Exception as error:  # whatever it is: that it depends on one example is what matters
            record.error, record.raised = f"{type(error).__name__}: {error}", error
    record.said = said
    if engine.attached:
        record.final_state, record.saved, record.steps = engine.watched(), repr(engine.state_dict()), engine.steps
    elif record.raised is None:
        raise ValueError("train() never called engine.make_private on the engine that it was given")
    return record


def _alteration(name: str, size: int) -> Callable[[Tensor], Tensor]:
    """The outlier has the last place: drawn always or never. The others are drawn as they come, or never."""

    def alter(uniforms: Tensor) -> Tensor:
        uniforms = uniforms.clone() if name in ("with", "without") else torch.full_like(uniforms, 2.0)
        uniforms[size] = -1.0 if name in ("with", "alone") else 2.0
        return uniforms

    return alter


class _Recorder(Staged):
    """Records every release; a follower then goes on with the leader's values in place of its own."""

    def __init__(self, alter: Callable[[Tensor], Tensor], record: Record, leader: Record | None) -> None:
        super().__init__(alter)
        self.record, self._leader = record, leader
        self.engine: _WatchedEngine | None = None
        self._state = ""
        self._statistic: Tensor | None = None

    def before_release(self) -> None:
        assert self.engine is not None
        self.noises.clear()
        self._state, self._statistic = self.engine.watched(), None

    def statistic(self, noisy_sum: Tensor) -> Tensor:
        """Noted, and replaced by the leader's."""
        self._statistic = noisy_sum.detach().clone()
        at = len(self.record.releases)
        lead = self._leader.releases[at].statistic if self._leader and at < len(self._leader.releases) else None
        return noisy_sum if lead is None else lead.clone()

    def after_release(self) -> None:
        assert self.engine is not None
        parameters, record = self.engine.trained, self.record
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        record.gradients.append([g.clone() for g in gradients])
        flat = torch.cat([g.detach().flatten().double() for g in gradients])
        drawn = [noise.drawn for noise in self.noises]
        record.releases.append(Release(self._state, flat, self._statistic, self.engine.layer_weights, drawn))
        at = len(record.releases) - 1
        if self._leader is not None and at < len(self._leader.gradients):
            for parameter, lead in zip(parameters, self._leader.gradients[at]):
                parameter.grad = lead.clone()


class _WatchedEngine(StagedEngine):
    """Knows what its recorder looks at."""

    def __init__(self, seed: int, recorder: _Recorder) -> None:
        super().__init__(seed, recorder)
        self._recorder = recorder

    def make_private(self, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        module, optimizer, loader = super().make_private(**options)
        self._module, self._optimizer, self._recorder.engine = module, optimizer, self
        self.trained = [p for p in module.parameters() if p.requires_grad]
        record = self._recorder.record
        record.stated = self.mechanism
        record.dtype = min((p.dtype for p in self.trained), key=lambda dtype: torch.finfo(dtype).bits)
        _refuse_dropout(module)
        return module, optimizer, loader

    def watched(self) -> str:
        """Parameters, buffers, and what the optimizer remembers."""
        states = [content(state) for state in self._optimizer.state.values()]
        return repr((fingerprints(self._module.state_dict().items()), states))


def _refuse_dropout(model: nn.Module) -> None:
    kinds = nn.modules.dropout._DropoutNd
    active = [name for name, m in model.named_modules() if isinstance(m, kinds) and m.training and m.p > 0]
    inside = [name for name, m in model.named_modules() if getattr(m, "dropout", 0) and isinstance(m, nn.RNNBase)]
    inside += [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention) and m.dropout and m.training]
    if active or inside:
        raise ValueError(
            f"modules {active + inside} drop out at random, with one mask for the whole batch; it cannot be shared by "
            "batches of different size. Build the model with dropout 0 for this check: it changes no sensitivity."
        )
