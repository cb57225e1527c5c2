"""One cell, measured: a training with its curves and what attacks find in it, a risk estimate, or seconds per step.

Curves of the bias come from un-noised gradients (`diagnostics`): cells are experiments on public data sets that play
the private part, and nothing that they write is covered by an epsilon.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from lmdp.app import pipeline, training
from lmdp.app.canaries import Planting, plant
from lmdp.app.cells.cell import ALIKE, RISK, STEP, Cell
from lmdp.app.cells.sources import Sources
from lmdp.app.config import Config
from lmdp.app.network import fresh_model, placed, test_accuracy
from lmdp.app.progress import Show
from lmdp.app.runs import RunFolder
from lmdp.audit.model import audit
from lmdp.data import Source
from lmdp.layers import LayerMap
from lmdp.membership.examples import members_and_nonmembers
from lmdp.membership.leak import Leak
from lmdp.methods import METHODS, SOURCES
from lmdp.models import build
from lmdp.risk.estimate import estimate_risk, in_sample_accuracies
from lmdp.risk.shadow import Schedule

Result = dict[str, Any]
POINTS = 60
"""Of a curve over training, at most."""
TESTED = 2000
"""Test examples, at most."""
EVALUATIONS = 15
NOWHERE = Path("no run was begun")


@dataclass(frozen=True)
class Rates:
    """Error rates by layer, as `training.prepare` asks a risk profile for them."""

    error_rates: Mapping[str, float]
    by: str = "module"

    @property
    def weight_rates(self) -> Mapping[str, float]:
        return self.error_rates


def measure(cell: Cell, sources: Sources, rates: Mapping[str, float] | None, device: str = "cpu") -> Result:
    """What comes out of a cell. `rates` are the error rates that `lm` weighs layers by, None for all alike.

    A device is where models run; steps are timed on the CPU, where the paper's ratios are compared.
    """
    start = time.perf_counter()
    if cell.kind == STEP:
        result = _step(cell)
    elif cell.kind == RISK:
        result = _risk(cell, sources, device)
    else:
        result = _train(cell, sources, rates, device)
    return {**result, "device": device, "seconds": time.perf_counter() - start}


def _train(cell: Cell, sources: Sources, rates: Mapping[str, float] | None, device: str) -> Result:
    given = {key: sources.resolved(cell[key]) for key in ("data", "shadow")}
    config = cell.config(**given, device=device)
    show = Show(quiet=True)
    source = _source(config)
    planting = plant(config, source, [RunFolder(NOWHERE)], show.say)
    planted = source if planting is None else planting.source
    model = fresh_model(config, source)
    public = pipeline.public_examples(config, source, show)
    risk = cast(Any, None if rates is None or cell.rates == ALIKE else Rates(rates))
    job = training.prepare(config, model, planted.train, risk=risk, public=public, diagnostics=True)
    curve = _followed(job, source)
    statement = job.statement()
    bias = [] if job.engine is None or job.engine.diagnostics is None else job.engine.diagnostics.steps
    if job.engine is not None:
        job.engine.detach()
    return {
        "examples": len(planted.train),
        "steps": job.total,
        "epsilon": None if math.isinf(statement.epsilon) else statement.epsilon,
        "noise_multiplier": statement.noise_multiplier,
        "certifiable": _certifiable(config),
        "layer_weights": job.layer_weights,
        "accuracy": curve[-1][1],
        "curve": curve,
        "bias": _thinned([(float(i + 1), record.bias_norm) for i, record in enumerate(bias)]),
        **_attacked(cell, model, config, source, planting),
    }


def _certifiable(config: Config) -> bool:
    """Whether such a training is certified without a seed, which cells have so that methods compare fairly."""
    method = METHODS[config.method]
    return method.private and not (method.reweighted and SOURCES[config.weights].refuted)


def _followed(job: training.Job, source: Source) -> list[tuple[float, float]]:
    """Train to the end; (step, test accuracy) now and then, the end among them."""
    assert source.test is not None, "cells need data with a test part"
    inputs, labels = _at_most(source.test, TESTED)
    due = {math.ceil(job.total * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    curve: list[tuple[float, float]] = []

    def look(step: int) -> None:
        if step in due:
            curve.append((float(step), test_accuracy(job.model, inputs, labels)))

    with torch.random.fork_rng(devices=[]):
        training.run_through(job, look)
    return curve


def _attacked(cell: Cell, model: nn.Module, config: Config, source: Source, planting: Planting | None) -> Result:
    """Held out on ordinary examples and on canaries; and in-sample beside its null, as the paper has it."""
    ordinary = source.train if planting is None else planting.ordinary
    outside = source.held_out
    if outside is None:
        raise ValueError(f"{config.data}: holdout {config.holdout:g} keeps too few non-members for an attack")
    sides = [_at_most(side, cell.examples) for side in (ordinary, outside)]
    seed = config.seed or 0
    canaries = None if planting is None else planting.canaries()
    blind = config.method == "sgd"  # controls see no trained model: they are the same whatever the method
    report = audit(model, *sides, seed=seed, layers=config.layers, controls=blind, canaries=canaries)
    result = {
        "heldout": _leaks(report.layers),
        "output": _leaks([report.reference]) if report.reference else {},
        "controls": _leaks(report.controls),
        "members": report.members,
        "nonmembers": report.nonmembers,
    }
    if report.canaries is not None:
        result["canaries"] = _leaks(report.canaries.layers)
        result["canaries_in_out"] = [report.canaries.inside, report.canaries.outside]
    if cell.in_sample:
        read = {"layers": LayerMap.of(model), "pooling": None}
        examples = members_and_nonmembers(*sides, seed=seed)
        accuracies = in_sample_accuracies(model, examples, seed, read, lambda line: None)
        result["in_sample"] = {name: list(pair) for name, pair in accuracies.items()}
    return result


def _risk(cell: Cell, sources: Sources, device: str) -> Result:
    config, spec = cell.config(device=device), sources.resolved(cell["shadow"])
    shadow = pipeline.public_data(spec, None, config, Show(quiet=True))

    def factory() -> nn.Module:
        return placed(build(config.model, shadow.train.shape, len(shadow.classes), **config.model_options), device)

    profile = estimate_risk(
        factory,
        shadow.train.tensors(),
        protocol="paper",
        schedule=Schedule(epochs=config.shadow_epochs, enough=config.shadow_enough),
        seed=config.seed or 0,
        layers=config.layers,
    )
    return {
        "heldout": _leaks(profile.layers),
        "in_sample": {layer.name: [layer.in_sample, layer.null] for layer in profile.layers},
        "controls": _leaks(profile.controls),
        "weight_rates": dict(profile.weight_rates),
        "train_accuracy": profile.shadow.train_accuracy,
        "test_accuracy": profile.shadow.test_accuracy,
        "epochs": profile.shadow.epochs,
        "examples": profile.shadow.examples,
    }


def _step(cell: Cell) -> Result:
    """Seconds of every turn, and peak bytes, of SGD and the paper's methods on made-up batches."""
    from lmdp.app import bench
    from lmdp.app.bench.cases import case_name

    only = ("lmdp dpsgd", "lmdp autos", "lmdp psac", "lmdp lm (", "lmdp lm-optimal (")
    name = case_name(cell["model"])
    measured = bench.run(models=[name], steps=max(2, cell.examples), only=only)["models"][name]
    return {"turns": measured["seconds"], **{key: measured[key] for key in ("title", "peak_bytes", "failed")}}


@functools.lru_cache(2)
def _loaded(config: Config) -> Source:
    return pipeline.parted_data(config, Show(quiet=True))


def _source(config: Config) -> Source:
    """The data, read once in a process; who is a member is drawn anew for every seed, and is the same for all methods.

    With one split for all seeds, luck in that split would look the same in every seed, and an interval over seeds would
    not know of it.
    """
    alike = ("data", "size", "channels", "classes", "splits", "holdout")
    source = _loaded(Config.of({key: getattr(config, key) for key in alike}))
    if source.held_out is None:
        return source
    pool = source.pool
    order = np.random.default_rng(config.seed).permutation(len(pool))
    kept, out = (np.sort(part).tolist() for part in np.split(order, [len(source.train)]))
    return replace(source, train=pool.take(kept), held_out=pool.take(out))


def _at_most(images: Any, number: int) -> Any:
    return (images.take_random(number) if len(images) > number else images).tensors()


def _leaks(leaks: Sequence[Leak]) -> dict[str, dict[str, Any]]:
    return {
        leak.name: {
            "auc": leak.auc,
            "interval": list(leak.interval),
            "accuracy": leak.accuracy,
            "error_rate": leak.error_rate,
            "tpr_at_1pct": leak.tpr_at_1pct,
        }
        for leak in leaks
    }


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, so that at most `POINTS` are kept of a noisy curve."""
    parts = np.array_split(np.array(points), min(POINTS, len(points))) if points else []
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]
