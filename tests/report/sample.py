"""A realistic story: SGD, DP-SGD and LM-DP-SGD on a small CNN of four layers, and variations of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmdp.audit.epsilon import EpsilonBound
from lmdp.audit.results import AuditReport, CanaryLeaks, Peak
from lmdp.guards.verdicts import ASSUMPTIONS, HOLDS, NOT_ESTABLISHED, VIOLATED, Verdict
from lmdp.membership.leak import Leak
from lmdp.private import PrivacyStatement
from lmdp.report import Story, Trained
from lmdp.risk.profile import LayerRisk, RiskProfile, ShadowSummary

LAYERS = ("conv1", "conv2", "fc1", "fc2")
ERROR = 0.0066


def curve(auc: float, points: int = 120) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """TPR = FPR^a, whose area is 1 / (1 + a)."""
    power = 1 / max(auc, 0.01) - 1
    fpr = tuple(1750 ** (i / points - 1) for i in range(points + 1))
    return (0.0, *fpr), (0.0, *(f**power for f in fpr))


def leak(name: str, auc: float, error: float = ERROR, attack: str = "mlp probe") -> Leak:
    accuracy, tpr = 0.5 + 0.7 * (auc - 0.5), 0.01 ** (1 / max(auc, 0.01) - 1)
    return Leak(
        name=name,
        accuracy=accuracy,
        accuracy_interval=(accuracy - 0.016, accuracy + 0.016),
        error_rate=1 - accuracy,
        error_rate_interval=(1 - accuracy - 0.016, 1 - accuracy + 0.016),
        auc=auc,
        interval=(auc - 1.96 * error, auc + 1.96 * error),
        auc_error=error,
        tpr_at_1pct=tpr,
        tpr_at_1pct_interval=(max(0.0, tpr - 0.005), tpr + 0.006),
        tpr_at_01pct=None,
        attack=attack,
        roc=curve(auc),
    )


def bound(claimed: float = 8.0, lower: float = 0.7) -> EpsilonBound:
    return EpsilonBound(
        claimed, lower, 1e-5, 0.95, "one-run", "mislabelled, in this run", 503, 1, "dpsgd", "rdp", {"guesses": 124}
    )


def with_canaries(
    report: AuditReport, auc: float, error: float = 0.02, shown: EpsilonBound | None = None
) -> AuditReport:
    """The same audit of a run in which 503 canaries were planted, the last layer of which gives them away so."""
    *_, last = [layer.name for layer in report.layers]
    layers = tuple(leak(layer.name, auc if layer.name == last else 0.503, error) for layer in report.layers)
    top = max(layers, key=lambda layer: layer.auc)
    peak = Peak(top.name, top.auc, (top.auc - 2.5 * error, top.auc + 2.5 * error), len(layers))
    planted = CanaryLeaks("mislabelled", layers, peak, leak("(output)", 0.61, error, "loss"), 260, 243, shown)
    return replace(report, canaries=planted)


def audit(aucs: Mapping[str, float], output: float = 0.5, control: float = 0.502, error: float = ERROR) -> AuditReport:
    layers = tuple(leak(name, auc, error) for name, auc in aucs.items())
    top = max(layers, key=lambda layer: layer.auc)
    return AuditReport(
        layers=layers,
        peak=Peak(top.name, top.auc, (top.auc - 2.5 * error, top.auc + 2.5 * error), len(layers)),
        reference=leak("(output)", output, error, "loss"),
        controls=(leak("(input)", control, error), leak("(untrained)", 0.497, error, "norm")),
        members=1750,
        nonmembers=1750,
        left_out=0,
        seed=0,
        seconds=12.0,
    )


HOW = {
    "model": "made-up examples were varied one at a time, in training and evaluation mode",
    "loss": "rows of 12 batches were seen in two companies, and did not change",
    "sampling": "every batch of 600 was stepped as drawn",
}


def statement(epsilon: float, method: str, reasons: Sequence[str] = (), steps: int = 600) -> dict[str, Any]:
    """A privacy statement as the report gets it. A reason is what is known against an assumption, from the first on."""
    judged = dict.fromkeys(ASSUMPTIONS, Verdict(HOLDS, "watched in every step"))
    judged |= {key: Verdict(HOLDS, how) for key, how in HOW.items()}
    judged |= {
        key: Verdict((VIOLATED, NOT_ESTABLISHED)[i % 2], why) for i, (key, why) in enumerate(zip(judged, reasons))
    }
    privacy = PrivacyStatement(
        epsilon=epsilon,
        delta=1e-5,
        accountant="pld",
        sampling="Poisson",
        noise_multiplier=1.1034,
        sample_rate=0.073,
        expected_batch_size=256,
        steps=steps,
        clip_norm=1.0,
        sensitivity=1.0,
        method=method,
        weight_source="private" if method.startswith("lm") else "none",
        verdicts=judged,
    )
    return {**privacy.to_dict(), "table": privacy.table()}


def metrics(final: float, epsilon: float | None, weights: Sequence[float] | None = None) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "step": 50 * i,
            "epoch": 50 * i / 13.7,
            "epsilon": None if epsilon is None else epsilon * math.sqrt(i / 12),
            "test_accuracy": final - (final - 0.1) * math.exp(-0.55 * i) + 0.004 * math.sin(3 * i),
            "layer_weights": [w + (1 - w) * math.exp(-0.4 * i) for w in weights] if weights else None,
            "seconds": 1.3 * i,
        }
        for i in range(13)
    )


def risk(protocol: str = "heldout") -> RiskProfile:
    def layer(name: str, auc: float, inside: float | None = None, null: float | None = None) -> LayerRisk:
        return LayerRisk.of(leak(name, auc), inside, null)

    paper = protocol == "paper"
    values = {"conv1": (0.508, 0.71, 0.70), "conv2": (0.521, 0.83, 0.82), "fc1": (0.585, 0.94, 0.91)}
    values["fc2"] = (0.631, 0.79, 0.66)
    return RiskProfile(
        layers=tuple(layer(n, a, i if paper else None, z if paper else None) for n, (a, i, z) in values.items()),
        protocol=protocol,
        controls=(layer("(input)", 0.499), layer("(untrained)", 0.503)),
        reference=layer("(output)", 0.643),
        shadow=ShadowSummary(1, 3500, 1.0, 0.962, 30, 41.0, 63.0),
        seed=0,
    )


def sgd() -> Trained:
    aucs = dict(zip(LAYERS, (0.512, 0.538, 0.601, 0.637)))
    return Trained("SGD", "sgd", metrics(0.985, None), None, audit(aucs, output=0.652), 1000)


def dpsgd(epsilon: float = 8.0, peak: float = 0.507, final: float = 0.944) -> Trained:
    aucs = dict(zip(LAYERS, (0.499, 0.503, 0.501, peak)))
    return Trained("DP-SGD", "dpsgd", metrics(final, epsilon), statement(epsilon, "dpsgd"), audit(aucs), 1000)


def lm(
    epsilon: float = 8.0,
    peak: float = 0.505,
    final: float = 0.951,
    reasons: Sequence[str] = (),
    name: str = "LM-DP-SGD",
) -> Trained:
    aucs = dict(zip(LAYERS, (0.501, 0.497, 0.502, peak)))
    rows = metrics(final, epsilon, weights=(0.97, 0.86, 0.55, 0.38))
    return Trained(name, "lm", rows, statement(epsilon, "lm", reasons), audit(aucs), 1000)


def story(**changes: Any) -> Story:
    fields: dict[str, Any] = {
        "title": "Small CNN on MNIST-5k",
        "command": "lmdp compare --recipe mnist-scnn --methods sgd,dpsgd,lm --epsilon 8 --delta 1e-5",
        "layers": LAYERS,
        "trained": (sgd(), dpsgd(), lm()),
        "risk": risk("paper"),
        "config": {"model": "scnn", "data": {"name": "mnist-5k", "split": [0.7, 0.3]}, "epochs": 44, "seed": 0},
        "date": "2025-01-31",
        "version": "0.1.0",
    }
    return Story(**{**fields, **changes})


def planted_story(**aucs: float) -> Story:
    """The same with canaries: how well each model's last layer gives them away."""
    levels = {"sgd": 0.97, "dpsgd": 0.68, "lm": 0.66} | aucs
    models = (sgd(), dpsgd(), lm())
    return story(
        trained=tuple(
            replace(m, audit=with_canaries(m.audit, levels[m.method], shown=bound() if m.privacy else None))  # type: ignore[arg-type]
            for m in models
        )
    )


def crowd(layers: int = 60, models: int = 6) -> Story:
    """Many layers with long names, many models."""
    names = tuple(f"encoder.layers.{i}.self_attention.output_projection.dense" for i in range(layers))
    trained = []
    for k in range(models):
        aucs = {name: 0.5 + 0.002 * k + 0.1 * (k == 0) * i / layers for i, name in enumerate(names)}
        rows = metrics(0.95 - 0.02 * k, 4.0, [1 - 0.9 * i / layers for i in range(layers)] if k == 5 else None)
        privacy = statement(4.0, "lm" if k == 5 else "dpsgd") if k else None
        trained.append(
            Trained(
                f"Method number {k + 1}",
                ("sgd", "dpsgd", "autos", "psac", "perlayer", "lm")[k % 6],
                rows,
                privacy,
                audit(aucs),
                1000,
            )
        )
    return story(title="Sixty layers, six methods", layers=names, trained=tuple(trained), risk=None)
