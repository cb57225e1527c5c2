"""Train one model, privately or not, in a run folder: a loop that can be stopped at any step and continued."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lmdp.app.account import Account
from lmdp.app.config import Config
from lmdp.app.descent import optimizer_for, set_rate
from lmdp.app.network import laid_out, shortened, test_accuracy, trainable
from lmdp.app.parts import parts_of
from lmdp.app.planning import number_of_steps, suited
from lmdp.app.progress import Bar, Interrupted, Show, stop_asked, stop_signals
from lmdp.app.runs import Checkpoint, RunFolder, leave, unfinished, write_json
from lmdp.app.staged import computed, taken_over
from lmdp.app.tensorboard import Board
from lmdp.averages import WeightAverage
from lmdp.data import EpochOrder, Examples, Texts
from lmdp.data.augment import augmentation
from lmdp.data.examples import units, users_of
from lmdp.guards import VIOLATED, Verdict
from lmdp.lineage import Lineage, Spending, steps_noted
from lmdp.methods import METHODS
from lmdp.models import Inputs, scores_of
from lmdp.models import run as run_model
from lmdp.private import PrivacyEngine, PrivacyStatement
from lmdp.private.sampling import PoissonLoader
from lmdp.processes import Group
from lmdp.risk import RiskProfile
from lmdp.units import PerUser, Views

SECONDS_BETWEEN_EPSILONS = 2.0
SHARE_OF_EPSILONS = 0.01  # of the time of a training, at most, for epsilons that only the progress shows


@dataclass
class Job:
    """What a training needs, whatever its method, and how far it is."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]
    engine: PrivacyEngine | None
    total: int
    account: Account
    average: WeightAverage | None = None
    group: Group = field(default_factory=Group)
    _plain_steps: int = 0

    def __post_init__(self) -> None:
        if self.config.ema is not None:
            self.average = WeightAverage(self.model, self.config.ema)
        if isinstance(self.loader.dataset, Views | PerUser):
            self.loader.dataset.moment = lambda: self.steps  # a continued run sees the same views

    @property
    def steps(self) -> int:
        return self._plain_steps if self.engine is None else self.engine.steps

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    @property
    def layer_weights(self) -> list[float] | None:
        weights = None if self.engine is None else self.engine.layer_weights
        return None if weights is None else list(weights)

    def epsilon(self) -> float | None:
        return None if self.engine is None else self.engine.get_epsilon(self.config.delta, quiet=True)

    def begin_step(self) -> None:
        """Dropout follows from seed and step, so that a resumed run repeats it. A look repeats its own."""
        looked_at = isinstance(self.loader, PoissonLoader) and self.loader.log.only_looked_at
        if self.config.seed is not None and not looked_at:
            path = [self.config.seed, self.steps, *([self.group.rank] if self.group.rank else [])]
            torch.default_generator.manual_seed(int(np.random.SeedSequence(path).generate_state(1)[0]))

    def step(self, inputs: Inputs, labels: Tensor) -> None:
        self.model.train()
        set_rate(self.optimizer, self.config, self.steps, self.total)
        self.optimizer.zero_grad()
        with shortened(self.config):
            scores = run_model(self.model, laid_out(inputs, self.model))
        _loss(scores, labels).backward()
        self.optimizer.step()
        self._plain_steps += 1

    def statement(self) -> PrivacyStatement:
        if self.engine is not None:
            return self.account.stated(self.engine.privacy_statement(self.config.delta))
        size, batch = len(self.loader.dataset), self.loader.batch_size or 1  # type: ignore[arg-type]
        return PrivacyStatement(
            epsilon=math.inf if self.steps else 0.0,
            delta=self.config.delta,
            accountant="none",
            sampling="shuffled batches of fixed size",
            noise_multiplier=0.0,
            sample_rate=batch / size,
            expected_batch_size=batch,
            steps=self.steps,
            clip_norm=math.inf,
            sensitivity=math.inf,
            method=self.config.method,
            weight_source="none",
            noise_source="none",
            verdicts={
                "numbers": Verdict(
                    VIOLATED, f"method {self.config.method!r} neither clips nor adds noise: it promises nothing"
                )
            },
        )

    def told(self) -> tuple[dict[str, Any], tuple[Spending, ...]]:
        """The content of privacy.json, and what was spent for the weights as they are now. All processes ask."""
        statement = self.statement()
        examples = {"examples": dict(self.account.examples)} if self.account.examples else {}
        certified = self.engine is None or statement.certified
        sigma, rate = statement.noise_multiplier, statement.sample_rate
        spent = self.account.lineage.spent(sigma, rate, self.steps, certified=certified)
        return {**statement.to_dict(), "account": list(self.account.said), **examples}, spent

    def release(self, spent: tuple[Spending, ...]) -> None:
        """Remember the weights as they are now: whoever trains on from them begins after what they cost."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.account.lineage.record(trained, spent)
        if self.average is not None:
            self.account.lineage.record(self.average.weights, spent)

    def checkpoint(self, metrics: list[dict[str, Any]]) -> Checkpoint:
        engine = {"steps": self.steps} if self.engine is None else self.engine.state_dict()
        average = {} if self.average is None else self.average.state_dict()
        return Checkpoint(self.steps, self.model.state_dict(), self.optimizer.state_dict(), engine, metrics, average)

    def restore(self, checkpoint: Checkpoint) -> None:
        restore(checkpoint, self.model, self.optimizer, self.engine)
        if self.average is not None:
            self.average.load_state_dict(checkpoint.average)
        self._plain_steps = checkpoint.step


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, engine: PrivacyEngine | None
) -> None:
    """Bring a training to a checkpoint. One of another training, or a forged one, is refused with a ValueError."""
    try:
        taken_over(model, checkpoint.model)
        optimizer.load_state_dict(dict(checkpoint.optimizer))
        if engine is not None:
            engine.load_state_dict(checkpoint.engine)
    except (RuntimeError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"the checkpoint after step {checkpoint.step} does not fit this run ({reason})") from error


def prepare(
    config: Config,
    model: nn.Module,
    private: Dataset[Any] | Examples,
    *,
    risk: RiskProfile | None,
    public: Any,
    account: Account | None = None,
    engine: PrivacyEngine | None = None,
    diagnostics: bool = False,
    group: Group | None = None,
) -> Job:
    """Model, optimizer and loader for the configured method; the noise is calibrated here.

    With `diagnostics`, the engine keeps numbers of un-noised gradients: not private, for experiments on public data.
    """
    account, group = account or Account(Lineage({})), group or Group()
    private = cast(Dataset[Any], computed(config, model, private))
    size = units(private)
    config = suited(config, size, trainable(model))
    batch, method = config.batch_for(size), METHODS[config.method]
    optimizer = optimizer_for(config, model)
    loader: DataLoader[Any] = DataLoader(private, batch_size=batch)
    if config.augment is not None:
        if isinstance(private, Texts):
            raise ValueError(f"augment is {config.augment!r}, for images; the examples are texts. Leave it out.")
        loader = Views(private, config.views, augmentation(config.augmentations), seed=config.seed).loader(batch)
    if config.unit is not None and users_of(private):
        loader = PerUser(private, users_of(private), config.user_rows, seed=config.seed).loader(batch)
    total = number_of_steps(config.epochs, size, batch)
    if not method.private:
        order = EpochOrder(size, batch, config.seed or 0)
        loader = DataLoader(loader.dataset, batch_size=batch, sampler=order, collate_fn=loader.collate_fn)
        job = Job(config, model, optimizer, loader, None, total, account, group=Group(alone=True))
        order.position = lambda: job.steps
        return job
    engine = engine or PrivacyEngine(config.accountant, secure_mode=config.noise == "secure")
    engine.lineage = account.lineage
    options = {"weights": config.weights, "unit_gain": config.unit_gain} if method.reweighted else {}
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=config.epsilon,
        target_delta=config.delta,
        epochs=config.epochs,
        max_grad_norm=config.clip_norm,
        unit_clip=config.unit_clip,
        method=method.name,
        risk=_rates(config, risk),
        layers=config.layers,
        emphasis=config.emphasis,
        public_data=computed(config, model, public),
        criterion=_loss,
        max_physical_batch_size=parts_of(config, model, private),
        looks_besides=True,  # steps are counted, not batches
        seed=config.seed,
        allow_large_delta=config.allow_large_delta,
        diagnostics=diagnostics,
        group=group,
        **options,
    )
    return Job(config, model, optimizer, loader, engine, total, account, group=group)


def _loss(output: Any, labels: Tensor) -> Tensor:
    """The mean cross entropy, of whatever a classifier gives out."""
    scores = scores_of(output)
    return F.cross_entropy(scores.float(), labels.to(scores.device))


def weighs_by_risk(config: Config) -> bool:
    """Whether layers count by their risk, as far as a profile says that it can be believed."""
    method = METHODS[config.method]
    return method.reweighted and not method.optimal and config.emphasis > 0 and not config.risk_as_measured


def _rates(config: Config, risk: RiskProfile | None) -> SimpleNamespace | None:
    """Error rates that weights are made of, and the grouping of their layers; without the profile's note: it was said.

    As the profile would have it, or as measured where that is asked for.
    """
    if risk is None:
        return None
    return SimpleNamespace(error_rates=risk.error_rates if config.risk_as_measured else risk.weight_rates, by=risk.by)


def run(job: Job, folder: RunFolder, test: tuple[Inputs, Tensor] | None, show: Show) -> None:
    """Train to the end (from the newest checkpoint, if there is one), and leave model and privacy statement behind."""
    metrics = _restored(job, folder, show)
    clock = Clock(float(metrics[-1].get("seconds", 0.0)) if metrics else 0.0)
    label = f"train {job.config.method}"
    with (
        torch.random.fork_rng(devices=[]),
        show.bar(label, job.total) as bar,
        stop_signals() as stop,
        Board(folder.path, job.steps) as board,
    ):
        for _ in steps_of(job):
            clock.draw(bar, job)
            due, stopping = evaluation_due(job), stop_asked(stop, job.group)
            if due or stopping:
                metrics.append(_row(job, test, clock))
                _publish(job, folder, metrics, board)
                bar.to(job.steps, _summary(metrics[-1], job.config.delta))
            if stopping and job.steps < job.total:
                raise Interrupted(f"stopped after step {job.steps} of {job.total}; the run can be resumed")
        if not metrics or metrics[-1]["step"] < job.steps:  # the last steps were lost, and there are none left
            metrics.append(_row(job, test, clock))
            _publish(job, folder, metrics, board)
    privacy, spent = job.told()
    job.release(spent)
    if job.engine is not None:
        job.engine.detach()
    leave(folder, privacy, job.model, job.average, spent)


def run_through(job: Job, after: Callable[[int], None] = lambda step: None) -> nn.Module:
    """Train to the end without keeping anything but the model. `after` every step it is told which it was."""
    for step in steps_of(job):
        after(step)
    return job.model


def _restored(job: Job, folder: RunFolder, show: Show) -> list[dict[str, Any]]:
    """Bring the job to the newest checkpoint, and return the metrics up to there.

    A new run saves its untrained model, which costs nothing, so that there is always a checkpoint to go back to.
    """
    repeats = job.engine is None or job.config.seed is not None
    checkpoint = folder.latest(show.say, noted=None if repeats else steps_noted(job.account.lineage.run))
    job.group.same(checkpoint)
    if checkpoint is None:
        write_json(folder / "privacy.json", unfinished(job.told()[0]))
        folder.publish(job.checkpoint([]), job.config.keep_checkpoints)
        return []
    job.restore(checkpoint)
    if job.steps or checkpoint.metrics:
        show.say(f"continuing after step {job.steps} of {job.total}")
    return [dict(row) for row in checkpoint.metrics]


def steps_of(job: Job) -> Iterator[int]:
    """Make steps, pass after pass, until they are used up; a batch that comes in parts is one step.

    Without a seed nobody knows what dropout draws. It is seeded once: a look at a batch must be able to repeat it.
    """
    torch.default_generator.manual_seed(secrets.randbits(63))
    while job.steps < job.total:
        for inputs, labels in job.loader:
            before = job.steps
            job.begin_step()
            job.step(inputs, labels)
            if job.steps > before:
                if job.average is not None:
                    job.average.update()
                yield job.steps
            if job.steps >= job.total:
                return


def evaluation_due(job: Job) -> bool:
    return job.steps == job.total or job.steps % (job.config.evaluate_every * job.steps_per_epoch) == 0


def _row(job: Job, test: tuple[Inputs, Tensor] | None, clock: Clock) -> dict[str, Any]:
    """One line of metrics.jsonl. Nothing in it depends on private data except through released values."""
    average = {} if job.average is None else {"average_test_accuracy": _average_accuracy(job.model, job.average, test)}
    return {
        "step": job.steps,
        "epoch": job.steps / job.steps_per_epoch,
        "epsilon": None if (spent := job.epsilon()) == math.inf else spent,  # begun without privacy
        "test_accuracy": None if test is None else test_accuracy(job.model, *test),
        **average,
        "test_examples": None if test is None else len(test[1]),
        "layer_weights": job.layer_weights,
        "seconds": round(clock.seconds),
    }


def _average_accuracy(model: nn.Module, average: WeightAverage, test: tuple[Inputs, Tensor] | None) -> float | None:
    with average.applied():
        return None if test is None else test_accuracy(model, *test)


def _publish(job: Job, folder: RunFolder, metrics: list[dict[str, Any]], board: Board) -> None:
    """The statement first: what is spent is on record before anything that it paid for can be seen."""
    privacy, spent = job.told()
    write_json(folder / "privacy.json", unfinished(privacy))
    job.release(spent)
    folder.publish(job.checkpoint(metrics), job.config.keep_checkpoints)
    board.add(metrics[-1])


def accuracies_of(row: dict[str, Any]) -> str:
    """The test accuracy of the last weights and, where there is one, of their average."""
    average = row.get("average_test_accuracy")
    return f"{row['test_accuracy']:.1%}" + ("" if average is None else f" ({average:.1%} with averaged weights)")


def _summary(row: dict[str, Any], delta: float) -> str:
    parts = []
    if row["epsilon"] is not None:
        parts.append(f"epsilon {row['epsilon']:.2f} (delta {delta:g})")
    if row["test_accuracy"] is not None:
        parts.append(f"test accuracy {accuracies_of(row)}")
    return ", ".join(parts)


class Clock:
    """Seconds of training so far, however often a run was continued; asks for epsilon only now and then."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before
        self._next = time.monotonic() + SECONDS_BETWEEN_EPSILONS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def draw(self, bar: Bar, job: Job) -> None:
        begun, text = time.monotonic(), ""
        if begun > self._next and job.engine is not None:
            text = f"epsilon {job.epsilon():.2f} (delta {job.config.delta:g})"
            done = time.monotonic()
            self._next = done + max(SECONDS_BETWEEN_EPSILONS, (done - begun) / SHARE_OF_EPSILONS)
        bar.to(job.steps, text)
