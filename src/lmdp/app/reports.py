"""Run folders read back: the numbers of a run that one compares, and the story that a report tells."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from lmdp.app.config import Config
from lmdp.app.runs import RunFolder, write
from lmdp.audit.results import AuditReport
from lmdp.data.records import read_object
from lmdp.methods import METHODS
from lmdp.report import Story, Trained, figures, render
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

    config = Config.load(folders[0] / "config.toml")
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
    )


def write_report(folder: RunFolder, told: Story) -> None:
    write(folder / "report.html", render(told))
    (folder / "figures").mkdir(exist_ok=True)
    for name, drawing in figures(told).items():
        write(folder / "figures" / name, drawing)


def _trained(folder: RunFolder) -> Trained:
    method = METHODS[Config.load(folder / "config.toml").method]
    privacy = read_object(folder / "privacy.json", "a file of a run")
    path, metrics = folder / "audit.json", folder.metrics()
    examples = metrics[-1].get("test_examples") if metrics else None
    return Trained(
        name=method.label,
        method=method.name,
        metrics=tuple(metrics),
        privacy=privacy if method.private else None,
        audit=AuditReport.load(path) if path.exists() else None,
        test_examples=examples if isinstance(examples, int) and 0 < examples < 1e15 else None,
    )
