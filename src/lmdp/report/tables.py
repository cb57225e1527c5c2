"""The numbers, each with its uncertainty, in boxes that scroll by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lmdp.membership.leak import Leak
from lmdp.report.drawn import Vulnerable
from lmdp.report.roc import Limit
from lmdp.report.svg import el, text
from lmdp.report.values import (
    Estimate,
    accuracy,
    at_output,
    at_peak,
    between,
    beyond_layers,
    epsilon,
    epsilon_text,
    finite,
    peak,
    peak_leak,
    small,
    standing,
)

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit
    from lmdp.report.story import Story, Trained
    from lmdp.risk.profile import RiskProfile

NONE = "–"
VULNERABLE = (
    "canaries: leakiest layer",
    "AUC there",
    "TPR at 1 % FPR",
    "AUC of the model output",
    "epsilon, at least",
)
ORDINARY = (
    "ordinary: leakiest layer",
    "AUC there",
    "TPR at 1 % FPR",
    "limit of it by epsilon",
    "AUC of the model output",
)
MEASURED = ("AUC", "error rate", "TPR at 1 % FPR", "TPR at 0.1 % FPR", "best attack")


def models(story: Story) -> str:
    """One column per model, so that all of a model is seen at once; and, of several private ones, what they cost."""
    sides = {i: Vulnerable.of(trained.audit) for i, trained in enumerate(story.trained) if trained.audit}
    planted = any(side is not None for side in sides.values())
    names = ("test accuracy", "epsilon", *(VULNERABLE if planted else ()), *ORDINARY)
    columns = [_model(trained, [sides.get(i)] if planted else []) for i, trained in enumerate(story.trained)]
    rows = ((_long(name), *cells) for name, *cells in zip(names, *columns, strict=True))
    table = boxed("All models", ("", *(trained.name for trained in story.trained)), rows, wordy=set())
    return table + (el("p", text(str(story.together)), class_="note after") if story.together else "")


def layers(models: Sequence[tuple[str, Audit]]) -> str:
    """One row per layer of each model, then all of them together, its reference and controls."""
    rows = (
        [*([_long(model)] if len(models) > 1 else []), _long(leak.name), *_measured(at_peak(leak, audit))]
        for model, audit in models
        for leak in [*audit.layers, *audit.together, *(leak for _, leak in beyond_layers(audit))]
    )
    first = ("model", "layer") if len(models) > 1 else ("layer",)
    return boxed("All layers", (*first, *MEASURED), rows, wordy={len(first) - 1, len(first) + 4})


def risk(profile: RiskProfile) -> str:
    """One row per layer, then reference and controls; the paper's protocol adds its in-sample accuracy and null."""
    paper = any(layer.in_sample is not None for layer in profile.layers)
    entries = [*profile.together, *([profile.reference] if profile.reference else []), *profile.controls]
    rows = (
        [_long(entry.name), *_measured(entry)] + ([_plain(entry.in_sample), _plain(entry.null)] if paper else [])
        for entry in entries
    )
    extra = ("in-sample accuracy", "null (permuted labels)") if paper else ()
    return boxed("Risk profile", ("layer", *MEASURED, *extra), rows, wordy={5})


def value(estimate: Estimate | None, *, large: bool = False) -> str:
    """The value, and its interval below it."""
    if estimate is None:
        return NONE
    shown = el("b", f"{estimate.value:.3f}") if large else f"{estimate.value:.3f}"
    return shown + (el("span", between(estimate.interval), class_="range") if estimate.interval else "")


def spent(trained: Trained, *, large: bool = False) -> str:
    """The epsilon, and how far it can be relied on."""
    if trained.privacy is None:
        return (el("b", "none") if large else "none") + el("span", "not private", class_="range")
    shown = epsilon_text(epsilon(trained.privacy))
    delta = f"delta {small(finite(trained.privacy.get('delta')))}"
    both = el("span", delta, class_="range") + el("span", standing(trained.privacy), class_="range wraps")
    return (el("b", shown) if large else shown) + both


def _model(trained: Trained, canaries: Sequence[Audit | None]) -> list[str]:
    audit = trained.audit
    bound = audit.canaries.bound if audit and audit.canaries else None
    shown = NONE if bound is None else f"{bound.lower:.3g}" + el("span", f"{bound.confidence:.0%}", class_="range")
    return [
        value(accuracy(trained)),
        spent(trained),
        *(cell for side in canaries for cell in (*_peak(side), _output(side), shown)),
        *_peak(audit),
        _at_most(tpr_limit(trained)),
        _output(audit),
    ]


def _peak(audit: Audit | None) -> list[str]:
    """The leakiest layer, its AUC, and how many members it names almost surely."""
    leak = peak_leak(audit) if audit else None
    return [
        _long(audit.peak.name) if audit else NONE,
        value(peak(audit)) if audit else NONE,
        value(Estimate(leak.tpr_at_1pct, leak.tpr_at_1pct_interval)) if leak else NONE,
    ]


def _output(audit: Audit | None) -> str:
    shown = at_output(audit) if audit else None
    return value(Estimate(shown.auc, shown.interval)) if shown else NONE


def tpr_limit(trained: Trained) -> float | None:
    """What epsilon permits at a false positive rate of 1 %: as the audit has it, else by epsilon and delta alone."""
    if trained.privacy is None:
        return None
    if trained.limit is not None:
        return trained.limit
    if trained.audit is not None and trained.audit.tpr_limit_at_1pct is not None:
        return trained.audit.tpr_limit_at_1pct
    alone = limit_of(trained)
    return None if alone is None else alone.tpr(0.01)


def limit_of(trained: Trained) -> Limit | None:
    """By epsilon and delta alone, where there are both."""
    privacy = trained.privacy or {}
    spent, delta = finite(epsilon(privacy)), finite(privacy.get("delta"))
    if spent is None or delta is None or spent < 0 or not 0 <= delta < 1:
        return None
    return Limit(spent, delta)


def _measured(leak: Leak) -> list[str]:
    certain = getattr(leak, "tpr_at_1pct_interval", None)
    return [
        value(Estimate(leak.auc, leak.interval)),
        value(Estimate(leak.error_rate, leak.error_rate_interval)),
        value(Estimate(leak.tpr_at_1pct, certain)),
        _plain(leak.tpr_at_01pct),
        text(leak.attack),
    ]


def _plain(number: float | None) -> str:
    return NONE if number is None else f"{number:.3f}"


def _at_most(number: float | None) -> str:
    """Rounded up, as `percent` is."""
    return NONE if number is None else f"{math.ceil(1000 * number - 1e-9) / 1000:.3f}"


def _long(words: str) -> str:
    return el("div", text(words), class_="long")


def _breaks(words: str) -> str | None:
    """A class for a head with a word too long for a column of numbers."""
    return "long" if max(map(len, words.split()), default=0) > 16 else None


def boxed(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], wordy: set[int]) -> str:
    """Cells are markup. Columns in `wordy` hold words, not numbers."""

    def kind(column: int) -> str | None:
        return "words" if column in wordy else None

    head = el(
        "tr", *(el("th", text(name), scope="col", class_=kind(i) or _breaks(name)) for i, name in enumerate(heads))
    )
    body = (
        el(
            "tr",
            *(el("td" if i else "th", cell, class_=kind(i), scope=None if i else "row") for i, cell in enumerate(row)),
        )
        for row in rows
    )
    table = el("table", el("thead", head), el("tbody", *body))
    on = el("p", "The table goes on to the right.", class_="swipe") if len(heads) > 4 else ""
    return on + el("div", table, class_="box", role="region", aria_label=label, tabindex="0")
