"""What a released gradient is divided by, layer by layer, before the optimizer takes it.

    unit_clip   C: the gradient is then in units of the clip norm, and a learning rate suits every C
    unit_gain   √L·w_l: a layer that `lm` has turned down by its weight w_l keeps its step size, and has more noise

Both are public numbers: C is a setting, and w was released, or is public, before the step. So this is post-processing
of what was released. No promise depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lmdp.methods import Method, check_unit_gain

LEAST_GAIN = 0.05
"""√L·w_l counts as at least this much, so that the noise of no layer grows more than twenty-fold."""


@dataclass(frozen=True)
class Rescaling:
    """`clip_norm`: by what every layer is divided. `unit_gain`: whether by its weight, too."""

    clip_norm: float = 1.0
    unit_gain: bool = False

    @classmethod
    def of(cls, method: Method, source: str, clip_norm: float, *, unit_clip: bool, unit_gain: bool) -> Rescaling:
        """Refuses to divide by weights that there are none of, or that are private."""
        if unit_gain:
            check_unit_gain(method, source)
        return cls(float(clip_norm) if unit_clip else 1.0, unit_gain)

    def applied(self, released: Sequence[Tensor], w: Tensor, layer_of: Tensor) -> Sequence[Tensor]:
        """Of each parameter, which belongs to the layer `layer_of`; w [L] are the weights of this step."""
        if self == Rescaling():
            return released
        divisors = w.new_full(w.shape, self.clip_norm)
        if self.unit_gain:
            divisors = divisors * (math.sqrt(len(w)) * w).clamp(min=LEAST_GAIN)
        each = divisors[layer_of]
        return [(value / each[i].to(value.device)).to(value.dtype) for i, value in enumerate(released)]
