"""What a risk profile says in words: which layers leak; or that nothing was measured, why, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdp.risk.profile import LayerRisk, RiskProfile, ShadowSummary

MOST_NAMED = 6
ALIKE = "Training weighs all layers alike"
IN_SAMPLE = (
    "Training uses the in-sample error rates all the same, because the paper's protocol was asked for: they measure "
    "how much an adversary can memorise"
)


def verdict(profile: RiskProfile) -> str:
    """A sentence or three, and nothing that the intervals do not support."""
    if (shifted := next((control for control in profile.controls if control.fires), None)) is not None:
        what = (
            f"Members and non-members of the shadow model differ before any training is looked at (control "
            f"'{shifted.name}': AUC {shifted.auc:.3f}): this profile measures that difference, not a leak"
        )
        return _sentences(what, _used(profile), "They are drawn at random: estimate the risk again with another seed")
    if not profile.leaking:
        return _sentences(_nothing(profile), _used(profile), remedies(profile.shadow))
    return _sentences(_leaks(profile), *_apart(profile))


def remedies(shadow: ShadowSummary) -> str:
    """What makes a leak measurable, beginning with what the shadow model lacks most."""
    longer = min(max(100, 4 * shadow.epochs), 100_000)
    if shadow.train_accuracy < shadow.enough:
        first = f"Train it longer (--shadow-epochs {longer}; Schedule(epochs={longer}))"
    else:
        longer = max(200, longer)
        first = (
            f"It was stopped when it had learnt {shadow.enough:.0%} of its half: let it go on (--shadow-enough 2 "
            f"--shadow-epochs {longer}; Schedule(enough=2, epochs={longer}))"
        )
    models = max(4, 2 * shadow.models)
    return (
        f"{first}, take more shadow examples (four times as many halve the intervals), or more shadow models "
        f"(--shadow-models {models}; models={models})"
    )


def has_memorised(shadow: ShadowSummary) -> bool:
    """Whether the shadow models do better on the half they were trained on, beyond what is luck."""
    half = max(1, shadow.examples // 2)
    accuracies = (shadow.train_accuracy, shadow.test_accuracy)
    error = math.sqrt(sum(share * (1 - share) / half for share in accuracies))
    return shadow.train_accuracy - shadow.test_accuracy > 2 * error


def _nothing(profile: RiskProfile) -> str:
    top, shadow = profile.peak, profile.shadow
    what = (
        f"Nothing was measured: no attack on any layer does better than chance beyond its interval (highest AUC "
        f"{_estimate(profile, top)} in '{top.name}')"
    )
    gap = f"train accuracy {shadow.train_accuracy:.3f}, test accuracy {shadow.test_accuracy:.3f}"
    why = "has memorised too little for that" if has_memorised(shadow) else "has not memorised its examples"
    return f"{what}, and the shadow model {why} ({gap})"


def _leaks(profile: RiskProfile) -> str:
    leaking = sorted(profile.leaking, key=lambda layer: -layer.auc)
    shown = _listed([f"'{layer.name}' (AUC {_estimate(profile, layer)})" for layer in leaking])
    give = "gives" if len(leaking) == 1 else "give"
    counted = f"{len(leaking)} of {len(profile.layers)} layers {give} membership away"
    return f"On public data {counted}: {shown}"


def _apart(profile: RiskProfile) -> Iterable[str]:
    """What becomes of the error rates in training."""
    if profile.protocol == "paper":
        return [_used(profile)]
    if profile.weighs_alike:
        return [f"Error rates of layers cannot be told apart. {ALIKE}", remedies(profile.shadow)]
    shared: dict[float, list[str]] = {}
    for name, rate in profile.weight_rates.items():
        shared.setdefault(rate, []).append(f"'{name}'")
    groups = [_listed(names) for names in shared.values() if len(names) > 1]
    return [f"Layers whose error rates cannot be told apart count alike: {'; '.join(groups)}"] if groups else []


def _used(profile: RiskProfile) -> str:
    return IN_SAMPLE if profile.protocol == "paper" else ALIKE


def _estimate(profile: RiskProfile, layer: LayerRisk) -> str:
    low, high = profile.corrected(layer)
    return f"{layer.auc:.3f} [{low:.3f}–{high:.3f}]"


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _sentences(*parts: str) -> str:
    return " ".join(f"{part}." for part in parts if part)
