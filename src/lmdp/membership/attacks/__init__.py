"""Attack families. Each, fitted on evidence with known membership, returns a scoring function.

probe        logistic regression on the representation and the label
mlp          a small neural network on the same, as in the paper
norm         how likely its length is among members and among non-members
distance     how near the representation lies to its class, and to others                       (needs labels)
head         the loss of a classifier of the adversary's own on top of it                       (needs labels)
consistency  how far it moves when the input is augmented                                       (needs views)
combined     the last four together
output       loss, confidence and margin of the model's own output: the reference that layers are compared with
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lmdp.membership.attacks.consistency import movements
from lmdp.membership.attacks.distance import distances
from lmdp.membership.attacks.head import head_losses
from lmdp.membership.attacks.norm import lengths
from lmdp.membership.attacks.output import output_losses
from lmdp.membership.attacks.probe import fit_mlp, fit_probe
from lmdp.membership.attacks.summary import Summary, attack_on, remembered
from lmdp.membership.evidence import Evidence

Score = Callable[[Evidence], NDArray[np.float64]]
Fit = Callable[[Evidence, NDArray[np.bool_], int], Score]

OUTPUT_ATTACKS: dict[str, Fit] = {"output": attack_on(output_losses)}

__all__ = ["OUTPUT_ATTACKS", "Evidence", "Fit", "Score", "layer_attacks"]


def layer_attacks(evidence: Evidence) -> dict[str, Fit]:
    """The families for which the evidence has what they look at."""
    summaries: dict[str, Summary] = {"norm": lengths}
    if evidence.labels is not None:
        summaries |= {"distance": distances, "head": head_losses}
    if evidence.views is not None:
        summaries["consistency"] = movements
    summaries = {name: remembered(summary) for name, summary in summaries.items()}
    found: dict[str, Fit] = {"probe": fit_probe, "mlp": fit_mlp}
    found |= {name: attack_on(summary) for name, summary in summaries.items()}
    if len(summaries) > 1:
        found["combined"] = attack_on(*summaries.values())
    return found
