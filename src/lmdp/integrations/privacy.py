"""What a user of a trainer says of privacy: one value, the same for every trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lmdp.accounting import DEFAULT

KEPT = ("module", "optimizer", "data_loader", "epochs", "poisson_sampling", "looks_besides")
"""Options of `make_private` that a trainer decides."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """How a trainer trains privately. Whatever is not said here is as in `PrivacyEngine.make_private`.

    target_epsilon     what the training may spend; it stops before the step that would spend more
    target_delta       below 1 / number of training examples
    max_grad_norm      to which each example's gradient is clipped
    noise_multiplier   instead of the least noise with which all steps fit the target
    method, risk, layers
                       which clipping, the error rate of every layer, and what a layer is
    accountant, secure_mode
                       as in `PrivacyEngine`
    max_physical_batch_size
                       how many examples are in memory at once
    log_private_loss   log the training loss, under a name that begins with `not_private`
    public_evaluation  evaluation data are public, so that checkpoints may be chosen by what is measured on them
    compose            the model may begin with weights that earlier private trainings released; the target is then that
                       of this training alone, and the statement adds up what all of them have spent
    options            further options of `make_private`, such as weights, emphasis, allow_unused, generic
    """

    target_delta: float
    max_grad_norm: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    method: str = "lm"
    risk: Any = None
    layers: Any = "module"
    accountant: str = DEFAULT
    secure_mode: bool = False
    max_physical_batch_size: int | None = None
    log_private_loss: bool = False
    public_evaluation: bool = False
    compose: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "Privacy has neither target_epsilon nor noise_multiplier. Pass target_epsilon (8, for instance): the "
                "noise follows from it and from the number of steps."
            )
        named = {each.name for each in fields(self)}
        if doubled := [name for name in self.options if name in named]:
            raise ValueError(f"Privacy(options=...) has {doubled}, which Privacy itself takes. Pass it beside options.")
        if kept := [name for name in self.options if name in KEPT]:
            raise ValueError(f"Privacy(options=...) has {kept}, which the trainer decides. Leave it out.")

    def made_private_with(self) -> dict[str, Any]:
        """Options of `make_private`, but for noise and target."""
        return {
            "max_grad_norm": self.max_grad_norm,
            "method": self.method,
            "risk": self.risk,
            "layers": self.layers,
            "max_physical_batch_size": self.max_physical_batch_size,
            **self.options,
        }
