"""The first sentences of a report: what is promised, in percent, and what attacks found. At most three numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmdp.report.drawn import Vulnerable
from lmdp.report.story import refuted
from lmdp.report.tables import tpr_limit
from lmdp.report.values import LITTLE, bounds_of, epsilon, found_in_output, is_certified, percent

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit
    from lmdp.report.story import Story, Trained


def headline(story: Story) -> str:
    """Who gives members away and who does not, as far as was measured, and under which promise; "" of no models."""
    if not story.trained:
        return ""
    broken = [t for t in story.trained if refuted(t, story.bounds)]
    if broken:
        return f"The epsilon that is claimed for {_names(broken)} is refuted by an attack: do not release it."
    audited = [t for t in story.trained if t.audit is not None]
    if not audited:
        gave = "it gives" if len(story.trained) == 1 else "they give"
        return f"{_promised(story.trained)} What {gave} away was not measured."
    if any(control.fires for t in audited if t.audit for control in t.audit.controls):
        return (
            f"{_promised(story.trained)} Members and others differ before any training: the audit cannot tell a leak."
        )
    return f"{_promised(story.trained)} {_measured(audited, story)}".strip()


def _promised(trained: Sequence[Trained]) -> str:
    """The promise in percent, of the weakest where there are several; epsilon and delta stand below it."""
    private = [t for t in trained if t.privacy is not None]
    if not private or any(tpr_limit(t) is None or math.isinf(epsilon(t.privacy) or 0.0) for t in private):
        return "Nothing is promised."
    weakest = max(private, key=lambda t: tpr_limit(t) or 0.0)
    limit, unit = tpr_limit(weakest) or 0.0, (weakest.privacy or {}).get("unit", "example")
    sure = all(is_certified(t.privacy or {}) for t in private)
    of = _models(private) if len(private) == 1 else f"each model trained by {_names(private)}"
    if limit > LITTLE:
        return f"Little is promised{'' if sure else ', and not certified'}: nearly all {unit}s may be recognised."
    bounded = (
        f"at most {percent(limit)} of the {unit}s that {of} has seen can be recognised, if 1 % of all others may be "
        "suspected wrongly"
    )
    if not sure:
        return f"It is claimed, and NOT certified, that {bounded}."
    return f"{bounded[0].upper()}{bounded[1:]}: this holds against any attack, and is certified by this program."


def _measured(audited: Sequence[Trained], story: Story) -> str:
    sides = [(t, side) for t in audited if t.audit is not None and (side := Vulnerable.of(t.audit)) is not None]
    elsewhere = any(bounds_of(t, story.bounds) for t in audited)  # canaries in other trainings of the same settings
    only = "ordinary examples" if elsewhere else "ordinary examples, the only ones tried,"
    who = "the most vulnerable examples" if sides else only
    seen: list[tuple[Trained, Audit]] = [*sides] or [(t, t.audit) for t in audited if t.audit is not None]
    told_by = [(t, audit.peak.interval[0] > 0.5 or found_in_output(audit)) for t, audit in seen]
    open_, quiet = ([t for t, leaks in told_by if leaks is wanted] for wanted in (True, False))
    if not open_:
        return f"Attacks did not find {who} in {_models(quiet)}; that is no proof."
    told = f"Attacks found {who} in {_models(open_)}"
    return f"{told}, and not in {_models(quiet)}; that is no proof." if quiet else f"{told}."


def _models(trained: Sequence[Trained]) -> str:
    return f"the model{'s' if len(trained) > 1 else ''} trained by {_names(trained)}"


def _names(trained: Sequence[Trained]) -> str:
    *first, last = [t.name for t in trained]
    return f"{', '.join(first)} and {last}" if first else last
