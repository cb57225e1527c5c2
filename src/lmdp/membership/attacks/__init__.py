"""One table of attack families: everything that is said of a family stands in its record.

Each, fitted on evidence with known membership, returns a scoring function. Some read the representation itself; the
others measure a few telling numbers of it. To add a family, add a record: it is tried on whatever has what it needs.

    probe         two that read the representation itself: linear, and a small neural network
    summary       how a family of numbers becomes an attack; what follows are such numbers
    norm          the length of the representation
    distance      how near it lies to its class, and to others
    output        loss, confidence and margin of the model's output
    head          the same of a classifier of the adversary's own on top of the representation
    consistency   how far it moves when the input is augmented
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmdp.membership.attacks.consistency import movements
from lmdp.membership.attacks.distance import distances
from lmdp.membership.attacks.head import head_losses
from lmdp.membership.attacks.norm import lengths
from lmdp.membership.attacks.output import output_losses
from lmdp.membership.attacks.probe import fit_mlp, fit_probe
from lmdp.membership.attacks.summary import Summary, attack_on, remembered
from lmdp.membership.evidence import Evidence, Fit

__all__ = ["ATTACKS", "Attack", "attacks_on", "summaries_of"]

Target = Literal["layer", "output"]


@dataclass(frozen=True)
class Attack:
    """A family of attacks.

    fit       how it is fitted, if it reads the representation itself
    summary   else: the numbers that it is fitted on. With neither, it is fitted on all numbers that are `combined`
    needs     what the evidence must hold: "labels", "views", "outputs"
    combined  whether its numbers are also part of those that are combined
    target    whether it is tried on the evidence of layers, or on the model's output
    """

    name: str
    help: str
    fit: Fit | None = None
    summary: Summary | None = None
    needs: tuple[str, ...] = ()
    combined: bool = False
    target: Target = "layer"


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("probe", "logistic regression on the representation and the label", fit_probe),
        Attack("mlp", "a small neural network on the same, as in the paper", fit_mlp),
        Attack("norm", "how likely its length is among members and among non-members", summary=lengths, combined=True),
        Attack(
            "distance",
            "how near the representation lies to its class, and to others",
            summary=distances,
            needs=("labels",),
            combined=True,
        ),
        Attack(
            "head",
            "the loss of a classifier of the adversary's own on top of it",
            summary=head_losses,
            needs=("labels",),
            combined=True,
        ),
        Attack(
            "consistency",
            "how far it moves when the input is augmented",
            summary=movements,
            needs=("views",),
            combined=True,
        ),
        Attack("combined", "what the four before it measure, together"),
        Attack(
            "output",
            "loss, confidence and margin of the model's own output: the reference that layers are compared with",
            summary=output_losses,
            needs=("outputs",),
            target="output",
        ),
    )
}


def attacks_on(evidence: Evidence, target: Target = "layer") -> dict[str, Fit]:
    """How to fit every family of this target for which the evidence has what it looks at."""
    tried = _tried_on(evidence, target)
    summaries = {attack.name: remembered(attack.summary) for attack in tried if attack.summary is not None}
    combined = [summaries[attack.name] for attack in tried if attack.combined]
    fits: dict[str, Fit] = {}
    for attack in tried:
        if attack.fit is not None:
            fits[attack.name] = attack.fit
        elif attack.summary is not None:
            fits[attack.name] = attack_on(summaries[attack.name])
        elif len(combined) > 1:  # of one alone, the combination is that one
            fits[attack.name] = attack_on(*combined)
    return fits


def summaries_of(evidence: Evidence) -> dict[str, Summary]:
    """What is measured of a layer, by family: numbers that mean the same of every model."""
    return {attack.name: attack.summary for attack in _tried_on(evidence, "layer") if attack.summary is not None}


def _tried_on(evidence: Evidence, target: Target) -> list[Attack]:
    return [
        attack
        for attack in ATTACKS.values()
        if attack.target == target and all(getattr(evidence, part) is not None for part in attack.needs)
    ]
