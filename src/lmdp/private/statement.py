"""The privacy statement: what a run promises, under which mechanism, and every reason why it may not be certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from lmdp.accounting import Ledger, Mechanism
from lmdp.data.records import MAY_BE_MISSING, AmountOrInfinity, Count, decoded, encoded
from lmdp.gradients import Capture
from lmdp.gradients.attach import REGISTRY
from lmdp.guards import Independence, fingerprints, unnoised
from lmdp.methods import ADD_OR_REMOVE, SOURCES
from lmdp.private.delivery import DeliveryLog
from lmdp.private.optimizer import PrivateOptimizer
from lmdp.private.step import PrivateStep

NOT_COVERED = (
    "losses or models in which examples of a batch meet (class-weighted, masked or ignore_index means, contrastive "
    "losses, mixup, batch statistics): the guarantee assumes a sum or mean of terms that each depend on one example",
    "parameters outside the module that make_private was given, and risk or public data that is not public",
    "hyper-parameters and models chosen by looking at private data: every run counts for itself",
    "diagnostics: they are computed from private gradients without noise and are off by default",
    "audits: they are computed on private members",
    "losses, accuracies or batch sizes that your own code prints or stores during training",
    "test examples: an accuracy measured on them is published without noise",
    "anything an observer learns from running time, memory use or crashes",
)


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run promises, and what it does not. `to_dict()` is the content of `privacy.json`."""

    epsilon: AmountOrInfinity
    delta: AmountOrInfinity
    accountant: str
    sampling: str
    noise_multiplier: AmountOrInfinity
    sample_rate: AmountOrInfinity
    expected_batch_size: AmountOrInfinity
    steps: Count
    clip_norm: AmountOrInfinity
    sensitivity: AmountOrInfinity
    method: str
    weight_source: str
    noise_source: Annotated[str, MAY_BE_MISSING] = "not stated"
    reasons: tuple[str, ...] = ()
    neighbouring_relation: str = ADD_OR_REMOVE
    not_covered: tuple[str, ...] = NOT_COVERED
    certified: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "certified", not self.reasons)

    @classmethod
    def of(
        cls, mechanism: Mechanism, *, steps: int, delta: float, sampling: str, noise_source: str, reasons: Sequence[str]
    ) -> PrivacyStatement:
        """What so many steps of a mechanism promise."""
        printed = {f.name: getattr(mechanism, f.name) for f in fields(mechanism) if f.name in cls.__dataclass_fields__}
        return cls(
            epsilon=mechanism.epsilon(steps, delta),
            delta=delta,
            sampling=sampling,
            steps=steps,
            noise_source=noise_source,
            reasons=tuple(reasons),
            **printed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
        return dict(encoded(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PrivacyStatement:
        """What `to_dict` made, read back; `certified` follows from the reasons and cannot be set."""
        return decoded(cls, content, "the privacy statement")

    def __str__(self) -> str:
        verdict = "certified" if self.certified else "claimed, NOT certified"
        lines = [
            f"(epsilon, delta) = ({self.epsilon:.4g}, {self.delta:g}), {verdict}",
            f"  method            {self.method}, weights: {self.weight_source}",
            f"  neighbours        {self.neighbouring_relation}",
            f"  sampling          {self.sampling}, rate {self.sample_rate:.6g} "
            f"(expected batch {self.expected_batch_size:g})",
            f"  steps             {self.steps}",
            f"  noise multiplier  {self.noise_multiplier:.6g} x sensitivity {self.sensitivity:g}",
            f"  noise from        {self.noise_source}",
            f"  clip norm         {self.clip_norm:g}",
            f"  accountant        {self.accountant}",
        ]
        lines += [f"  not certified     because {reason}" for reason in self.reasons]
        lines += [f"  not covered       {item}" for item in self.not_covered]
        return "\n".join(lines)


@dataclass
class Run:
    """One private training: its parts, and what is known of it besides what they count themselves."""

    capture: Capture
    step: PrivateStep
    optimizer: PrivateOptimizer
    ledger: Ledger
    log: DeliveryLog | None
    independence: Independence | None
    dataset_size: int
    standing_reasons: tuple[str, ...]
    inherited_reasons: tuple[str, ...] = ()
    unnoised: dict[str, str] = field(default_factory=dict)
    parameters_at_detach: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.unnoised = unnoised(self.capture.model)
        earlier = sum(ledger.steps for ledger in REGISTRY.notes.setdefault(self.capture.model, []))
        if earlier:
            self.inherited_reasons += (
                f"this model made {earlier} private steps before, under another engine, which this statement does not "
                "count",
            )
        REGISTRY.notes[self.capture.model].append(self.ledger)

    @property
    def mechanism(self) -> Mechanism:
        return self.ledger.mechanism

    @property
    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common with the run that goes on from it."""
        mechanism = self.mechanism
        return {
            "noise_multiplier": mechanism.noise_multiplier,
            "sample_rate": mechanism.sample_rate,
            "dataset_size": self.dataset_size,
            "clip_norm": mechanism.clip_norm,
            "method": mechanism.method,
            "weight_source": mechanism.weight_source,
            "layers": list(self.capture.layers.names),
            "accountant": mechanism.accountant,
        }

    def statement(self, delta: float) -> PrivacyStatement:
        return PrivacyStatement.of(
            self.mechanism,
            steps=self.ledger.steps,
            delta=delta,
            sampling="not Poisson (fixed batches)" if self.log is None else "Poisson",
            noise_source=self.step.randomness.source,
            reasons=self.reasons,
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this run cannot be certified, each once."""
        return tuple(dict.fromkeys([*self.standing_reasons, *self._reasons_so_far(), *self.inherited_reasons]))

    def _reasons_so_far(self) -> Sequence[str]:
        reasons, steps = [], self.ledger.steps
        if self.optimizer.foreign_steps:
            reasons.append(
                f"{self.optimizer.foreign_steps} of {steps} steps used batches that did not come from the data loader "
                "that make_private returned"
            )
        if self.log is not None and self.log.skipped:
            reasons.append(
                f"{self.log.skipped} batches were drawn and skipped: every batch, an empty one too, must be stepped, "
                "because the choice to skip may depend on private data"
            )
        if self.independence is not None and self.independence.refused:
            reasons.append(f"the loss was refused because examples meet in it, after {steps} steps")
        now = unnoised(self.capture.model)
        if changed := [name for name in now if now[name] != self.unnoised.get(name)]:
            reasons.append(f"{changed} changed during training; they are saved with the model and carry no noise")
        left = self.parameters_at_detach
        if left is not None and left != fingerprints(self.capture.parameters.items()):
            reasons.append("the parameters were changed after detach(), outside of this account")
        return reasons


def standing_reasons(
    mechanism: Mechanism, reads_batch: bool, poisson: bool, seed: int | None, observed: bool
) -> tuple[str, ...]:
    """Those that follow from how the training was set up."""
    source = SOURCES.get(mechanism.weight_source)
    refuted = (source and source.refuted) or ("the layer weights read the private batch" if reads_batch else "")
    reasons = {
        refuted: bool(refuted),
        "batches are not Poisson-sampled (poisson_sampling=False): the epsilon assumes that they are": not poisson,
        "no noise is added (noise_multiplier=0)": mechanism.noise_multiplier == 0,
        f"the seed is fixed ({seed}): whoever knows it can subtract the noise": seed is not None,
        "an observer may have replaced what was drawn or released": observed,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)
