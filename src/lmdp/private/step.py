"""The private step: the one place where private gradients become values that may leave.

    absorb   per-example norms [B, L] → scales [B, L] → weighted sums, added up over the parts of a batch
    release  sums + noise of (noise multiplier x sensitivity), divided by the public expected batch size → `.grad`

What `release` writes depends on an example only through sums that the example moves by at most the sensitivity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmdp.gradients.batch import Gradients
from lmdp.gradients.capture import Tape
from lmdp.gradients.precision import full_precision
from lmdp.gradients.rows import dot_product, norm_floor
from lmdp.private.clipping import Clipping, usable
from lmdp.private.diagnostics import Diagnostics, StepRecord, clip_fraction
from lmdp.private.noise import Chance
from lmdp.private.weights import Batch, BatchView, Private, WeightSource, shares


@dataclass
class Sums:
    """What has been added up of the current batch. Everything in here is private until noise is added."""

    clipped: dict[str, Tensor]
    raw: dict[str, Tensor]
    shares: Tensor
    norms: list[Tensor]
    examples: int = 0
    nonfinite: int = 0


class PrivateStep:
    """Sums, noise, gradients. `source` is absent for methods that do not reweight layers."""

    def __init__(
        self,
        tape: Tape,
        clipping: Clipping,
        source: WeightSource | None,
        chance: Chance,
        *,
        noise_multiplier: float,
        expected_batch_size: float,
        mean_loss: bool,
        allow_unused: bool,
        keep_raw: bool,
        diagnostics: Diagnostics | None,
    ) -> None:
        self.tape = tape
        self.clipping = clipping
        self.source = source
        self.noise_multiplier = noise_multiplier
        self.chance = chance
        self._expected_batch_size = expected_batch_size
        self._mean_loss = mean_loss
        self._allow_unused = allow_unused
        self._diagnostics = diagnostics
        self._keep_norms = diagnostics is not None or (source is not None and source.reads_private_batch)
        self._keep_raw = diagnostics is not None or keep_raw
        self._sums = self._fresh()

    @property
    def gradient_std(self) -> float:
        """σ_g x sensitivity: a share of the budget may go to the weight statistic, and the gradient pays for it."""
        share = self.source.share if self.source is not None else 0.0
        return self.noise_multiplier / math.sqrt(1 - share) * self.clipping.sensitivity

    @property
    def statistic_std(self) -> float:
        """σ_v; one example moves the statistic by at most 1."""
        share = self.source.share if self.source is not None else 0.0
        return self.noise_multiplier / math.sqrt(share) if share else 0.0

    def absorb(self) -> None:
        """Add the gradients of the last backward pass to the sums of the current batch."""
        with full_precision(self.tape.device):
            self._absorb()

    def _absorb(self) -> None:
        gradients = self.tape.take()
        if gradients.unreached and not self._allow_unused:
            raise RuntimeError(
                f"no gradient reached {gradients.unreached} in this backward pass. Freeze parameters that are not "
                "trained (requires_grad_(False)) before make_private, or pass allow_unused=True: they then count as "
                "zero and receive noise only."
            )
        scaled = measure(gradients, self.tape, mean_loss=self._mean_loss)
        scales = self.clipping.scales(scaled.norms)
        sums = self._sums
        if self._keep_raw:
            clipped, raw = scaled.sums(scales, torch.ones_like(scales))
            _add(sums.raw, raw)
        else:
            (clipped,) = scaled.sums(scales)
        _add(sums.clipped, clipped)
        if self._keep_norms:
            sums.norms.append(scaled.norms)
        sums.shares += shares(scaled.norms).sum(0)
        sums.examples += gradients.batch_size
        sums.nonfinite += scaled.nonfinite

    def forget(self) -> None:
        """Drop the parts of a batch that was never completed. Nothing of them has been released."""
        self._sums = self._fresh()

    def release(self, number: int) -> None:
        """Write the noisy, averaged gradient of the batch to every parameter's `.grad`. Steps are numbered from 1."""
        with full_precision(self.tape.device):
            self._release(number)

    def _release(self, number: int) -> None:
        sums, self._sums = self._sums, self._fresh()
        weights = self._weights(sums)
        parameters, index, size = self.tape.canonical_parameters, self.tape.layers.index, self._expected_batch_size
        layer_weights = [1.0] * len(self.tape.layers) if weights is None else weights.tolist()
        noise = self.chance.noise(number)
        gradient_noise = noise.like(list(parameters.values()), self.gradient_std / size)
        for (name, parameter), released in zip(parameters.items(), gradient_noise):
            if name in sums.clipped:
                released.add_(sums.clipped[name], alpha=layer_weights[index[name]] / size)
            parameter.grad = released
        if isinstance(self.source, Private):
            self.source.observe(sums.shares + noise.like([sums.shares], self.statistic_std)[0])
        if self._diagnostics is not None:
            self._diagnostics.add(self._record(sums, weights))

    def _weights(self, sums: Sums) -> Tensor | None:
        if self.source is None:
            return None
        if isinstance(self.source, Batch):
            self.source.look(self._view(sums))
        return self.source.weights()

    def _view(self, sums: Sums) -> BatchView:
        norms = torch.cat(sums.norms) if sums.norms else sums.shares.new_zeros(0, len(sums.shares))
        return batch_view(norms, self.clipping.clip_norm, sums.clipped, sums.raw, sums.examples, self.tape)

    def _record(self, sums: Sums, weights: Tensor | None) -> StepRecord:
        norms = torch.cat(sums.norms) if sums.norms else sums.shares.new_zeros(0, len(sums.shares))
        index, squared = self.tape.layers.index, 0.0
        for name, raw in sums.raw.items():
            weight = 1.0 if weights is None else float(weights[index[name]])
            squared += float((sums.clipped[name] * weight - raw).double().square().sum())
        return StepRecord(
            bias_norm=math.sqrt(squared) / max(1, sums.examples),
            clip_fraction=clip_fraction(norms, self.clipping.clip_norm),
            weights=None if weights is None else tuple(weights.tolist()),
            mean_norms=tuple(norms.mean(0).tolist()) if len(norms) else (),
            examples=sums.examples,
            nonfinite_examples=sums.nonfinite,
        )

    def _fresh(self) -> Sums:
        return Sums({}, {}, torch.zeros(len(self.tape.layers), dtype=torch.float64), [])


@dataclass(frozen=True)
class Measured:
    """The gradients of a batch with their norms: non-finite examples removed, and a mean loss undone."""

    gradients: Gradients
    tape: Tape
    norms: Tensor
    factor: float
    nonfinite: int

    def sums(self, *scales: Tensor) -> list[dict[str, Tensor]]:
        """One for each of the `scales`."""
        if self.gradients.batch_size == 0:
            return [{} for _ in scales]
        dtypes = {p.dtype for p in self.tape.canonical_parameters.values()}
        own = dtypes.pop() if len(dtypes) == 1 else torch.float64  # of all at once, not in every layer
        return self.gradients.weighted_sums([(each * self.factor).to(own) for each in scales], self.tape.layers)


def measure(gradients: Gradients, tape: Tape, *, mean_loss: bool) -> Measured:
    """A loss averaged over B examples gives every example 1/B of its gradient; norms and sums are multiplied back."""
    factor = float(gradients.batch_size) if mean_loss else 1.0
    squared = gradients.squared_norms(tape.layers)
    norms, bad = usable(squared.sqrt(), norm_floor(tape.dtype))
    nonfinite = int(bad.sum())
    return Measured(gradients.without(bad) if nonfinite else gradients, tape, norms * factor, factor, nonfinite)


def batch_view(
    norms: Tensor,
    clip_norm: float,
    clipped: dict[str, Tensor],
    raw: dict[str, Tensor],
    examples: int,
    tape: Tape,
) -> BatchView:
    """Norms, and per layer |u|² and u · mean gradient where raw sums were kept."""
    if not raw:
        return BatchView(norms, clip_norm)
    squared, dot = torch.zeros(2, len(tape.layers), dtype=torch.float64)
    for name, u in clipped.items():
        at = tape.layers.index[name]
        squared[at] += dot_product(u, u) / examples**2
        dot[at] += dot_product(u, raw[name]) / examples**2
    return BatchView(norms, clip_norm, squared, dot)


def _add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value
