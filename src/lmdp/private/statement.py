"""One private training: its parts, what it has spent, and every reason why it may not be certified."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.accounting import Ledger, Mechanism
from lmdp.gradients.capture import Tape
from lmdp.private.optimizer import Door
from lmdp.private.sampling import Feed
from lmdp.private.step import PrivateStep
from lmdp.private.weights import BATCH_REASON


@dataclass
class Run:
    """Everything one private training consists of."""

    tape: Tape
    step: PrivateStep
    door: Door
    ledger: Ledger
    feed: Feed | None
    standing_reasons: tuple[str, ...]
    unnoised: dict[str, str]
    expected_batch_size: float
    dataset_size: int
    inherited_reasons: tuple[str, ...] = ()
    parameters_at_detach: dict[str, str] | None = None


SPENT: weakref.WeakKeyDictionary[nn.Module, list[Ledger]] = weakref.WeakKeyDictionary()
"""Ledgers of all trainings of a model, so that a second one does not pass for the first."""


def standing_reasons(mechanism: Mechanism, step: PrivateStep, poisson: bool, seed: int | None) -> tuple[str, ...]:
    reasons = []
    if step.source is not None and step.source.reads_private_batch:
        reasons.append(BATCH_REASON)
    if not poisson:
        reasons.append("batches are not Poisson-sampled (poisson_sampling=False): the epsilon assumes that they are")
    if mechanism.noise_multiplier == 0:
        reasons.append("no noise is added (noise_multiplier=0)")
    if seed is not None:
        reasons.append(f"the seed is fixed ({seed}): whoever knows it can subtract the noise")
    return tuple(reasons)


def all_reasons(run: Run) -> tuple[str, ...]:
    """Why this run cannot be certified, each once."""
    return tuple(dict.fromkeys([*run.standing_reasons, *_reasons_so_far(run), *run.inherited_reasons]))


def _reasons_so_far(run: Run) -> Sequence[str]:
    reasons = []
    if run.door.foreign_steps:
        reasons.append(
            f"{run.door.foreign_steps} of {run.ledger.steps} steps used batches that did not come from the data loader "
            "that make_private returned"
        )
    if run.feed is not None and run.feed.skipped:
        reasons.append(
            f"{run.feed.skipped} batches were drawn and skipped: every batch, an empty one too, must be stepped, "
            "because the choice to skip may depend on private data"
        )
    if run.tape.mixing is not None and run.tape.mixing.refused:
        reasons.append(f"the loss was refused because examples meet in it, after {run.ledger.steps} steps")
    now = unnoised_state(run.tape.model)
    if changed := [name for name in now if now[name] != run.unnoised.get(name)]:
        reasons.append(f"{changed} changed during training; they are saved with the model and carry no noise")
    left = run.parameters_at_detach
    if left is not None and left != fingerprints(run.tape.canonical_parameters.items()):
        reasons.append("the parameters were changed after detach(), outside of this account")
    return reasons


def earlier_trainings(module: nn.Module) -> tuple[str, ...]:
    steps = sum(ledger.steps for ledger in SPENT.get(module, []))
    if steps == 0:
        return ()
    return (f"this model made {steps} private steps before, under another engine, which this statement does not count",)


def unnoised_state(module: nn.Module) -> dict[str, str]:
    """Content of what is saved with the model but never noised: buffers and frozen parameters."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return fingerprints([*module.named_buffers(), *frozen])


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    def digest(tensor: Tensor) -> str:
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()

    return {name: digest(tensor) if tensor.numel() else "" for name, tensor in tensors}


def identity(run: Run) -> dict[str, Any]:
    mechanism, step = run.ledger.mechanism, run.step
    return {
        "noise_multiplier": mechanism.noise_multiplier,
        "sample_rate": mechanism.sample_rate,
        "dataset_size": run.dataset_size,
        "clip_norm": step.clipping.clip_norm,
        "method": step.clipping.name,
        "weight_source": "none" if step.source is None else step.source.name,
        "layers": list(run.tape.layers.names),
        "accountant": run.ledger.accountant,
    }
