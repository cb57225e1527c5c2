"""The verdict: the most vulnerable first, then ordinary examples, and nothing that the intervals do not support."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lmdp.methods import METHODS
from lmdp.report.drawn import Vulnerable
from lmdp.report.values import Estimate, accuracy, epsilon, epsilon_text, finite, is_certified, peak, small

if TYPE_CHECKING:
    from lmdp.report.drawn import Audit, Bound
    from lmdp.report.story import Story, Trained

WITHIN = "lies within the intervals"
NO_PROOF = "An audit that finds nothing is no proof."
NO_CANARIES = "What the most vulnerable give away was not measured: plant canaries (--canaries 500)."
PLAIN = "dpsgd"
"""The method that those with layer weights are measured against."""


def verdict(story: Story) -> str:
    """What the story shows. A model is said to give away less only where its interval lies below the other's.

    Canaries stand for the most vulnerable examples. An attack on the others that fails says little of those.
    """
    return " ".join([*_refuting(story), _found(story)])


def _refuting(story: Story) -> list[str]:
    """Bounds above a claim, before all else; those by canaries in a run itself are told with what they give away."""
    told = [_bound(trained) for trained in story.trained if trained.audit is not None]
    return [bound.verdict for bound in story.bounds if bound.exceeded and bound not in told]


def _found(story: Story) -> str:
    audited = [trained for trained in story.trained if trained.audit is not None]
    if len(audited) == 1:
        alone = f"{audited[0].name}: {_audit(audited[0]).verdict}"
        return " ".join([alone, *map(_sentence, _at_same_epsilon(story.trained))])
    if not audited:
        return _sentence("; ".join(_unaudited(story)) or "nothing was measured")
    return " ".join(_of_several(story, audited))


def _of_several(story: Story, audited: Sequence[Trained]) -> list[str]:
    canaries = {t.name: replace(t, audit=side) for t in audited if (side := Vulnerable.of(_audit(t))) is not None}
    planted = list(canaries.values())
    shift = _shift(audited)
    sentences = [bound.verdict for t in audited if (bound := _bound(t)) is not None and bound.exceeded]
    if planted:
        compared = _at_same_epsilon([canaries.get(t.name, t) for t in story.trained])
        told = "; ".join([*_leaks(planted), *compared])
        sentences.append(f"The most vulnerable examples ({_kinds(audited)}): {told}.")
        sentences.append(shift or _sentence(f"ordinary examples: {'; '.join(_leaks(audited))}"))
    elif shift:
        sentences += [shift, NO_CANARIES]
    else:
        told = "; ".join([*_leaks(audited), *_at_same_epsilon(story.trained)])
        sentences += [f"Of ordinary examples, the only ones tried: {told}.", NO_CANARIES]
    silent = shift or not all(map(_leaks_measurably, [*audited, *planted]))
    return [*sentences, NO_PROOF] if silent else sentences


def _unaudited(story: Story) -> list[str]:
    clauses = [*_accuracies(story.trained), *_at_same_epsilon(story.trained)]
    if story.trained:
        clauses.append("what the models give away about membership was not measured")
    return clauses if clauses or story.risk is None else [story.risk.verdict]


def _sentence(clause: str) -> str:
    return clause[0].upper() + clause[1:].removesuffix(".") + "."


def _kinds(audited: Sequence[Trained]) -> str:
    planted = (_audit(t).canaries for t in audited)
    return ", ".join(dict.fromkeys(f"{c.kind} canaries" for c in planted if c is not None))


def _bound(trained: Trained) -> Bound | None:
    canaries = _audit(trained).canaries
    return None if canaries is None else canaries.bound


def _shift(audited: Sequence[Trained]) -> str:
    for trained in audited:
        for control in _audit(trained).controls:
            if control.fires:
                return (
                    f"Members and non-members differ before any training is looked at (control '{control.name}': AUC "
                    f"{control.auc:.3f}): the audit measures that shift between the groups, not a leak."
                )
    return ""


def _leaks(audited: Sequence[Trained]) -> list[str]:
    """The models without privacy against those with it, or each for itself."""
    open_ones = [t for t in audited if t.privacy is None]
    private = [t for t in audited if (spent := epsilon(t.privacy)) is not None and math.isfinite(spent)]
    if not open_ones or not private:
        return [_alone(trained) for trained in audited]
    base = open_ones[0]
    less = [t for t in private if _leaks_measurably(base) and _peak(t).below(_peak(base))]
    more = [t for t in private if _leaks_measurably(t) and _peak(base).below(_peak(t))]
    same = [t for t in private if t not in less and t not in more]
    clauses = [_alone(base)]
    if less:
        clauses.append(
            f"{_names(less)} {'give' if len(less) > 1 else 'gives'} away less ({_peaks(less)}){_doubt(less)}"
        )
    if more:
        clauses.append(f"{_names(more)} {'give' if len(more) > 1 else 'gives'} away more ({_peaks(more)})")
    quiet = [t for t in same if _leaks_measurably(base) and not _leaks_measurably(t)]
    if quiet:
        clauses.append(
            f"no layer of {_names(quiet, 'or')} does so measurably ({_peaks(quiet)}), though the difference {WITHIN}"
        )
    if rest := [t for t in same if t not in quiet]:
        clauses.append(f"the difference between {base.name} and {_names(rest)} ({_peaks(rest)}) {WITHIN}")
    return clauses


def _at_same_epsilon(trained: Sequence[Trained]) -> list[str]:
    """Each method that reweights layers against DP-SGD, where both spent the same."""
    plain = next((t for t in trained if t.method == PLAIN and t.privacy is not None), None)
    if plain is None:
        return []
    return [
        clause
        for t in trained
        if t.method in METHODS and METHODS[t.method].reweighted and _same_budget(t, plain)
        if (clause := _against(t, plain))
    ]


def _against(lm: Trained, plain: Trained) -> str:
    clauses = [*_leak_against(lm, plain), *_accuracy_against(lm, plain)]
    if not clauses:
        return ""
    if len(clauses) == 2 and all(WITHIN in clause for clause in clauses):
        both = f"the differences between {lm.name} and {plain.name}, in leakage and in test accuracy,"
        clauses = [f"{both} lie within the intervals"]
    claim = "" if _certified(lm) and _certified(plain) else " (claimed, NOT certified)"
    delta = small(finite((plain.privacy or {}).get("delta")))
    spent = f"{epsilon_text(epsilon(plain.privacy))} (delta {delta})"
    return f"at the same epsilon of {spent}{claim}, {' and '.join(clauses)}"


def _leak_against(lm: Trained, plain: Trained) -> list[str]:
    if lm.audit is None or plain.audit is None:
        return []
    a, b = peak(lm.audit), peak(plain.audit)
    if a.below(b) and _leaks_measurably(plain):
        return [f"{lm.name} gives away less than {plain.name} (highest AUC {a} against {b})"]
    if b.below(a) and _leaks_measurably(lm):
        return [f"{lm.name} gives away more than {plain.name} (highest AUC {a} against {b})"]
    return [f"the difference in leakage between {lm.name} and {plain.name} {WITHIN}"]


def _accuracy_against(one: Trained, other: Trained) -> list[str]:
    a, b = accuracy(one), accuracy(other)
    if a is None or b is None or a.interval is None or b.interval is None:
        return []
    if a.below(b) or b.below(a):
        how = "lower" if a.below(b) else "higher"
        return [f"the test accuracy of {one.name} is {how} than that of {other.name} ({a} against {b})"]
    return [f"the difference in test accuracy between {one.name} and {other.name} {WITHIN}"]


def _accuracies(trained: Sequence[Trained]) -> list[str]:
    parts = [f"{t.name} {estimate}" for t in trained if (estimate := accuracy(t)) is not None]
    return [f"test accuracy: {', '.join(parts)}"] if parts else []


def _alone(trained: Trained) -> str:
    top = _audit(trained).peak
    if _leaks_measurably(trained):
        return f"layer '{top.name}' of {trained.name} gives membership away (AUC {_peak(trained)})"
    return f"no layer of {trained.name} gives membership away measurably (highest AUC {_peak(trained)})"


def _audit(trained: Trained) -> Audit:
    assert trained.audit is not None
    return trained.audit


def _peak(trained: Trained) -> Estimate:
    return peak(_audit(trained))


def _leaks_measurably(trained: Trained) -> bool:
    return _audit(trained).peak.interval[0] > 0.5


def _certified(trained: Trained) -> bool:
    return trained.privacy is not None and is_certified(trained.privacy)


def _doubt(trained: Sequence[Trained]) -> str:
    """Says so where what was measured is not also guaranteed."""
    unsure = [t for t in trained if not _certified(t)]
    return f", though the epsilon of {_names(unsure)} is claimed, NOT certified" if unsure else ""


def _same_budget(a: Trained, b: Trained) -> bool:
    one, other = finite(epsilon(a.privacy)), finite(epsilon(b.privacy))
    same_delta = a.privacy is not None and b.privacy is not None and a.privacy.get("delta") == b.privacy.get("delta")
    return one is not None and other is not None and same_delta and math.isclose(one, other, rel_tol=0.01)


def _names(trained: Sequence[Trained], joint: str = "and") -> str:
    *first, last = [t.name for t in trained]
    return f"{', '.join(first)} {joint} {last}" if first else last


def _peaks(trained: Sequence[Trained]) -> str:
    """Their peaks; of more than two, the highest."""
    peaks = [_peak(t) for t in trained]
    if len(peaks) > 2:
        return f"highest AUC at most {max(peaks, key=lambda estimate: estimate.value)}"
    return "highest AUC " + " and ".join(map(str, peaks))
