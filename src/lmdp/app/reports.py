"""Run folders read back: the numbers of a run that one compares, and the story that a report tells."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from lmdp.app.runs import RunFolder, spent_for, write
from lmdp.audit.results import AuditReport
from lmdp.data.records import read_object
from lmdp.lineage import Spending, epsilon_of, spendings
from lmdp.methods import METHODS
from lmdp.private import PrivacyStatement
from lmdp.report import Story, Together, Trained, figures, render
from lmdp.risk import RiskProfile


def summary(folder: RunFolder) -> dict[str, Any]:
    """The numbers of a run that one compares."""
    privacy = read_object(folder / "privacy.json", "a file of a run")
    last = (folder.metrics() or [{}])[-1]
    numbers: dict[str, Any] = {
        "method": privacy.get("method"),
        "epsilon": privacy.get("epsilon"),
        "delta": privacy.get("delta"),
        "certified": privacy.get("certified"),
        "steps": privacy.get("steps"),
        "test_accuracy": last.get("test_accuracy"),
    }
    if (folder / "audit.json").exists():
        report = AuditReport.load(folder / "audit.json")
        numbers |= {
            "peak_layer": report.peak.name,
            "peak_auc": report.peak.auc,
            "peak_auc_interval": list(report.peak.interval),
            "auc": {leak.name: leak.auc for leak in report.layers},
            "auc_interval": {leak.name: list(leak.interval) for leak in report.layers},
        }
    return numbers


def story(folders: Sequence[RunFolder], command: str, risk: RiskProfile | None) -> Story:
    """What a report tells, read back from the folders."""
    from lmdp import __version__
    from lmdp.app.bounds import load_bounds

    config = folders[0].config()
    trained = tuple(_trained(folder) for folder in folders)
    audited = [t.audit for t in trained if t.audit is not None]
    layers = tuple(leak.name for leak in audited[0].layers) if audited else ()
    if not layers and risk is not None:
        layers = tuple(layer.name for layer in risk.layers)
    return Story(
        title=f"{config.model} on {config.data}",
        command=command,
        layers=layers,
        trained=trained,
        risk=risk,
        bounds=tuple(bound for folder in folders for bound in load_bounds(folder / "epsilon.json")),
        config=config.to_dict(),
        date=datetime.date.today().isoformat(),
        version=__version__,
        together=all_together(folders),
    )


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
        certified=all(read_object(folder / "privacy.json", "a file of a run").get("certified") for folder in private),
    )


def _stated(folder: RunFolder) -> tuple[Spending, ...]:
    """Of a model that does not say itself what was spent for it."""
    path = folder / "privacy.json"
    content = {**read_object(path, "a privacy statement"), "run": str(folder.path), "dataset": ""}
    return spendings([content], str(path))


def write_report(folder: RunFolder, told: Story) -> None:
    write(folder / "report.html", render(told))
    (folder / "figures").mkdir(exist_ok=True)
    for name, drawing in figures(told).items():
        write(folder / "figures" / name, drawing)


def _trained(folder: RunFolder) -> Trained:
    method = METHODS[folder.config().method]
    privacy = read_object(folder / "privacy.json", "a file of a run")
    path, metrics = folder / "audit.json", folder.metrics()
    examples = metrics[-1].get("test_examples") if metrics else None
    return Trained(
        name=method.label,
        method=method.name,
        metrics=tuple(metrics),
        privacy=_with_table(privacy) if method.private else None,
        audit=AuditReport.load(path) if path.exists() else None,
        test_examples=examples if isinstance(examples, int) and 0 < examples < 1e15 else None,
    )


def _with_table(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A statement with the sentences of its assumptions; one without verdicts as it is."""
    return {**privacy, "table": PrivacyStatement.from_dict(privacy).table()} if "verdicts" in privacy else {**privacy}
