"""The instrument: what each layer of a trained model gives away about membership, beside its controls."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.audit.results import AuditReport, Leak, Peak
from lmdp.data.npz import read_arrays
from lmdp.membership.attacks import OUTPUT_ATTACKS, layer_attacks
from lmdp.membership.crossfit import Result, cross_fit, require_enough
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples, members_and_nonmembers
from lmdp.membership.metrics import around
from lmdp.membership.representations import MEMORY_LIMIT, WIDTH, Recording, compact_inputs, record

Progress = Callable[[str], None]
Part = Callable[[float], None]
"""Told how much of the work is done, from 0 to 1."""
INPUT, UNTRAINED, OUTPUT = "(input)", "(untrained)", "(output)"


def unheard(done: float) -> None:
    """For callers who do not ask how far it is."""


def audit(
    model: nn.Module | None,
    members: Any,
    nonmembers: Any,
    *,
    layers: Sequence[str] | None = None,
    seed: int = 0,
    controls: bool = True,
    views: bool = True,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
    part: Part | None = None,
) -> AuditReport:
    """Attack every layer's representations, held out, and report what was found.

    `model` is any trained module; members and non-members are datasets or (inputs, labels). With `model=None`, members
    and non-members are embeddings themselves (arrays, or (embeddings, labels)), as a black-box API returns them.
    `progress` is told lines of text, `part` the share of the work that is done.
    """
    start = time.perf_counter()
    examples = members_and_nonmembers(members, nonmembers, seed=seed)
    require_enough(examples.member)
    say, part = progress or (lambda _: None), part or unheard
    if model is None:
        rows = examples.inputs.flatten(1).float().numpy()
        embedding = attack(Evidence(rows, examples.label_array), examples.member, seed)
        return _report({"embedding": embedding}, None, {}, examples, seed, start)
    collected = collect(model, examples, layers=layers, seed=seed, views=views, width=width, memory_limit=memory_limit)
    results = attack_layers(collected, examples.member, seed, say, lambda done: part(0.9 * done))
    reference = attack_output(collected, examples.member, seed)
    found = {}
    if controls:
        peak = max(results, key=lambda name: results[name].metrics.auc)
        found = attack_controls(untrained_twin(model, seed), examples, peak, seed, say)
    return _report(results, reference, found, examples, seed, start)


def audit_embeddings(path: str | Path, **options: Any) -> AuditReport:
    """Audit embeddings from an `.npz` file with arrays `member`, `nonmember` and optionally `member_labels`,
    `nonmember_labels`."""
    return audit(None, *read_embeddings(path), **options)


def read_embeddings(path: str | Path) -> list[Any]:
    """Members and non-members, each with its labels where the file has those of both."""
    found = read_arrays(Path(path), ("member", "nonmember", "member_labels", "nonmember_labels"))
    arrays = {name: array.copy() for name, array in found.items()}  # torch wants arrays that could be written to
    if "member" not in arrays or "nonmember" not in arrays:
        raise ValueError(f"{path} lacks arrays of embeddings; it must have 'member' and 'nonmember'")
    both: list[Any] = [arrays["member"], arrays["nonmember"]]
    if "member_labels" in arrays and "nonmember_labels" in arrays:
        both = [(both[0], arrays["member_labels"]), (both[1], arrays["nonmember_labels"])]
    return both


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
    return cross_fit(evidence, member, layer_attacks(evidence), seed)


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
    return cross_fit(evidence, member, OUTPUT_ATTACKS, seed)


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


def peak_of(leaks: Sequence[Leak]) -> Peak:
    """The layer of highest AUC, with an interval at a level that allows for having looked at all of them."""
    best = max(leaks, key=lambda leak: leak.auc)
    return Peak(best.name, best.auc, around(best.auc, best.auc_error, 0.95 ** (1 / len(leaks))), len(leaks))


def _report(
    results: Mapping[str, Result],
    reference: Result | None,
    controls: Mapping[str, Result],
    examples: Examples,
    seed: int,
    start: float,
) -> AuditReport:
    leaks = tuple(Leak.of(name, result) for name, result in results.items())
    return AuditReport(
        layers=leaks,
        peak=peak_of(leaks),
        reference=None if reference is None else Leak.of(OUTPUT, reference),
        controls=tuple(Leak.of(name, result) for name, result in controls.items()),
        members=int(examples.member.sum()),
        nonmembers=int((~examples.member).sum()),
        left_out=examples.dropped,
        seed=seed,
        seconds=time.perf_counter() - start,
    )
