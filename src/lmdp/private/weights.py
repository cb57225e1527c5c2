"""Where the layer weights w come from.

    private   from a noisy statistic of earlier steps, released jointly with the gradient   (default)
    public    from a public batch at the current, already released, parameters
    fixed     from the risk alone
    batch     from the private batch itself: not private, kept for reproduction and never certified

Guarantee. But for `batch`, the w of a step has norm 1 and is a function of released and public values only, fixed
before the step's batch is seen. w multiplies every example's contribution, so only then is the sensitivity of w·U
the clip norm. What `private` is told of a batch is the sum of v_i = (n_il / ||G_i||)_l, vectors of norm at most 1,
with noise of its own: one example moves it by at most 1, whatever the neighbours, and the mechanism accounts for
both.

Assumes that risk and public data are public, and that the parameters at which public gradients are taken are
released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lmdp.bias import bias_optimal
from lmdp.methods import SOURCES, Method, clipped_norm, over, total

ERROR_RATE_RANGE = (0.01, 0.5)
MOMENTUM = 0.9
FLOOR = 0.01


@dataclass(frozen=True)
class BatchView:
    """What a source may ask of one batch of gradients: norms, and for each layer |u|^2 and u · mean gradient."""

    norms: Tensor
    clip_norm: float
    squared_u: Tensor | None = None
    u_dot_mean: Tensor | None = None


class Base(Protocol):
    """Turns a batch into unnormalised, risk-free weights ŵ [L]."""

    def __call__(self, batch: BatchView) -> Tensor: ...


Look = Callable[[], BatchView]
"""Shows the private batch of the coming release, without noise."""
Measure = Callable[[int], BatchView]
"""Shows public gradients, for the measurement of this number."""
Probe = Callable[[], Measure]


class LayerWeights(Protocol):
    """A source at work: `weights` for a step, `current` for whoever looks on.

    share        of the privacy budget that pays for what `observe` is told; 0 where nothing is
    reads_batch  whether `weights` looks at the private batch
    reads_sums   whether it then needs sums of gradients, besides norms
    """

    name: str
    share: float
    reads_batch: bool
    reads_sums: bool

    def weights(self, look: Look) -> Tensor: ...
    def observe(self, noisy_sum: Tensor) -> None: ...
    def current(self) -> Tensor: ...
    def state(self) -> dict[str, list[float]]: ...
    def restore(self, state: dict[str, list[float]]) -> None: ...


def risk_factors(error_rates: Sequence[float], emphasis: float) -> Tensor:
    """ER_l^r. A lower error rate is a leakier layer and gets a smaller share. Clamped: 0 would leave only noise."""
    if not (emphasis >= 0 and math.isfinite(emphasis)):
        raise ValueError(f"emphasis is {emphasis}; it must be a finite number, 0 or more")
    rates = torch.tensor(list(error_rates), dtype=torch.float64)
    if not torch.isfinite(rates).all() or (rates < 0).any() or (rates > 1).any():
        raise ValueError(f"error rates are {rates.tolist()}; each must lie between 0 and 1")
    return rates.clamp(*ERROR_RATE_RANGE).pow(emphasis)


def unit(weights: Tensor) -> Tensor:
    """Scaled to norm 1; uniform where nothing is known (all zero, or not finite)."""
    peak = weights.abs().max()
    usable = torch.isfinite(peak) & (peak > 0)  # not read: it may be on a device
    uniform = torch.full_like(weights, 1 / math.sqrt(len(weights)))
    return torch.where(usable, _normalised(weights / peak), uniform)  # so that squares neither overflow nor vanish


def _normalised(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length


def mean_ratio(batch: BatchView) -> Tensor:
    """The paper's ŵ_l: mean over examples of n_il / C_i."""
    n = batch.norms
    if len(n) == 0:
        return n.new_zeros(n.shape[1])
    return over(n, clipped_norm(n, batch.clip_norm).expand_as(n)).mean(0)


def shares(norms: Tensor) -> Tensor:
    """v_i = (n_il / ||G_i||)_l: a vector of norm 1 for every example, 0 where its gradient is 0."""
    return over(norms, total(norms).expand_as(norms))


class Fixed:
    """ŵ uniform: w depends on the risk only."""

    name = "fixed"
    share = 0.0
    reads_batch = reads_sums = False

    def __init__(self, risk: Tensor) -> None:
        self._risk, self._weights = risk, unit(risk)

    def weights(self, look: Look) -> Tensor:
        return self._weights

    def observe(self, noisy_sum: Tensor) -> None:
        """Nothing is released but the gradient."""

    def current(self) -> Tensor:
        return self._weights

    def state(self) -> dict[str, list[float]]:
        return {}

    def restore(self, state: dict[str, list[float]]) -> None:
        del state


class Unweighted(Fixed):
    """For methods that do not reweight layers: every layer counts fully."""

    name = "none"

    def __init__(self, risk: Tensor) -> None:
        self._weights = torch.ones_like(risk)


class Private(Fixed):
    """ŵ from a running mean of the noisy sum of shares, S_v = sum_i v_i + N(0, σ_v² I), of *earlier* steps.

    One example moves S_v by at most 1 and the gradient sum by at most C. Released together, each in units of its own
    noise, that is one Gaussian mechanism with σ^-2 = σ_g^-2 + σ_v^-2, which is what the accountant is told.
    """

    name = "private"

    def __init__(self, risk: Tensor, *, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"weight_budget is {share}; it must lie strictly between 0 and 1 (default 0.01)")
        super().__init__(risk)
        self.share = share
        self._mean = torch.zeros_like(risk)

    def observe(self, noisy_sum: Tensor) -> None:
        """Take in a released (noisy) sum of shares; the next step's weights follow from it."""
        self._mean = MOMENTUM * self._mean + (1 - MOMENTUM) * noisy_sum
        self._update()

    def _update(self) -> None:
        base = self._mean.clamp(min=FLOOR * self._mean.abs().max())
        self._weights = unit(unit(base) * self._risk)

    def state(self) -> dict[str, list[float]]:
        return {"mean": self._mean.tolist()}

    def restore(self, state: dict[str, list[float]]) -> None:
        self._mean = _restored(state, "mean", self._risk)
        if self._mean.abs().max() > 0:
            self._update()


class Public(Fixed):
    """ŵ from public gradients at the current parameters, measured anew every `every` steps.

    `measure` is given the number of the measurement, so that a resumed run goes on where it was.
    """

    name = "public"

    def __init__(self, risk: Tensor, *, base: Base, measure: Measure, every: int) -> None:
        if every < 1:
            raise ValueError(f"public_every is {every}; it must be 1 or more")
        super().__init__(risk)
        self._base, self._measure, self._every = base, measure, every
        self._age = 0

    def weights(self, look: Look) -> Tensor:
        if self._age % self._every == 0:
            self._weights = unit(self._base(self._measure(self._age // self._every)) * self._risk)
        self._age += 1
        return self._weights

    def state(self) -> dict[str, list[float]]:
        return {"age": [self._age], "weights": self._weights.tolist()}

    def restore(self, state: dict[str, list[float]]) -> None:
        weights = _restored(state, "weights", self._risk)
        if abs(float(torch.linalg.vector_norm(weights)) - 1) > 1e-9:  # w bounds the sensitivity: a file is not believed
            raise ValueError(f"the saved layer weights {weights.tolist()} do not have norm 1")
        self._age, self._weights = int(_restored(state, "age", torch.zeros(1))[0]), weights


def _restored(state: dict[str, list[float]], name: str, like: Tensor) -> Tensor:
    """A vector of a saved state, of the length and type of `like`."""
    try:
        vector = torch.tensor(state[name], dtype=like.dtype, device=like.device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the saved state has no usable '{name}' ({type(error).__name__}: {error})") from None
    if vector.shape != like.shape or not torch.isfinite(vector).all():
        raise ValueError(f"the saved '{name}' is {state[name]}; it must be {len(like)} finite numbers")
    return vector


class Batch(Fixed):
    """ŵ from the private batch itself, as in the paper. Never certified."""

    name = "batch"
    reads_batch = True

    def __init__(self, risk: Tensor, *, base: Base) -> None:
        super().__init__(risk)
        self._base = base
        self.reads_sums = base is optimal_base

    def weights(self, look: Look) -> Tensor:
        self._weights = unit(self._base(look()) * self._risk)
        return self._weights


def refutation(source: LayerWeights) -> str:
    """Why these weights are not private; "" if they are."""
    record = SOURCES.get(source.name)
    return (record.refuted if record else "") or (
        "the layer weights read the private batch" if source.reads_batch else ""
    )


def source_for(
    name: str,
    method: Method,
    rates: Sequence[float],
    emphasis: float,
    probe: Probe,
    every: int,
    share: float,
    device: torch.device | str = "cpu",
) -> LayerWeights:
    """The source of this name at work; `probe` is made for `public` only. Settings are checked for every method."""
    base: Base = optimal_base if method.optimal else mean_ratio
    risk = torch.ones(len(rates), dtype=torch.float64) if method.optimal else risk_factors(rates, emphasis)
    risk = risk.to(device)
    makers: dict[str, Callable[[], LayerWeights]] = {
        "private": lambda: Private(risk, share=share),
        "public": lambda: Public(risk, base=base, measure=probe(), every=every),
        "fixed": lambda: Fixed(risk),
        "batch": lambda: Batch(risk, base=base),
    }
    given, as_given = SOURCES[name].measure, cast(Any, torch.as_tensor)
    given = None if given is None else cast(Any, lambda number, ask=given: ask(number, len(risk)).to(device))
    at_work = makers[name]() if given is None else Public(risk, base=as_given, measure=cast(Any, given), every=every)
    at_work.name = name
    return at_work if method.reweighted else Unweighted(risk)


def optimal_base(batch: BatchView) -> Tensor:
    """ŵ that minimises the bias ||w·u − mean gradient|| over unit vectors, from one batch."""
    if batch.squared_u is None or batch.u_dot_mean is None:
        raise ValueError("bias-optimal weights need |u|^2 and u · mean gradient of the batch")
    return bias_optimal(batch.squared_u.double(), batch.u_dot_mean.double())
