"""Models of which it is known who was in them, beside the attacked one: every layer's scores, calibrated per example.

Three kinds of score are calibrated, and the best of them is chosen with its calibration:

    confidence   of a classifier of the adversary's own on the layer, in its true class: nearly normal, as LiRA wants it
    carried      the adversary that was fitted on the attacked model, applied to what is measured of the others; what is
                 measured (lengths, distances, losses, movements) means the same of every model
    fitted       for every model an adversary of its own, if all of them had enough of the examples
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from lmdp.membership.attacks import summaries_of
from lmdp.membership.attacks.output import scaled_confidence
from lmdp.membership.attacks.summary import Summary, judge_of
from lmdp.membership.calibration import Candidate, against
from lmdp.membership.crossfit import CHUNK, FEWEST, FOLDS, Indices, Result, splits
from lmdp.membership.evidence import Array, Evidence
from lmdp.membership.examples import Examples
from lmdp.membership.instrument import OUTPUT, Progress, attack_layers, attack_output, unheard
from lmdp.membership.leak import Leak, leak_of
from lmdp.membership.together import Views
from lmdp.membership.workers import Share, side_by_side

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
CONFIDENCE_COLUMN = 3
"""Of the numbers of a head: log p / (1 − p) of the true class."""
Judge = Callable[[Array], Floats]
Read = Callable[[nn.Module], tuple[Mapping[str, Evidence], Views]]
"""Of a model: evidence by layer, and what else is looked at."""


@dataclass(frozen=True)
class Reference:
    """A model of the attacked one's kind, and which of the audited examples it was trained on (none, unless given).

    Each mask has one entry for each member, or each non-member, in the order in which the audit is given them.
    """

    model: nn.Module
    members: Sequence[bool] | NDArray[np.bool_] | None = None
    nonmembers: Sequence[bool] | NDArray[np.bool_] | None = None


def masks(references: Sequence[Reference | nn.Module], examples: Examples) -> Bools:
    """[K, n]: which of the examples each reference was trained on, in the order of the examples."""
    rows = []
    for number, reference in enumerate(references, 1):
        given: tuple[Any, Any] = (None, None)
        if isinstance(reference, Reference):
            given = (reference.members, reference.nonmembers)
        parts = []
        for what, mask, size in zip(("members", "nonmembers"), given, examples.given):
            entries = np.zeros(size, dtype=np.bool_) if mask is None else np.asarray(mask)
            if entries.shape != (size,) or entries.dtype != np.bool_:
                raise ValueError(
                    f"reference {number}: its mask of {what} has shape {entries.shape} and type {entries.dtype}; it "
                    f"must be {size} booleans, one for each of the {what} of the audit"
                )
            parts.append(entries)
        rows.append(np.concatenate(parts)[examples.origin])
    return np.stack(rows)


def with_references(
    attacked: tuple[Mapping[str, Evidence], Views],
    results: Mapping[str, Result],
    output: Result | None,
    examples: Examples,
    references: Sequence[Reference | nn.Module],
    read: Read,
    seed: int,
    say: Progress,
    share: Share = side_by_side,
) -> dict[str, Leak]:
    """Every layer of the attacked model, what else is looked at, and its output, calibrated, by name.

    One reference is in memory at a time.
    """
    member, others = examples.member, masks(references, examples)
    fits = bool((np.minimum(others.sum(1), (~others).sum(1)) >= FEWEST).all())
    kept: dict[str, dict[str, list[Floats]]] = {name: {} for name in (*attacked[0], *attacked[1], OUTPUT)}
    judges = _keep(kept, *attacked, output, member, seed, None)
    if fits:
        _keep_fitted(kept, results, output)
    for number, reference in enumerate(references, 1):
        say(f"reference {number} of {len(references)}")
        collected, views = read(reference.model if isinstance(reference, Reference) else reference)
        _keep(kept, collected, views, output, member, seed, judges)
        if fits:
            mine = others[number - 1]
            answer = None if output is None else attack_output(collected, mine, seed, share)
            fitted = attack_layers(collected, mine, seed, lambda _: None, unheard, share)
            _keep_fitted(kept, fitted, answer)
    leaks = {}
    for name, scores in kept.items():
        if not scores:
            continue
        candidates = [Candidate(kind, rows[0], np.stack(rows[1:])) for kind, rows in scores.items()]
        result = against(member, candidates, others, seed)
        attack = results[name].attack if name in results else "output"
        shown = attack if result.attack == "fitted" else result.attack
        leaks[name] = leak_of(name, result.metrics, f"{shown} + {result.calibration}", result.folds)
    return leaks


def _keep_fitted(
    kept: dict[str, dict[str, list[Floats]]], results: Mapping[str, Result], output: Result | None
) -> None:
    """Each model's adversary has a scale of its own, which is taken out before models are compared."""
    every = {**results, **({} if output is None else {OUTPUT: output})}
    for name, result in every.items():
        scores = (result.scores - result.scores.mean()) / (result.scores.std() + 1e-12)
        kept[name].setdefault("fitted", []).append(scores)


def _keep(
    kept: dict[str, dict[str, list[Floats]]],
    collected: Mapping[str, Evidence],
    views: Views,
    output: Result | None,
    member: Bools,
    seed: int,
    judges: dict[str, list[Judge]] | None,
) -> dict[str, list[Judge]]:
    """Add what is measured of one model. Of the first, the attacked one, the judges come that all others get."""
    parts = list(splits(member, seed))
    every = {name: (evidence, summaries_of(evidence)) for name, evidence in collected.items()} | views
    tasks = [
        partial(_of_fold, *view, split, member, seed * FOLDS + number, None if judges is None else judges[name][number])
        for name, view in every.items()
        for number, split in enumerate(parts)
    ]
    measured = list(side_by_side(tasks))
    used: dict[str, list[Judge]] = {}
    for place, name in enumerate(every):
        folds = measured[place * FOLDS : (place + 1) * FOLDS]
        used[name] = [judge for judge, _ in folds]
        for kind in folds[0][1]:
            scores = np.zeros(len(member))
            for (_, given), (_, _, test) in zip(folds, parts):
                scores[test] = given[kind]
            kept[name].setdefault(kind, []).append(scores)
    if output is not None:
        kept[OUTPUT].setdefault("confidence", []).append(scaled_confidence(next(iter(collected.values()))))
    return used


def _of_fold(
    evidence: Evidence,
    measures: Mapping[str, Summary],
    split: tuple[Indices, Indices, Indices],
    member: Bools,
    seed: int,
    judge: Judge | None,
) -> tuple[Judge, dict[str, Floats]]:
    """Scores of the fold's examples; the judge, if none is given, is fitted on those that the fold is fitted on."""
    fit, _, test = split
    fitted = evidence.at(fit)
    summaries = {name: summary(fitted, seed) for name, summary in measures.items()}
    parts = [evidence.at(test[start : start + CHUNK]) for start in range(0, len(test), CHUNK)]
    tables = {name: np.concatenate([measure(part) for part in parts]) for name, (_, measure) in summaries.items()}
    judge = judge or judge_of(np.hstack([table for table, _ in summaries.values()]), member[fit], seed)
    scores = {"carried": judge(np.hstack(list(tables.values())))}
    if "head" in tables:
        scores["confidence"] = np.asarray(tables["head"][:, CONFIDENCE_COLUMN], dtype=np.float64)
    return judge, scores
