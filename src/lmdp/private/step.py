"""The private step: the one place where private gradients become values that may leave.

    absorb   per-example norms [B, L] → scales [B, L] → weighted sums, added up over the parts of a batch
    release  (w_l · sum + noise, on the grid) / expected batch size → `.grad`; of several processes the sum over all
             of them, with one noise (`processes/sums.py`)

Guarantee. What `release` writes, and what it tells the source of the weights, depends on an example only through
sums that the example moves by at most the mechanism's sensitivity (the gradient) and by at most 1 (the statistic),
each with noise of the mechanism's deviation, under the relation "add or remove one example". An empty batch releases
noise all the same, and the divisor is the public expected batch size, never the size of the batch.

Assumes bounded contributions (`clipping.py`), weights fixed before the batch was seen (`weights.py`), fresh noise
(`noise.py`), and gradients of which each is one example's own, which the guards look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmdp.accounting import Mechanism
from lmdp.diagnostics import Diagnostics, StepRecord
from lmdp.gradients import Capture, PerExampleGradients
from lmdp.gradients.batch import gathered
from lmdp.gradients.precision import full_precision
from lmdp.gradients.rows import dot_product
from lmdp.private.clipping import Clipping, usable
from lmdp.private.noise import Noised, Randomness
from lmdp.private.weights import BatchView, LayerWeights, shares
from lmdp.processes import Held, Sums
from lmdp.rescaling import Rescaling


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
    that a pass does not reach count as zero. diagnostics: where un-noised numbers go, if anywhere. rescaling: of what
    was released. held: what this process holds of the parameters, and the processes whose sums are added up."""

    held: Held
    mean_loss: bool = True
    allow_unused: bool = False
    diagnostics: Diagnostics | None = None
    observer: Observer = Observer()  # noqa: RUF009  (it has no state)
    rescaling: Rescaling = Rescaling()  # noqa: RUF009  (frozen)


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
        self._layer_of = torch.tensor(
            [capture.layers.index[name] for name in capture.parameters], device=capture.device
        )
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
            measured, scales = measure(gradients, self.capture, mean_loss=self.options.mean_loss).scaled(self.clipping)
            wanted = [scales, torch.ones_like(scales)] if self._keep_raw else [scales]
            reached = [name for name in self.capture.parameters if name not in gradients.unreached]
            self.options.held.take_in((self._sums.clipped, self._sums.raw), measured.each(*wanted), reached)
            if self._keep_norms:
                self._sums.norms.append(measured.norms)
            self._sums.shares += shares(measured.norms).sum(0)
            self._sums.examples += gradients.batch_size
            self._sums.nonfinite += measured.nonfinite

    def forget(self) -> None:
        """Drop the parts of a batch that was never completed. Nothing of them has been released."""
        self.options.held.forget()
        self._sums = self._fresh()

    def release(self, number: int) -> None:
        """Write the noisy, averaged gradient of the batch to every parameter's `.grad`. Steps are numbered from 1.

        Sum (over all processes, if there are several), noise, round to the public grid, then divide.
        """
        with full_precision(self.capture.device):
            sums, self._sums, held = self._sums, self._fresh(), self.options.held
            sums = sums.over(held, raw=self._keep_raw, norms=self._keep_norms)
            mechanism, local = self.mechanism, held.local()
            w = self.source.weights(lambda: self._view(sums))  # [L]
            clipped = dict(sums.clipped) if self.options.diagnostics is not None else sums.clipped
            gradient = Noised(
                list(local.values()),
                [clipped.pop(name) if name in clipped else torch.zeros_like(p) for name, p in local.items()],
                w[self._layer_of],
                mechanism.gradient_grid,
                mechanism.expected_batch_size,
                held.parts,
            )
            statistic = Noised([sums.shares], [sums.shares], torch.ones_like(w[:1]), mechanism.statistic_grid)
            noised = [gradient, statistic] if mechanism.statistic_share else [gradient]
            released, *statistics = self.randomness.noise(number).added(*noised)
            rescaled = self.options.rescaling.applied(released, w, self._layer_of)  # post-processing
            for parameter, value in zip(self.capture.parameters.values(), rescaled):
                parameter.grad = held.gradient(parameter, value)
            for (noisy_sum,) in statistics:
                self.source.observe(self.options.observer.statistic(noisy_sum))
            if self.options.diagnostics is not None:
                self.options.diagnostics.add(self._record(sums, w))

    def _fresh(self) -> Sums:
        capture = self.capture
        return Sums({}, {}, torch.zeros(len(capture.layers), dtype=torch.float64, device=capture.device), [])

    def _norms(self, sums: Sums) -> Tensor:
        return torch.cat(sums.norms) if sums.norms else sums.shares.new_zeros(0, len(sums.shares))

    def _view(self, sums: Sums) -> BatchView:
        raw, joined = sums.raw if self.source.reads_sums else None, self.options.held.joined
        norms, clip_norm = self._norms(sums), self.clipping.clip_norm
        return batch_view(norms, clip_norm, sums.clipped, raw, sums.examples, self.capture, joined)

    def _record(self, sums: Sums, w: Tensor) -> StepRecord:
        weights = {name: float(w[at]) for name, at in self.capture.layers.index.items()}
        applied = tuple(w.tolist()) if self.clipping.method.reweighted else None
        return StepRecord.of(self._norms(sums), sums, weights, clip_norm=self.clipping.clip_norm, w=applied)


@dataclass(frozen=True)
class Measured:
    """The gradients of a batch with their norms [B, L], a mean loss undone. Those of `bad` examples count for nothing,
    and are removed before anything is added up."""

    gradients: PerExampleGradients
    capture: Capture
    norms: Tensor
    factor: float
    bad: Tensor
    nonfinite: int = 0

    def scaled(self, clipping: Clipping) -> tuple[Measured, Tensor]:
        """Scales [B, L], and what is left without examples that are not finite or that no scale fits."""
        scales, misfits = clipping.fitting(self.norms, self.factor, self.capture.dtype)
        return replace(self, bad=self.bad | misfits).finite(), scales

    def finite(self) -> Measured:
        """Without the bad examples, of which there are hardly ever any: their number is fetched."""
        (count,) = self.capture.fetching.read(self.bad.sum())
        if not count:
            return self
        gradients, norms = self.gradients.without(self.bad), self.norms.masked_fill(self.bad[:, None], 0.0)
        return replace(self, gradients=gradients, norms=norms, nonfinite=count)

    def sums(self, *scales: Tensor) -> list[dict[str, Tensor]]:
        """One for each of the `scales` [B, L]. Then the gradients are gone."""
        return gathered(len(scales), self.each(*scales))

    def each(self, *scales: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
        """The same, one parameter after the other."""
        if self.gradients.batch_size == 0:
            return iter(())
        dtypes = {p.dtype for p in self.capture.parameters.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64  # of all at once, not in every layer
        scaled = [(each * self.factor).to(dtype) for each in scales]
        return self.gradients.each_sum(scaled, self.capture.layers, last=True)


def measure(gradients: PerExampleGradients, capture: Capture, *, mean_loss: bool) -> Measured:
    """A loss averaged over B examples gives every example 1/B of its gradient; norms and sums are multiplied back."""
    factor = gradients.factor(mean_loss=mean_loss)
    norms, bad = usable(gradients.squared_norms(capture.layers).sqrt(), capture.dtype)
    return Measured(gradients, capture, norms * factor, factor, bad)


def batch_view(
    norms: Tensor,
    clip_norm: float,
    clipped: dict[str, Tensor],
    raw: dict[str, Tensor] | None,
    examples: int,
    capture: Capture,
    joined: Callable[[Tensor], Tensor] = lambda of_parts: of_parts,
) -> BatchView:
    """Norms, and per layer |u|² and u · mean gradient where raw sums were kept (0 for an empty batch)."""
    if raw is None:
        return BatchView(norms, clip_norm)
    squared, dot = torch.zeros(2, len(capture.layers), dtype=torch.float64, device=capture.device)
    for name, u in clipped.items():
        at = capture.layers.index[name]
        squared[at] += dot_product(u, u).to(squared.device) / examples**2
        dot[at] += dot_product(u, raw[name]).to(dot.device) / examples**2
    return BatchView(norms, clip_norm, *joined(torch.stack([squared, dot])))
