"""The private step: the one place where private gradients become values that may leave.

    absorb   per-example norms [B, L] → scales [B, L] → weighted sums, added up over the parts of a batch
    release  (w_l · sum + noise, on the grid) / expected batch size → `.grad`

Guarantee. What `release` writes, and what it tells the source of the weights, depends on an example only through
sums that the example moves by at most the mechanism's sensitivity (the gradient) and by at most 1 (the statistic),
each with noise of the mechanism's deviation, under the relation "add or remove one example". An empty batch releases
noise all the same, and the divisor is the public expected batch size, never the size of the batch.

Assumes bounded contributions (`clipping.py`), weights fixed before the batch was seen (`weights.py`), fresh noise
(`noise.py`), and gradients of which each is one example's own, which the guards look for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmdp.accounting import Mechanism
from lmdp.gradients import Capture, PerExampleGradients
from lmdp.gradients.attach import full_precision
from lmdp.gradients.rows import dot_product, norm_floor
from lmdp.private.clipping import Clipping, usable
from lmdp.private.diagnostics import Diagnostics, StepRecord
from lmdp.private.noise import Randomness
from lmdp.private.weights import BatchView, LayerWeights, shares


@dataclass
class Sums:
    """What has been added up of the current batch. Everything in here is private until noise is added."""

    clipped: dict[str, Tensor]
    raw: dict[str, Tensor]
    shares: Tensor
    norms: list[Tensor]
    examples: int = 0
    nonfinite: int = 0


class Observer:
    """Sees what is drawn and released, from outside, and may put something else in its place: for checks of a training.

    A run with an observer of its own is not certified. This one does nothing, and cannot be changed.
    """

    __slots__ = ()

    def randomness(self, randomness: Randomness) -> Randomness:
        """Once, at the beginning: all that draws and noise are made of."""
        return randomness

    def before_release(self) -> None: ...

    def statistic(self, noisy_sum: Tensor) -> Tensor:
        """What the weights are told."""
        return noisy_sum

    def after_release(self) -> None:
        """Gradients are written, and the optimizer has not stepped yet."""


@dataclass(frozen=True)
class StepOptions:
    """mean_loss: whether the loss divides by the number of examples, which is undone. allow_unused: whether parameters
    that a pass does not reach count as zero. diagnostics: where un-noised numbers go, if anywhere."""

    mean_loss: bool = True
    allow_unused: bool = False
    diagnostics: Diagnostics | None = None
    observer: Observer = Observer()  # noqa: RUF009  (it has no state)


class PrivateStep:
    """Sums, noise, gradients."""

    def __init__(
        self,
        capture: Capture,
        clipping: Clipping,
        source: LayerWeights,
        randomness: Randomness,
        mechanism: Mechanism,
        options: StepOptions,
    ) -> None:
        self.capture = capture
        self.clipping = clipping
        self.source = source
        self.randomness = randomness
        self.mechanism = mechanism
        self.options = options
        self._keep_norms = options.diagnostics is not None or source.reads_batch
        self._keep_raw = options.diagnostics is not None or source.reads_sums
        self._sums = self._fresh()

    def absorb(self) -> None:
        """Add the gradients of the last backward pass to the sums of the current batch."""
        with full_precision(self.capture.device):
            gradients = self.capture.take()
            if gradients.unreached and not self.options.allow_unused:
                raise RuntimeError(
                    f"no gradient reached {gradients.unreached} in this backward pass. Freeze parameters that are not "
                    "trained (requires_grad_(False)) before make_private, or pass allow_unused=True: they then count "
                    "as zero and receive noise only."
                )
            measured = measure(gradients, self.capture, mean_loss=self.options.mean_loss)
            measured, scales = measured.scaled(self.clipping)
            wanted = [scales, torch.ones_like(scales)] if self._keep_raw else [scales]
            for total, more in zip((self._sums.clipped, self._sums.raw), measured.sums(*wanted)):
                for name, value in more.items():
                    total[name] = total[name].add_(value) if name in total else value
            if self._keep_norms:
                self._sums.norms.append(measured.norms)
            self._sums.shares += shares(measured.norms).sum(0)
            self._sums.examples += gradients.batch_size
            self._sums.nonfinite += measured.nonfinite

    def forget(self) -> None:
        """Drop the parts of a batch that was never completed. Nothing of them has been released."""
        self._sums = self._fresh()

    def release(self, number: int) -> None:
        """Write the noisy, averaged gradient of the batch to every parameter's `.grad`. Steps are numbered from 1.

        Sum, noise, round to the public grid, then divide.
        """
        with full_precision(self.capture.device):
            sums, self._sums = self._sums, self._fresh()
            mechanism, index, parameters = self.mechanism, self.capture.layers.index, self.capture.parameters
            w = self.source.weights(lambda: self._view(sums))  # [L]
            layer_weights, noise = w.tolist(), self.randomness.noise(number)
            gradients = noise.added(
                list(parameters.values()),
                [sums.clipped[name] if name in sums.clipped else torch.zeros_like(p) for name, p in parameters.items()],
                [layer_weights[index[name]] for name in parameters],
                mechanism.gradient_grid,
                mechanism.expected_batch_size,
            )
            for parameter, gradient in zip(parameters.values(), gradients):
                parameter.grad = gradient
            if mechanism.statistic_share:
                (statistic,) = noise.added([sums.shares], [sums.shares], [1.0], mechanism.statistic_grid)
                self.source.observe(self.options.observer.statistic(statistic))
            if self.options.diagnostics is not None:
                self.options.diagnostics.add(self._record(sums, w))

    def _fresh(self) -> Sums:
        return Sums({}, {}, torch.zeros(len(self.capture.layers.layers), dtype=torch.float64), [])

    def _norms(self, sums: Sums) -> Tensor:
        return torch.cat(sums.norms) if sums.norms else sums.shares.new_zeros(0, len(sums.shares))

    def _view(self, sums: Sums) -> BatchView:
        raw = sums.raw if self.source.reads_sums else None
        return batch_view(self._norms(sums), self.clipping.clip_norm, sums.clipped, raw, sums.examples, self.capture)

    def _record(self, sums: Sums, w: Tensor) -> StepRecord:
        norms, squared = self._norms(sums), 0.0
        for name, raw in sums.raw.items():
            weight = float(w[self.capture.layers.index[name]])
            squared += float((sums.clipped[name] * weight - raw).double().square().sum())
        return StepRecord(
            bias_norm=math.sqrt(squared) / max(1, sums.examples),
            clip_fraction=float((norms.norm(dim=1) > self.clipping.clip_norm).double().mean()) if len(norms) else 0.0,
            weights=tuple(w.tolist()) if self.clipping.method.reweighted else None,
            mean_norms=tuple(norms.mean(0).tolist()) if len(norms) else (),
            examples=sums.examples,
            nonfinite_examples=sums.nonfinite,
        )


@dataclass(frozen=True)
class Measured:
    """The gradients of a batch with their norms [B, L]: non-finite examples removed, and a mean loss undone."""

    gradients: PerExampleGradients
    capture: Capture
    norms: Tensor
    factor: float
    nonfinite: int

    def scaled(self, clipping: Clipping) -> tuple[Measured, Tensor]:
        """Scales [B, L], and what is left where they leave the normal range."""
        scales, bad = clipping.fitting(self.norms, self.factor, self.capture.dtype)
        if not (dropped := int(bad.sum())):
            return self, scales
        gradients, norms = self.gradients.without(bad), self.norms.masked_fill(bad[:, None], 0.0)
        return replace(self, gradients=gradients, norms=norms, nonfinite=self.nonfinite + dropped), scales

    def sums(self, *scales: Tensor) -> list[dict[str, Tensor]]:
        """One for each of the `scales` [B, L]."""
        if self.gradients.batch_size == 0:
            return [{} for _ in scales]
        dtypes = {p.dtype for p in self.capture.parameters.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64  # of all at once, not in every layer
        return self.gradients.weighted_sums([(each * self.factor).to(dtype) for each in scales], self.capture.layers)


def measure(gradients: PerExampleGradients, capture: Capture, *, mean_loss: bool) -> Measured:
    """A loss averaged over B examples gives every example 1/B of its gradient; norms and sums are multiplied back."""
    factor = float(gradients.batch_size) if mean_loss else 1.0
    norms, bad = usable(gradients.squared_norms(capture.layers).sqrt(), norm_floor(capture.dtype))
    nonfinite = int(bad.sum())
    return Measured(gradients.without(bad) if nonfinite else gradients, capture, norms * factor, factor, nonfinite)


def batch_view(
    norms: Tensor,
    clip_norm: float,
    clipped: dict[str, Tensor],
    raw: dict[str, Tensor] | None,
    examples: int,
    capture: Capture,
) -> BatchView:
    """Norms, and per layer |u|² and u · mean gradient where raw sums were kept (0 for an empty batch)."""
    if raw is None:
        return BatchView(norms, clip_norm)
    squared, dot = torch.zeros(2, len(capture.layers.layers), dtype=torch.float64)
    for name, u in clipped.items():
        at = capture.layers.index[name]
        squared[at] += dot_product(u, u) / examples**2
        dot[at] += dot_product(u, raw[name]) / examples**2
    return BatchView(norms, clip_norm, squared, dot)
