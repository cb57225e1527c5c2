"""The instrument: what each layer of a trained model gives away about membership, beside its controls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.membership.attacks import attacks_on
from lmdp.membership.crossfit import Result, cross_fit
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples
from lmdp.membership.representations import MEMORY_LIMIT, WIDTH, Recording, compact_inputs, record

Progress = Callable[[str], None]
Part = Callable[[float], None]
"""Told how much of the work is done, from 0 to 1."""
INPUT, UNTRAINED, OUTPUT = "(input)", "(untrained)", "(output)"


def unheard(done: float) -> None:
    """For callers who do not ask how far it is."""


def collect(
    model: nn.Module,
    examples: Examples,
    *,
    layers: Sequence[str] | None = None,
    seed: int,
    views: bool,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
) -> dict[str, Evidence]:
    """Evidence by layer, from one pass over the inputs and one over each augmented copy of them."""

    def run(alter: Callable[[Tensor], Tensor] | None = None) -> Recording:
        return record(
            model, examples.inputs, layers=layers, width=width, memory_limit=memory_limit, seed=seed, alter=alter
        )

    plain = run()
    changed = [run(alter) for alter in augmentations(examples.inputs)] if views else []
    return {
        name: Evidence(
            rows,
            examples.label_array,
            np.stack([view.layers[name] for view in changed], axis=1) if changed else None,
            plain.outputs,
        )
        for name, rows in plain.layers.items()
    }


def attack(evidence: Evidence, member: NDArray[np.bool_], seed: int) -> Result:
    """All families that fit the evidence, cross-fitted, the best chosen on validation data."""
    return cross_fit(evidence, member, attacks_on(evidence), seed)


def attack_layers(
    collected: Mapping[str, Evidence], member: NDArray[np.bool_], seed: int, say: Progress, part: Part
) -> dict[str, Result]:
    results = {}
    for number, (name, evidence) in enumerate(collected.items(), 1):
        results[name] = attack(evidence, member, seed)
        part(number / len(collected))
        say(f"layer {number} of {len(collected)}: {name}, AUC {results[name].metrics.auc:.3f}")
    return results


def attack_output(collected: Mapping[str, Evidence], member: NDArray[np.bool_], seed: int) -> Result | None:
    """The reference: what the model's output alone gives away (None where the output is not a vector of scores)."""
    evidence = next(iter(collected.values()))
    if evidence.outputs is None or evidence.outputs.shape[1] < 2:
        return None
    if evidence.labels is not None and evidence.labels.max(initial=0) >= evidence.outputs.shape[1]:
        return None
    return cross_fit(evidence, member, attacks_on(evidence, "output"), seed)


def attack_controls(
    untrained: nn.Module, examples: Examples, layer: str, seed: int, say: Progress
) -> dict[str, Result]:
    """The same adversaries where there is nothing to leak: the raw input, and a network that was never trained."""
    say("controls: raw input, untrained network")
    blind = Evidence(compact_inputs(examples.inputs, seed=seed), examples.label_array)
    fresh = collect(untrained, examples, layers=[layer], seed=seed, views=False)
    return {
        INPUT: attack(blind, examples.member, seed),
        UNTRAINED: attack(fresh[layer], examples.member, seed),
    }


def untrained_twin(model: nn.Module, seed: int) -> nn.Module:
    """A copy with parameters drawn anew: by each module's own rule, or normally with the old spread."""
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
                    parameter.normal_(0.0, spread if np.isfinite(spread) else 1.0)
    return twin


def augmentations(inputs: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Small changes that keep an example recognisable: shifts of images, faint noise on other real-valued inputs."""
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
