"""The risk profile: per-layer error rates of the best membership adversary, with everything needed to judge them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from lmdp.data.records import MAY_BE_MISSING, Amount, Share, between, decoded, encoded, one_of, read_object
from lmdp.membership.leak import By, Curve, Leak, Pooling, table, without_usual
from lmdp.membership.metrics import Interval, around
from lmdp.risk.apart import told_apart
from lmdp.risk.verdict import verdict

FORMAT = 1
PROTOCOLS = ("heldout", "paper")
LAYER_FIELDS = (
    "name",
    "error_rate",
    "error_rate_interval",
    "accuracy",
    "auc",
    "interval",
    "tpr_at_1pct",
    "tpr_at_01pct",
    "attack",
    "in_sample",
    "null",
)
"""What risk.json holds of a layer, in this order."""


@dataclass(frozen=True)
class LayerRisk(Leak):
    """A leak of a shadow model. `in_sample` and `null` are set by the paper's protocol only.

    A profile does not keep the rest of a leak: these fields say what is true of any, by the widest of values.
    """

    accuracy_interval: Interval = field(init=False, repr=False, default=(0.0, 1.0))
    auc_error: Share = field(init=False, repr=False, default=1.0)
    tpr_at_1pct_interval: Interval = field(init=False, repr=False, default=(0.0, 1.0))
    roc: Curve = field(init=False, repr=False, default=((), ()))
    in_sample: Share | None = None
    null: Share | None = None

    @classmethod
    def of(cls, leak: Leak, in_sample: float | None = None, null: float | None = None) -> LayerRisk:
        kept = {name: getattr(leak, name) for name in LAYER_FIELDS if name not in ("in_sample", "null")}
        return cls(**kept, in_sample=in_sample, null=null)

    @property
    def fires(self) -> bool:
        """As a control of an audit does; the standard error is taken from the interval, which a profile keeps."""
        return self.auc - 3.29 * _error(self.auc, self.interval) > 0.5

    def to_dict(self) -> dict[str, Any]:
        return {name: encoded(getattr(self, name)) for name in LAYER_FIELDS}


@dataclass(frozen=True)
class ShadowSummary:
    """How the shadow models were trained, and how long training and attacking took.

    `enough` is the share of its half after which a model was trained no further; `of` names model and data, if known.
    `dataset` is a digest of the data under this machine's key: private data are compared with them.
    """

    models: int
    examples: int
    train_accuracy: Share
    test_accuracy: Share
    epochs: int
    train_seconds: Amount
    attack_seconds: Amount
    enough: Annotated[float, between(0, 2), MAY_BE_MISSING] = 0.99
    of: Annotated[str, MAY_BE_MISSING] = ""
    dataset: Annotated[str, MAY_BE_MISSING] = ""


@dataclass(frozen=True)
class RiskProfile:
    """Per-layer risk of an architecture, estimated on public data. Pass it to `make_private(risk=...)`.

    `error_rates` are what was measured; `weight_rates` what training makes layer weights of: the same for layers that
    cannot be told apart, and for all of them where nothing was measured. To weigh layers by what was measured, noise
    and all, pass `risk=profile.error_rates`. `by` says how layers are grouped, which training must do likewise;
    `pooling` what was kept of sequences.
    """

    layers: tuple[LayerRisk, ...]
    protocol: Annotated[str, one_of(*PROTOCOLS)]
    controls: tuple[LayerRisk, ...]
    reference: LayerRisk | None
    shadow: ShadowSummary
    seed: int
    format: int = FORMAT
    by: By = "module"
    pooling: Pooling | None = None

    @property
    def error_rates(self) -> dict[str, float]:
        """Layer name → error rate, in layer order: held out, or in-sample under the paper's protocol."""
        if self.protocol == "paper":
            return {layer.name: 1 - (layer.in_sample or 0.0) for layer in self.layers}
        return {layer.name: layer.error_rate for layer in self.layers}

    @property
    def weight_rates(self) -> dict[str, float]:
        """Layer name → the error rate that training weighs it by. Under the paper's protocol, as published.

        Layers that cannot be told apart share one (`told_apart`), and so do all where no layer leaks measurably.
        """
        rates = self.error_rates
        if self.protocol == "paper":
            return rates
        errors = [_error(layer.error_rate, layer.error_rate_interval) for layer in self.layers]
        if not self.leaking or any(control.fires for control in self.controls):
            return dict.fromkeys(rates, sum(rates.values()) / len(rates))
        return dict(zip(rates, told_apart(list(rates.values()), errors)))

    @property
    def leaking(self) -> tuple[LayerRisk, ...]:
        """Layers whose AUC lies above chance, with intervals that allow for having looked at all layers."""
        return tuple(layer for layer in self.layers if self.corrected(layer)[0] > 0.5)

    @property
    def together(self) -> tuple[LayerRisk, ...]:
        """The layers as they are shown: with intervals that hold together."""
        return tuple(replace(layer, interval=self.corrected(layer)) for layer in self.layers)

    def corrected(self, layer: LayerRisk) -> Interval:
        """The interval of a layer's AUC, so wide that those of all layers hold together at 95 %."""
        return around(layer.auc, _error(layer.auc, layer.interval), 0.95 ** (1 / len(self.layers)))

    @property
    def weighs_alike(self) -> bool:
        """Whether training with this profile gives no layer more or less weight for its risk."""
        return len(set(self.weight_rates.values())) == 1

    @property
    def note(self) -> str:
        """What whoever trains with it must know, in one line; "" if there is nothing."""
        if not self.weighs_alike or len(self.layers) == 1:
            return ""
        return f"the risk profile does not tell layers apart, so that all count alike. {self.verdict}"

    @property
    def verdict(self) -> str:
        """Which layers leak; or that nothing was measured, and what to do about it."""
        return verdict(self)

    @property
    def peak(self) -> LayerRisk:
        return max(self.layers, key=lambda layer: layer.auc)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **without_usual(encoded(self)),
            "layers": [layer.to_dict() for layer in self.layers],
            "controls": [control.to_dict() for control in self.controls],
            "reference": None if self.reference is None else self.reference.to_dict(),
            "weight_rates": self.weight_rates,
            "verdict": self.verdict,
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> RiskProfile:
        """Read a saved profile; a file that is not one is refused with the field that is wrong."""
        return cls.from_dict(read_object(path, "a risk profile"), str(path))

    @classmethod
    def from_dict(cls, content: Any, origin: str = "risk profile") -> RiskProfile:
        profile = decoded(cls, content, origin, version=FORMAT)
        layers = profile.layers
        if not layers:
            raise ValueError(f"{origin}: layers is empty; a profile has at least 1 layer")
        if len({layer.name for layer in layers}) < len(layers):
            raise ValueError(f"{origin}: layers has two layers of the same name")
        if profile.protocol == "paper" and any(layer.in_sample is None for layer in layers):
            raise ValueError(f"{origin}: layers lack in_sample, which protocol 'paper' needs")
        if len({missing for layer in layers for missing in (layer.in_sample is None, layer.null is None)}) > 1:
            raise ValueError(f"{origin}: some layers have in_sample and null, and some lack one of them")
        return profile

    def __str__(self) -> str:
        rows = [*self.together, *self.controls, *([self.reference] if self.reference else [])]
        text = table(rows)
        if any(layer.in_sample is not None for layer in self.layers):
            text += "\nin-sample accuracy (and on permuted labels): " + ", ".join(
                f"{layer.name} {layer.in_sample:.3f} ({layer.null:.3f})" for layer in self.layers
            )
        s = self.shadow
        weighed = ", ".join(f"{name} {rate:.3f}" for name, rate in self.weight_rates.items())
        return (
            f"{text}\nshadow: {s.of and f'{s.of}, '}{s.models} model(s) on half of {s.examples} examples, train "
            f"accuracy {s.train_accuracy:.3f}, test accuracy {s.test_accuracy:.3f}; training {s.train_seconds:.0f} s, "
            f"attacks {s.attack_seconds:.0f} s\nerror rates that training weighs layers by: {weighed}\n{self.verdict}"
        )


def _error(value: float, interval: Interval) -> float:
    """The standard error behind a 95 % interval, by the side on which it was not cut off at 0 or 1."""
    low, high = interval
    return max(0.0, value - low, high - value) / 1.96
