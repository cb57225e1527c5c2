"""The instrument: what each layer of a trained model gives away about membership, beside its controls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.membership.attacks import attacks_on
from lmdp.membership.compaction import WIDTH, compact_inputs
from lmdp.membership.crossfit import FOLDS, Result, Scored, cross_fit, fold_tasks, joined
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples, Stored, each_tensor, take
from lmdp.membership.representations import (
    MEMORY_LIMIT,
    Alter,
    Layers,
    only,
    record,
)
from lmdp.membership.workers import Share, side_by_side
from lmdp.models import Inputs

Progress = Callable[[str], None]
Part = Callable[[float], None]
"""Told how much of the work is done, from 0 to 1."""
SEEN_FIRST = 1024
"""Examples that say how large the inputs are."""
INPUT, UNTRAINED, OUTPUT = "(input)", "(untrained)", "(output)"


def unheard(done: float) -> None:
    """For callers who do not ask how far it is."""


def collect(
    model: nn.Module,
    examples: Examples,
    *,
    layers: Layers = None,
    seed: int,
    views: bool,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
    pooling: str | None = None,
) -> dict[str, Evidence]:
    """Evidence by layer, from one pass over the inputs, in which the model also sees augmented copies of them."""

    alters = augmentations(examples.inputs) if views else []
    recorded = record(
        model,
        examples.inputs,
        layers=layers,
        width=width,
        memory_limit=memory_limit,
        seed=seed,
        alters=alters,
        pooling=pooling,
    )
    return {
        name: Evidence(rows[:, 0], examples.label_array, rows[:, 1:] if alters else None, recorded.outputs)
        for name, rows in recorded.rows.items()
    }


def attack(evidence: Evidence, member: NDArray[np.bool_], seed: int, share: Share = side_by_side) -> Result:
    """All families that fit the evidence, cross-fitted, the best chosen on validation data."""
    return cross_fit(evidence, member, attacks_on, seed, share)


def attack_layers(
    collected: Mapping[str, Evidence],
    member: NDArray[np.bool_],
    seed: int,
    say: Progress,
    part: Part,
    share: Share = side_by_side,
) -> dict[str, Result]:
    """Every layer, folds of all of them side by side; the results are the same whoever does which of them."""
    tasks = [task for evidence in collected.values() for task in fold_tasks(evidence, member, attacks_on, seed)]
    done: list[Scored] = []
    results: dict[str, Result] = {}
    for scored in share(tasks):
        done.append(scored)
        part(len(done) / len(tasks))
        if len(done) % FOLDS == 0:
            name = list(collected)[len(results)]
            results[name] = joined(done[-FOLDS:])
            say(f"layer {len(results)} of {len(collected)}: {name}, AUC {results[name].metrics.auc:.3f}")
    return results


def attack_output(
    collected: Mapping[str, Evidence], member: NDArray[np.bool_], seed: int, share: Share = side_by_side
) -> Result | None:
    """The reference: what the model's output alone gives away (None where the output is not a vector of scores)."""
    evidence = next(iter(collected.values()))
    if evidence.outputs is None or evidence.outputs.shape[1] < 2:
        return None
    if evidence.labels is not None and evidence.labels.max(initial=0) >= evidence.outputs.shape[1]:
        return None
    return cross_fit(evidence, member, partial(attacks_on, target="output"), seed, share)


def attack_controls(
    untrained: nn.Module,
    examples: Examples,
    layer: str,
    seed: int,
    say: Progress,
    *,
    layers: Layers = None,
    pooling: str | None = None,
    share: Share = side_by_side,
) -> dict[str, Result]:
    """The same adversaries where there is nothing to leak: the raw input, and a network that was never trained."""
    say("controls: raw input, untrained network")
    blind = Evidence(compact_inputs(examples.inputs, seed=seed), examples.label_array)
    where = only(layer, untrained, layers)
    fresh = collect(untrained, examples, layers=where, seed=seed, views=False, pooling=pooling)
    return {
        INPUT: attack(blind, examples.member, seed, share),
        UNTRAINED: attack(fresh[layer], examples.member, seed, share),
    }


def untrained_twin(model: nn.Module, seed: int) -> nn.Module:
    """A copy with parameters drawn anew: by each module's own rule, or normally with the old spread.

    Parameters that are all alike (the scales of a normalisation) stay: drawn anew, they would be nothing.
    """
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in twin.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            else:
                for parameter in module.parameters(recurse=False):
                    spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                    if spread != 0 or parameter.numel() == 1:
                        parameter.normal_(0.0, spread if np.isfinite(spread) else 1.0)
    return twin


def augmentations(examples: Stored) -> list[Alter]:
    """Small changes that keep an example recognisable: shifts of images, faint noise on other real-valued inputs.

    Of inputs by name, of the only real-valued one; where there are none or several, nobody knows what they mean.
    """
    inputs = take(examples, slice(SEEN_FIRST))
    if not isinstance(inputs, Tensor):
        floating = [name for name, rows in inputs.items() if rows.is_floating_point()]
        alters = _of_tensor(inputs[floating[0]]) if len(floating) == 1 else []
        return [partial(_altered, alter, floating[0]) for alter in alters]
    return [partial(each_tensor, change=alter) for alter in _of_tensor(inputs)]


def _altered(alter: Callable[[Tensor], Tensor], name: str, batch: Inputs) -> Inputs:
    return {**cast(Mapping[str, Tensor], batch), name: alter(cast(Mapping[str, Tensor], batch)[name])}


def _of_tensor(inputs: Tensor) -> list[Callable[[Tensor], Tensor]]:
    if not inputs.is_floating_point():
        return []
    if inputs.dim() == 4 and min(inputs.shape[2:]) >= 8:
        reach = max(1, min(inputs.shape[2:]) // 16)
        return [_shift(0, reach), _shift(0, -reach), _shift(reach, 0), lambda batch: batch.flip(3)]
    spread = float(inputs.std())
    return [_noise(0.1 * spread, 1), _noise(0.1 * spread, 2)]


def _shift(down: int, right: int) -> Callable[[Tensor], Tensor]:
    def alter(batch: Tensor) -> Tensor:
        h, w = batch.shape[2:]
        reach = max(abs(down), abs(right))
        padded = F.pad(batch, [reach] * 4, mode="replicate")
        return padded[:, :, reach - down : reach - down + h, reach - right : reach - right + w]

    return alter


def _noise(spread: float, seed: int) -> Callable[[Tensor], Tensor]:
    def alter(batch: Tensor) -> Tensor:
        noise = torch.randn(batch.shape[1:], generator=torch.Generator().manual_seed(seed))
        return batch + spread * noise

    return alter
