"""`audit`: attack every layer of one trained model, or embeddings that a service returned."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lmdp.audit.results import AuditReport, Peak
from lmdp.data.npz import read_arrays
from lmdp.membership.crossfit import Result, require_enough
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import members_and_nonmembers
from lmdp.membership.instrument import (
    OUTPUT,
    Part,
    Progress,
    attack,
    attack_controls,
    attack_layers,
    attack_output,
    collect,
    unheard,
    untrained_twin,
)
from lmdp.membership.metrics import around
from lmdp.membership.representations import MEMORY_LIMIT, WIDTH


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
    member = examples.member
    require_enough(member)
    say, part = progress or (lambda _: None), part or unheard
    reference: Result | None = None
    blind: Mapping[str, Result] = {}
    if model is None:
        rows = examples.inputs.flatten(1).float().numpy()
        results = {"embedding": attack(Evidence(rows, examples.label_array), member, seed)}
    else:
        evidence = collect(
            model, examples, layers=layers, seed=seed, views=views, width=width, memory_limit=memory_limit
        )
        results = attack_layers(evidence, member, seed, say, lambda done: part(0.9 * done))
        reference = attack_output(evidence, member, seed)
        if controls:
            leakiest = max(results, key=lambda name: results[name].metrics.auc)
            blind = attack_controls(untrained_twin(model, seed), examples, leakiest, seed, say)
    leaks = tuple(result.leak(name) for name, result in results.items())
    top = max(leaks, key=lambda leak: leak.auc)
    level = 0.95 ** (1 / len(leaks))  # of the interval of each, so that that of the highest of them holds at 95 %
    return AuditReport(
        layers=leaks,
        peak=Peak(top.name, top.auc, around(top.auc, top.auc_error, level), len(leaks)),
        reference=None if reference is None else reference.leak(OUTPUT),
        controls=tuple(result.leak(name) for name, result in blind.items()),
        members=int(member.sum()),
        nonmembers=int((~member).sum()),
        left_out=examples.dropped,
        seed=seed,
        seconds=time.perf_counter() - start,
    )


def audit_embeddings(path: str | Path, **options: Any) -> AuditReport:
    """Audit embeddings from an `.npz` file with arrays `member`, `nonmember` and optionally `member_labels`,
    `nonmember_labels`."""
    return audit(None, *read_embeddings(path), **options)


def read_embeddings(path: str | Path) -> list[Any]:
    """Members and non-members, each with its labels where the file has those of both."""
    stored = read_arrays(Path(path), ("member", "nonmember", "member_labels", "nonmember_labels"))
    arrays = {name: array.copy() for name, array in stored.items()}  # torch wants arrays that could be written to
    if "member" not in arrays or "nonmember" not in arrays:
        raise ValueError(f"{path} lacks arrays of embeddings; it must have 'member' and 'nonmember'")
    both: list[Any] = [arrays["member"], arrays["nonmember"]]
    if "member_labels" in arrays and "nonmember_labels" in arrays:
        both = [(both[0], arrays["member_labels"]), (both[1], arrays["nonmember_labels"])]
    return both
