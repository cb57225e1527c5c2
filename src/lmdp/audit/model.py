"""`audit`: attack every layer of one trained model, or embeddings that a service returned."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lmdp.audit.coins import canary_leaks
from lmdp.audit.embeddings import LAYER, embedded, read_embeddings
from lmdp.audit.finite import one_sided
from lmdp.audit.planting import Canaries
from lmdp.audit.results import AuditReport, Peak
from lmdp.membership.compaction import WIDTH, require_pooling
from lmdp.membership.crossfit import Result, require_enough
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import members_and_nonmembers
from lmdp.membership.instrument import (
    INPUT,
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
from lmdp.membership.leak import Leak
from lmdp.membership.metrics import around
from lmdp.membership.references import Reference, masks, with_references
from lmdp.membership.representations import MEMORY_LIMIT, Layers, grouping
from lmdp.membership.together import Views, attack_views, gradient_norms, views_of
from lmdp.membership.workers import Share, side_by_side
from lmdp.statement import PrivacyStatement


def audit(
    model: nn.Module | None,
    members: Any,
    nonmembers: Any,
    *,
    inputs: Sequence[Any] | None = None,
    layers: Layers = None,
    pooling: str | None = None,
    seed: int = 0,
    controls: bool = True,
    views: bool = True,
    width: int = WIDTH,
    memory_limit: int = MEMORY_LIMIT,
    references: Sequence[Reference | nn.Module] = (),
    white_box: bool = False,
    progress: Progress | None = None,
    part: Part | None = None,
    canaries: Canaries | None = None,
    statement: PrivacyStatement | None = None,
    share: Share = side_by_side,
) -> AuditReport:
    """Attack every layer's representations, held out, and report what was found.

    `model` is any trained module, on any device; members and non-members are datasets or (inputs, labels), where inputs
    are tensors or mappings of tensors by name, which become keyword arguments of the model ("labels" among them are
    labels). With `model=None`, members and non-members are embeddings themselves (arrays, or (embeddings, labels)), as
    a black-box API returns them.

    inputs           of embeddings: (inputs of members, inputs of non-members), row by row. They make a control: without
                     one, nobody knows whether the model or the groups differ
    layers           "module" (unless given) or "block", as in `LayerMap.of`; a LayerMap; or names of layers
    pooling          what is kept of a sequence: "mean" over the attention mask, "cls" (its first position) or "last"
                     (of the mask); None: averages over a coarse grid, padding and all
    references       models of the same kind, trained as this one was: each a `Reference`, which says which of the
                     examples it had, or a module, which had none of them. An example's scores are then judged by its
                     own scores under these (LiRA, RMIA and others; the best is chosen on validation data)
    white_box        also attack all layers together, and all of them with each example's gradients (of the
                     cross-entropy of its label): what somebody finds who has the whole model
    progress, part   told lines of text, and the share of the work that is done
    canaries         those of `plant_canaries` that the model was trained with: they are attacked as well as the members
                     and non-members given, who should be ordinary; with a privacy `statement` of the training, its
                     epsilon is also bounded from below
    share            does pieces of work that do not depend on each other, and gives their results in their order: one
                     attack on one layer each. Several processes may share them; the report is the same
    """
    require_pooling(pooling)
    if model is None and canaries is not None:
        raise ValueError("canaries are attacked through a model; with embeddings alone, leave them out")
    start = time.perf_counter()
    embeddings = embedded(members, nonmembers, inputs, seed) if model is None else None
    if embeddings is None and inputs is not None:
        raise ValueError("inputs= belong to embeddings; a model is audited on inputs as they are, with controls")
    examples = embeddings.examples if embeddings else members_and_nonmembers(members, nonmembers, seed=seed)
    member = examples.member
    require_enough(member)
    say, part = progress or (lambda _: None), part or unheard
    reference: Result | None = None
    blind: Mapping[str, Result] = {}
    together: dict[str, Leak] = {}
    if model is None and (references or white_box):
        raise ValueError(
            "there is no model; references and white_box are for auditing one. Pass the model, or neither."
        )
    if references:
        masks(references, examples)  # refuses wrong ones before anything long begins
    faulty = ""
    if embeddings is not None:
        results = {LAYER: attack(embeddings.evidence, member, seed, share)}
        if embeddings.blind is not None and controls:
            blind = {INPUT: attack(embeddings.blind, member, seed, share)}
    else:
        assert model is not None
        options: Any = {"layers": layers, "pooling": pooling}

        def read(one: nn.Module) -> tuple[dict[str, Evidence], Views]:
            seen = collect(one, examples, seed=seed, views=views, width=width, memory_limit=memory_limit, **options)
            return seen, views_of(seen, gradient_norms(one, examples)) if white_box else {}

        evidence, views_seen = read(model)
        faulty = one_sided(evidence, member)
        results = attack_layers(evidence, member, seed, say, lambda done: part(0.9 * done), share)
        reference = attack_output(evidence, member, seed, share)
        together = {name: result.leak(name) for name, result in attack_views(views_seen, member, seed).items()}
        if controls:
            leakiest = max(results, key=lambda name: results[name].metrics.auc)
            blind = attack_controls(untrained_twin(model, seed), examples, leakiest, seed, say, share=share, **options)
    leaks = tuple(result.leak(name) for name, result in results.items())
    answer = None if reference is None else reference.leak(OUTPUT)
    if references:
        seen = (evidence, views_seen)
        judged = with_references(seen, results, reference, examples, references, read, seed, say, share)
        leaks, answer = tuple(judged[name] for name in results), judged.get(OUTPUT)
        together = {name: judged[name] for name in together}
    top = max(leaks, key=lambda leak: leak.auc)
    level = 0.95 ** (1 / len(leaks))  # of the interval of each, so that that of the highest of them holds at 95 %
    report = AuditReport(
        layers=leaks,
        peak=Peak(top.name, top.auc, around(top.auc, top.auc_error, level), len(leaks)),
        reference=answer,
        controls=tuple(result.leak(name) for name, result in blind.items()),
        members=int(member.sum()),
        nonmembers=int((~member).sum()),
        left_out=examples.dropped,
        seed=seed,
        seconds=time.perf_counter() - start,
        by=grouping(layers),
        pooling=pooling,
        notes=embeddings.notes if embeddings else (),
        one_sided=faulty,
        references=len(references),
        together=tuple(together.values()),
    )
    if canaries is None or model is None:
        return report
    say(f"canaries ({canaries.kind}): {int(canaries.included.sum())} in, {int((~canaries.included).sum())} out")
    same: Any = {"layers": layers, "pooling": pooling, "seed": seed, "views": views, "width": width, "share": share}
    attacked = audit(
        model, canaries.inside, canaries.outside, controls=False, memory_limit=memory_limit, progress=say, **same
    )
    told = canary_leaks(attacked, model, canaries, statement)
    return replace(report, canaries=told, seconds=time.perf_counter() - start)


def audit_embeddings(path: str | Path, **options: Any) -> AuditReport:
    """Audit embeddings from an `.npz` file with arrays `member`, `nonmember` and optionally `member_labels`,
    `nonmember_labels`, and the raw inputs `member_inputs`, `nonmember_inputs`, which make a control."""
    both, inputs = read_embeddings(path)
    return audit(None, *both, inputs=inputs, **options)
