"""Risk arrives at the trust boundary as plain public numbers, one per layer, in layer order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmdp.layers import LayerMap

UNKNOWN = 0.5
"""The error rate of guessing: a layer about which nothing is known."""


def error_rates_for(risk: Any, layers: LayerMap) -> list[float]:
    """Error rates in layer order, from a profile, a {layer: rate} mapping, a sequence, or None (all alike)."""
    rates = getattr(risk, "error_rates", risk)
    if rates is None:
        return [UNKNOWN] * len(layers)
    if isinstance(rates, Mapping):
        return _by_name(rates, layers)
    if isinstance(rates, Sequence) or hasattr(rates, "tolist"):
        values = [float(rate) for rate in rates]
        if len(values) != len(layers):
            raise ValueError(
                f"risk has {len(values)} error rates, but the model has {len(layers)} layers: {', '.join(layers.names)}"
            )
        return values
    raise TypeError(
        f"risk is a {type(risk).__name__}; pass a RiskProfile, a {{layer name: error rate}} mapping or a sequence"
    )


def _by_name(rates: Mapping[str, Any], layers: LayerMap) -> list[float]:
    missing = [name for name in layers.names if name not in rates]
    unknown = [name for name in rates if name not in layers.names]
    if missing or unknown:
        raise ValueError(
            f"the risk profile belongs to another architecture: it lacks layers {missing} and has layers {unknown} "
            f"that the model does not ({len(layers.names) - len(missing)} of {len(layers)} match). Estimate it on the "
            "same architecture."
        )
    return [float(rates[name]) for name in layers.names]
