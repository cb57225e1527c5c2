"""The risk profile: per-layer error rates of the best membership adversary, with everything needed to judge them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmdp.audit.results import Leak, table
from lmdp.data.records import Fields
from lmdp.membership.metrics import Interval

FORMAT = 1
PROTOCOLS = ("heldout", "paper")


@dataclass(frozen=True)
class LayerRisk:
    """One layer. `interval` is that of the AUC; `in_sample` and `null` are set by the paper's protocol only."""

    name: str
    error_rate: float
    error_rate_interval: Interval
    accuracy: float
    auc: float
    interval: Interval
    tpr_at_1pct: float
    tpr_at_01pct: float | None
    attack: str
    in_sample: float | None = None
    null: float | None = None

    @classmethod
    def of(cls, leak: Leak, in_sample: float | None, null: float | None) -> LayerRisk:
        return cls(
            leak.name,
            leak.error_rate,
            leak.error_rate_interval,
            leak.accuracy,
            leak.auc,
            leak.interval,
            leak.tpr_at_1pct,
            leak.tpr_at_01pct,
            leak.attack,
            in_sample,
            null,
        )


@dataclass(frozen=True)
class ShadowSummary:
    """How the shadow models were trained, and how long training and attacking took."""

    models: int
    examples: int
    train_accuracy: float
    test_accuracy: float
    epochs: int
    train_seconds: float
    attack_seconds: float


@dataclass(frozen=True)
class RiskProfile:
    """Per-layer risk of an architecture, estimated on public data. Pass it to `make_private(risk=...)`."""

    layers: tuple[LayerRisk, ...]
    protocol: str
    controls: tuple[LayerRisk, ...]
    reference: LayerRisk | None
    shadow: ShadowSummary
    seed: int
    format: int = FORMAT

    @property
    def error_rates(self) -> dict[str, float]:
        """Layer name → error rate, in layer order: held out, or in-sample under the paper's protocol."""
        if self.protocol == "paper":
            return {layer.name: 1 - (layer.in_sample or 0.0) for layer in self.layers}
        return {layer.name: layer.error_rate for layer in self.layers}

    @property
    def peak(self) -> LayerRisk:
        return max(self.layers, key=lambda layer: layer.auc)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> RiskProfile:
        """Read a saved profile; a file that is not one is refused with the field that is wrong."""
        return cls._read(Fields.load(path, "a risk profile"))

    @classmethod
    def from_dict(cls, content: Any, origin: str = "risk profile") -> RiskProfile:
        return cls._read(Fields(content, origin))

    @classmethod
    def _read(cls, root: Fields) -> RiskProfile:
        root.format(FORMAT)
        origin = root.where
        protocol = root.text("protocol")
        if protocol not in PROTOCOLS:
            raise ValueError(f"{origin}: protocol is {protocol!r}; it must be one of {', '.join(PROTOCOLS)}")
        layers = tuple(_layer(reader) for reader in root.each("layers"))
        if not layers:
            raise ValueError(f"{origin}: layers is empty; a profile has at least 1 layer")
        if len({layer.name for layer in layers}) < len(layers):
            raise ValueError(f"{origin}: layers has two layers of the same name")
        if protocol == "paper" and any(layer.in_sample is None for layer in layers):
            raise ValueError(f"{origin}: layers lack in_sample, which protocol 'paper' needs")
        if len({known for layer in layers for known in (layer.in_sample is None, layer.null is None)}) > 1:
            raise ValueError(f"{origin}: some layers have in_sample and null, and some lack one of them")
        reference = root.optional("reference")
        shadow = root.inner("shadow")
        return cls(
            layers=layers,
            protocol=protocol,
            controls=tuple(_layer(reader) for reader in root.each("controls")),
            reference=None if reference is None else _layer(reference),
            shadow=ShadowSummary(
                shadow.integer("models"),
                shadow.integer("examples"),
                shadow.number("train_accuracy", 0, 1),
                shadow.number("test_accuracy", 0, 1),
                shadow.integer("epochs"),
                shadow.seconds("train_seconds"),
                shadow.seconds("attack_seconds"),
            ),
            seed=root.integer("seed"),
        )

    def __str__(self) -> str:
        rows = [*self.layers, *self.controls, *([self.reference] if self.reference else [])]
        text = table(rows)
        if any(layer.in_sample is not None for layer in self.layers):
            text += "\nin-sample accuracy (and on permuted labels): " + ", ".join(
                f"{layer.name} {layer.in_sample:.3f} ({layer.null:.3f})" for layer in self.layers
            )
        s = self.shadow
        return (
            f"{text}\nshadow: {s.models} model(s) on half of {s.examples} examples, train accuracy "
            f"{s.train_accuracy:.3f}, test accuracy {s.test_accuracy:.3f}; training {s.train_seconds:.0f} s, attacks "
            f"{s.attack_seconds:.0f} s"
        )


def _layer(reader: Fields) -> LayerRisk:
    return LayerRisk(
        name=reader.text("name"),
        error_rate=reader.share("error_rate"),
        error_rate_interval=reader.interval("error_rate_interval"),
        accuracy=reader.share("accuracy"),
        auc=reader.share("auc"),
        interval=reader.interval("interval"),
        tpr_at_1pct=reader.share("tpr_at_1pct"),
        tpr_at_01pct=reader.optional_share("tpr_at_01pct"),
        attack=reader.text("attack"),
        in_sample=reader.optional_share("in_sample"),
        null=reader.optional_share("null"),
    )
