"""What canaries tell of the training that they were planted in: what its layers give away, and its epsilon from below.

The bound holds because the score of a canary, minus the model's loss on it, is fixed before anybody looks at coins.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from lmdp.audit.bounds import Family, one_run
from lmdp.audit.curves import GaussianSteps
from lmdp.audit.epsilon import EpsilonBound
from lmdp.audit.planting import Canaries
from lmdp.audit.results import AuditReport, CanaryLeaks
from lmdp.membership.examples import take
from lmdp.models import device_of, evaluation, run, scores_of
from lmdp.statement import PrivacyStatement

CONFIDENCE = 0.95
ANY: Family = "any"
BATCH = 500


def canary_leaks(
    attacked: AuditReport, model: nn.Module, canaries: Canaries, statement: PrivacyStatement | None
) -> CanaryLeaks:
    """`attacked` is the audit of canaries that were in against those that were not."""
    return CanaryLeaks(
        kind=canaries.kind,
        layers=attacked.layers,
        peak=attacked.peak,
        reference=attacked.reference,
        inside=int(canaries.included.sum()),
        outside=int((~canaries.included).sum()),
        bound=None if statement is None else bound_by_canaries(model, canaries, statement),
        one_sided=attacked.one_sided,
    )


def bound_by_canaries(
    model: nn.Module, canaries: Canaries, statement: PrivacyStatement, confidence: float = CONFIDENCE
) -> EpsilonBound:
    """How much epsilon this training spent, at least, beside what its own statement claims."""
    steps = _steps(statement)
    family: Family = "any" if steps is None else "mechanism"
    scores = lower_losses(model, canaries)
    shown, plain = (
        one_run(scores, canaries.included, delta=statement.delta, confidence=confidence, mechanism=steps, family=each)
        for each in (family, ANY)
    )
    details: dict[str, float] = {"guesses": shown.guesses, "correct": shown.correct, "included": shown.included}
    details |= {} if steps is None else {"lower_any": plain.lower}
    source = "" if statement.weight_source == "none" else f", weights {statement.weight_source}"
    return EpsilonBound(
        claimed=statement.epsilon,
        lower=shown.lower,
        delta=statement.delta,
        confidence=confidence,
        method="one-run",
        canary=f"{canaries.kind}, in this run",
        canaries=len(canaries),
        runs=1,
        training=f"{statement.method}{source}",
        accountant=statement.accountant,
        details=details,
        family=family,
    )


def _steps(statement: PrivacyStatement) -> GaussianSteps | None:
    """What the training is to be compared with: its own steps; None of one that adds no noise or has made no step."""
    if not (statement.steps and statement.noise_multiplier > 0 and math.isfinite(statement.epsilon)):
        return None
    return GaussianSteps(statement.noise_multiplier, statement.sample_rate, statement.steps)


def lower_losses(model: nn.Module, canaries: Canaries) -> NDArray[np.float64]:
    """Minus the cross entropy of each canary with the label it was planted with; what is no number comes last."""
    device = device_of(model)
    with evaluation(model), torch.no_grad():
        losses = [
            F.cross_entropy(
                scores_of(run(model, take(canaries.inputs, at))).double(), y.to(device), reduction="none"
            ).cpu()
            for at, y in zip(torch.arange(len(canaries)).split(BATCH), canaries.labels.split(BATCH))
        ]
    scores: NDArray[np.float64] = np.nan_to_num(-torch.cat(losses).numpy(), nan=-np.inf)
    return scores
