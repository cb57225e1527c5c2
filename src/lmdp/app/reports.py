"""Run folders read back: the numbers of a run that one compares, and the story that a report tells."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmdp.app.beforehand import explosion
from lmdp.app.runs import RunFolder, digest, foreign, privacy_of, spent_for, statement_of, versions, write
from lmdp.audit.curves import GaussianSteps
from lmdp.audit.epsilon import EpsilonBound
from lmdp.audit.results import AuditReport, CanaryLeaks
from lmdp.data.records import encoded, read_object
from lmdp.lineage import Spending, epsilon_of, spendings
from lmdp.methods import METHODS, Method
from lmdp.private import PrivacyStatement
from lmdp.report import Story, Together, Trained, card, figures, render
from lmdp.report.release import SEVERAL
from lmdp.report.roc import Limit, of_several
from lmdp.risk import RiskProfile

LIMITS_LITTLE = 50.0
"""An epsilon at which nearly all members may be recognised: not worth the seconds that its curve takes."""


def summary(folder: RunFolder) -> dict[str, Any]:
    """The numbers of a run that one compares."""
    privacy = privacy_of(folder)
    last = (folder.metrics() or [{}])[-1]
    numbers: dict[str, Any] = {
        "method": privacy.get("method"),
        "epsilon": privacy.get("epsilon"),
        "delta": privacy.get("delta"),
        "certified": privacy.get("certified"),
        "steps": privacy.get("steps"),
        "test_accuracy": last.get("test_accuracy"),
    }
    if "average_test_accuracy" in last:
        numbers["average_test_accuracy"] = last["average_test_accuracy"]
    if (report := _audit(folder)) is not None:
        numbers |= {
            "peak_layer": report.peak.name,
            "peak_auc": report.peak.auc,
            "peak_auc_interval": list(report.peak.interval),
            "peak_tpr_at_1pct": next(leak.tpr_at_1pct for leak in report.layers if leak.name == report.peak.name),
            "tpr_limit_at_1pct": report.tpr_limit_at_1pct,
            "auc": {leak.name: leak.auc for leak in report.layers},
            "auc_interval": {leak.name: list(leak.interval) for leak in report.layers},
        }
        numbers |= {"canaries": _canaries(report.canaries)} if report.canaries is not None else {}
    return numbers


def tpr_limit(folder: RunFolder, examples: int = 1) -> float | None:
    """What no attack exceeds at a false positive rate of 1 %, if the run's epsilon holds; None where it claims none.

    Of so many examples at once, which one person may have. From the whole privacy curve of the training. Where more was
    spent on the model, or epsilon is so large that hardly anything is limited, from epsilon and delta alone.
    """
    if not METHODS[folder.config().method].private:
        return None
    stated = statement_of(folder)
    if math.isinf(stated.epsilon):
        return None
    alone = Limit(stated.epsilon, stated.delta)
    if stated.steps == 0 or stated.epsilon > LIMITS_LITTLE or len(spent_for(folder / "model.safetensors")) > 1:
        return of_several(alone.tpr, examples)
    curve = GaussianSteps(stated.noise_multiplier, stated.sample_rate, stated.steps).curve()
    return of_several(lambda fpr: min(alone.tpr(fpr), curve.most(fpr)), examples)


def _canaries(told: CanaryLeaks) -> dict[str, Any]:
    """The same numbers of the most vulnerable examples, and the epsilon that they show."""
    top = next((leak for leak in told.layers if leak.name == told.peak.name), told.layers[0])
    return {
        "kind": told.kind,
        "peak_layer": told.peak.name,
        "peak_auc": told.peak.auc,
        "peak_auc_interval": list(told.peak.interval),
        "peak_tpr_at_1pct": top.tpr_at_1pct,
        "peak_tpr_at_1pct_interval": list(top.tpr_at_1pct_interval),
        "auc": {leak.name: leak.auc for leak in told.layers},
        "auc_interval": {leak.name: list(leak.interval) for leak in told.layers},
        "tpr_at_1pct": {leak.name: leak.tpr_at_1pct for leak in told.layers},
        "epsilon_at_least": None if told.bound is None else encoded(told.bound.lower),
    }


def story(folders: Sequence[RunFolder], command: str, risk: RiskProfile | None, layers: Sequence[str] = ()) -> Story:
    """What a report tells, read back from the folders. `layers`: their names, where neither audit nor risk has them."""
    from lmdp import __version__
    from lmdp.app.bounds import load_bounds

    config = folders[0].config()
    trained = tuple(_trained(folder) for folder in folders)
    audited = [audit for folder in folders if (audit := _audit(folder)) is not None]
    layers = tuple(leak.name for leak in audited[0].layers) if audited else tuple(layers)
    if not layers and risk is not None:
        layers = tuple(layer.name for layer in risk.layers)
    return Story(
        title=f"{config.model} on {short(config.data)}",
        command=command,
        layers=layers,
        trained=trained,
        risk=risk,
        bounds=(*_in_the_runs(audited), *(b for folder in folders for b in load_bounds(folder / "epsilon.json"))),
        config=config.to_dict(),
        date=datetime.date.today().isoformat(),
        version=__version__,
        together=all_together(folders),
        versions=versions(),
        files=_files(folders),
    )


def _files(folders: Sequence[RunFolder]) -> tuple[str, ...]:
    """What is in the folders now; of several, with what a comparison adds."""
    there = {entry.name + "/" * entry.is_dir() for folder in folders for entry in folder.path.iterdir()}
    return tuple(sorted(there | ({"results.json"} if len(folders) > 1 else set())))


def short(spec: str) -> str:
    """A SPEC without the folders that lead to it, which are nobody's business."""
    name, question, options = spec.partition("?")
    kind, colon, path = name.partition(":")
    return f"{kind}{colon}{Path(path).name if colon else ''}{question}{options}"


def _in_the_runs(audited: Sequence[AuditReport]) -> list[EpsilonBound]:
    """What canaries in the runs show of epsilons that were claimed; a method without a claim has none to compare."""
    bounds = (report.canaries.bound for report in audited if report.canaries is not None)
    return [bound for bound in bounds if bound is not None and math.isfinite(bound.claimed)]


def all_together(folders: Sequence[RunFolder]) -> Together | None:
    """What releasing the private models of these runs costs in all; None where there is only one, or none.

    The runs are taken to be on the same data, as those of a comparison are.
    """
    private = [folder for folder in folders if METHODS[folder.config().method].private and folder.finished]
    if len(private) < 2:
        return None
    config = private[0].config()
    spent = [one for folder in private for one in spent_for(folder / "model.safetensors") or _stated(folder)]
    return Together(
        models=tuple(METHODS[folder.config().method].label for folder in private),
        epsilon=epsilon_of(spent, delta=config.delta, accountant=config.accountant),
        delta=config.delta,
        certified=all(privacy_of(folder).get("certified") for folder in private),
    )


def _stated(folder: RunFolder) -> tuple[Spending, ...]:
    """Of a model that does not say itself what was spent for it."""
    path = folder / "privacy.json"
    content = {**read_object(path, "a privacy statement"), "run": str(folder.path), "dataset": ""}
    return spendings([content], str(path))


def write_report(folder: RunFolder, told: Story) -> None:
    write(folder / "report.html", render(told))
    write(folder / "privacy-card.md", card(told))
    (folder / "figures").mkdir(exist_ok=True)
    for name, drawing in figures(told).items():
        write(folder / "figures" / name, drawing)


def _trained(folder: RunFolder) -> Trained:
    method = METHODS[folder.config().method]
    privacy = privacy_of(folder)
    metrics = folder.metrics()
    examples = metrics[-1].get("test_examples") if metrics else None
    return Trained(
        name=method.label,
        method=method.name,
        metrics=tuple(metrics),
        privacy=_with_table(privacy) if method.private else None,
        audit=_audit(folder),
        test_examples=examples if isinstance(examples, int) and 0 < examples < 1e15 else None,
        sha256=digest(folder / "model.safetensors"),
        limit=tpr_limit(folder) if folder.finished else None,
        several=_several(folder) if folder.finished else {},
        provenance={key: str(privacy[key]) for key in ("trained", "versions") if key in privacy},
        remark=_remark(folder, method) if folder.finished else "",
    )


def _several(folder: RunFolder) -> dict[int, float]:
    """The limit for people with so many examples."""
    return {k: limit for k in SEVERAL if (limit := tpr_limit(folder, k)) is not None}


def _remark(folder: RunFolder, method: Method) -> str:
    """What must be said of the weights, beside what stands in their statement."""
    said = [foreign(folder)] if not method.private else []  # of private ones it is why they are not certified
    if (folder / "audit.json").exists() and _audit(folder) is None:
        said.append("audit.json is of another model.safetensors, and not shown: lmdp audit attacks this one")
    return ". ".join(filter(None, [*said, explosion(folder / "model.safetensors", private=method.private)]))


def _audit(folder: RunFolder) -> AuditReport | None:
    """The audit of these weights; None where there is none, or only one of others."""
    path = folder / "audit.json"
    report = AuditReport.load(path) if path.exists() else None
    of_others = report is not None and report.sha256 not in ("", digest(folder / "model.safetensors"))
    return None if of_others else report


def _with_table(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A statement with the sentences of its assumptions; one without verdicts as it is."""
    return {**privacy, "table": PrivacyStatement.from_dict(privacy).table()} if "verdicts" in privacy else {**privacy}
