"""The flow as code: public shadow data → risk profile → private training → model → audit → report."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmdp.app import training
from lmdp.app.config import Config
from lmdp.app.progress import Show
from lmdp.app.runs import RunFolder, load_model, write, write_json
from lmdp.audit.model import audit as audit_model
from lmdp.audit.model import audit_embeddings
from lmdp.audit.results import AuditReport
from lmdp.data import Images, Source, load
from lmdp.data.records import read_object
from lmdp.layers import LayerMap
from lmdp.membership.examples import refuse_overlap
from lmdp.models import build, evaluation
from lmdp.report import Story, Trained, figures, render
from lmdp.risk import RiskProfile, estimate_risk
from lmdp.risk.shadow import Schedule

NAMES = {
    "sgd": "SGD (not private)",
    "dpsgd": "DP-SGD",
    "autos": "Auto-S",
    "psac": "DP-PSAC",
    "perlayer": "Per-layer clipping",
    "naive-perlayer": "Naive per-layer clipping",
    "lm": "LM-DP-SGD",
    "lm-optimal": "LM-DP-SGD, bias-optimal",
}
AUDIT_LIMIT = 10_000
"""Members and non-members of an audit, at most: more take longer and hardly narrow the intervals."""


def private_data(config: Config, show: Show) -> Source:
    show.say(f"data: {config.data}")
    source = load(config.data, size=config.size, channels=config.channels, say=show.say)
    if not source.classes:
        raise ValueError(f"data {config.data!r} has 0 classes; a model needs labelled examples")
    return source


def estimate(config: Config, private: Source | None, show: Show) -> RiskProfile:
    """Risk on the shadow data, brought to the private data's shape; refused where the two overlap."""
    shape = None if private is None else private.train.shape
    shadow = public_data(config.shadow, shape, config, show)
    images = shadow.train if shadow.test is None else shadow.train.joined(shadow.test)

    def factory() -> nn.Module:
        return build(config.model, images.shape, len(shadow.classes))

    with show.bar("estimate risk", 1.0):
        return estimate_risk(
            factory,
            images.tensors(),
            models=config.shadow_models,
            protocol=config.protocol,
            private_dataset=None if private is None else private.train.tensors(),
            schedule=Schedule(epochs=config.shadow_epochs),
            seed=config.seed or 0,
            progress=show.say,
            part=show.part,
        )


def public_data(spec: str, shape: tuple[int, ...] | None, config: Config, show: Show) -> Source:
    show.say(f"public data: {spec}")
    size, channels = (config.size, config.channels) if shape is None else _image_shape(shape)
    return load(spec, size=size, channels=channels, say=show.say)


def train(
    config: Config,
    out: Path,
    show: Show,
    *,
    command: str,
    resume: bool = False,
    source: Source | None = None,
    risk: RiskProfile | None = None,
) -> RunFolder:
    """One run folder with a trained model, its metrics, its privacy statement and a report."""
    folder = RunFolder(out)
    with folder.claim():
        folder.check(config, resume=resume)
        source = source or private_data(config, show)
        if risk is None and config.risk is not None:  # a resumed run goes on with the profile it began with
            risk = RiskProfile.load(folder / "risk.json" if folder.has_run else config.risk)
        model = fresh_model(config, source)
        job = training.prepare(config, model, source.train, risk=risk, public=public_examples(config, source, show))
        if config.method != "sgd" and config.delta * len(source.train) >= 1:
            show.say(
                f"note: delta {config.delta:g} is not below 1 / {len(source.train)} examples: such a promise allows to "
                "publish somebody's data whole. Choose a smaller delta."
            )
        folder.begin(config)
        if risk is not None:
            write_json(folder / "risk.json", risk.to_dict())
        statement = training.run(job, folder, None if source.test is None else source.test.tensors(), show)
        write_json(folder / "privacy.json", statement.to_dict())
        write_report(folder, story([folder], command, risk))
    return folder


def audit(
    out: Path,
    show: Show,
    *,
    command: str,
    members: str | None = None,
    nonmembers: str | None = None,
    source: Source | None = None,
    epsilon_runs: int = 0,
) -> AuditReport:
    """Attack every layer of a finished run: its training examples against held-out ones.

    With `epsilon_runs`, also bound the epsilon of its training from below.
    """
    folder = RunFolder(out)
    if not folder.has_run:
        raise FileNotFoundError(f"{out} is not a run folder: it has no config.toml. Make one with lmdp train.")
    if not folder.finished:
        raise ValueError(f"{out} holds an unfinished run. Finish it with lmdp train --resume, then audit it.")
    with folder.claim():
        config = Config.load(folder / "config.toml")
        source = source or private_data(config, show)
        model = fresh_model(config, source)
        load_model(folder / "model.safetensors", model)
        inside = _examples(members, source.train, source, show)
        outside = _examples(nonmembers, source.test, source, show)
        with show.bar(f"audit {config.method}", 1.0):
            both = [(training.laid_out(inputs, model), y) for inputs, y in (inside.tensors(), outside.tensors())]
            report = audit_model(model, *both, seed=config.seed or 0, progress=show.say, part=show.part)
        write_json(folder / "audit.json", report.to_dict())
        if epsilon_runs:
            from lmdp.app.bounds import bound_epsilon

            bound_epsilon(folder, source, show, runs=epsilon_runs)
        risk = RiskProfile.load(folder / "risk.json") if (folder / "risk.json").exists() else None
        write_report(folder, story([folder], command, risk))
    return report


def audit_file(embeddings: Path, page: Path) -> AuditReport:
    """Audit embeddings that some service returned, from an .npz file; writes a page and JSON beside it."""
    report = audit_embeddings(embeddings)
    write_json(page.with_suffix(".json"), report.to_dict())
    report.to_html(page)
    return report


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same data, at the same epsilon."""

    out: Path
    runs: tuple[RunFolder, ...]
    story: Story


def compare(
    config: Config, methods: Sequence[str], out: Path, show: Show, *, command: str, resume: bool = False
) -> Comparison:
    """Estimate risk once, train and audit each method, and report them side by side."""
    whole = RunFolder(out)
    with whole.claim():
        whole.check(config, resume=resume)
        source = private_data(config, show)
        fresh_model(config, source)
        whole.begin(config)
        risk = _risk_of(config, whole, source, show)
        folders = []
        for method in methods:
            folder = RunFolder(out / method)
            if not folder.finished:
                own = config.changed(method=method, weights=_weights_for(method, config))
                train(own, folder.path, show, command=command, resume=resume, source=source, risk=risk)
            if not (folder / "audit.json").exists():
                audit(folder.path, show, command=command, source=source)
            folders.append(folder)
        told = story(folders, command, risk)
        write_report(whole, told)
        write_json(whole / "results.json", {folder.path.name: summary(folder) for folder in folders})
    return Comparison(out, tuple(folders), told)


def summary(folder: RunFolder) -> dict[str, Any]:
    """The numbers of a run that one compares."""
    privacy = _json(folder / "privacy.json")
    last = (folder.metrics() or [{}])[-1]
    found: dict[str, Any] = {
        "method": privacy.get("method"),
        "epsilon": privacy.get("epsilon"),
        "delta": privacy.get("delta"),
        "certified": privacy.get("certified"),
        "steps": privacy.get("steps"),
        "test_accuracy": last.get("test_accuracy"),
    }
    if (folder / "audit.json").exists():
        report = AuditReport.load(folder / "audit.json")
        found |= {
            "peak_layer": report.peak.name,
            "peak_auc": report.peak.auc,
            "peak_auc_interval": list(report.peak.interval),
            "auc": {leak.name: leak.auc for leak in report.layers},
            "auc_interval": {leak.name: list(leak.interval) for leak in report.layers},
        }
    return found


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
        made=datetime.date.today().isoformat(),
        version=__version__,
    )


def write_report(folder: RunFolder, told: Story) -> None:
    write(folder / "report.html", render(told))
    (folder / "figures").mkdir(exist_ok=True)
    for name, drawing in figures(told).items():
        write(folder / "figures" / name, drawing)


def fresh_model(config: Config, source: Source) -> nn.Module:
    """Untrained; the same parameters for the same seed, whatever the method, so that methods compare fairly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed or 0)
        model = build(config.model, source.train.shape, len(source.classes))
    LayerMap.of(model)  # refuses a model without trainable layers before anything long begins
    _try_out(model, config.model, source)
    return model


def _try_out(model: nn.Module, name: str, source: Source) -> None:
    """One made-up example, before anything is written: the model must give one score per class."""
    shape = source.train.shape
    try:
        with evaluation(model), torch.no_grad():
            output = model(training.laid_out(torch.zeros(1, *shape), model))
    except Exception as error:
        raise ValueError(f"model {name!r} does not take examples of shape {shape}: {error}") from error
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < len(source.classes):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"model {name!r} gives {found} for 1 example; it must give (1, {len(source.classes)}) scores")


def _trained(folder: RunFolder) -> Trained:
    config = Config.load(folder / "config.toml")
    privacy = _json(folder / "privacy.json")
    path, metrics = folder / "audit.json", folder.metrics()
    return Trained(
        name=NAMES[config.method],
        method=config.method,
        metrics=tuple(metrics),
        privacy=None if config.method == "sgd" else privacy,
        audit=AuditReport.load(path) if path.exists() else None,
        test_examples=_count(metrics[-1].get("test_examples")) if metrics else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 1e15 else None


def _risk_of(config: Config, whole: RunFolder, source: Source, show: Show) -> RiskProfile:
    if config.risk is not None:
        return RiskProfile.load(config.risk)
    path = whole / "risk.json"
    if path.exists():
        return RiskProfile.load(path)
    profile = estimate(config, source, show)
    write_json(path, profile.to_dict())
    return profile


def _weights_for(method: str, config: Config) -> str:
    """`lm-optimal` has no weights of sources private and fixed: it takes the certified one."""
    return "public" if method == "lm-optimal" and config.weights in ("private", "fixed") else config.weights


def public_examples(config: Config, source: Source, show: Show) -> tuple[Tensor, Tensor] | None:
    """Public examples for weights = public, of the private data's shape and within its classes."""
    if config.method not in ("lm", "lm-optimal") or config.weights != "public":
        return None
    images = public_data(config.public or config.shadow, source.train.shape, config, show).train
    inputs, labels = images.tensors()
    if int(labels.max()) >= len(source.classes):
        raise ValueError(
            f"public data {config.public or config.shadow!r} has labels up to {int(labels.max())}, but the model has "
            f"{len(source.classes)} classes. Choose public data with at most as many classes (public = SPEC)."
        )
    refuse_overlap(inputs, source.train.tensors()[0])
    return inputs, labels


def _examples(spec: str | None, default: Images | None, source: Source, show: Show) -> Images:
    if spec is None and default is None:
        raise ValueError(f"data {source.spec!r} has no test part; name examples that were not trained on: --nonmembers")
    if spec is None:
        assert default is not None
        images = default
    else:
        size, channels = _image_shape(source.train.shape)
        images = load(spec, size=size, channels=channels, say=show.say).train
    return images.take_random(AUDIT_LIMIT, 0) if len(images) > AUDIT_LIMIT else images


def _image_shape(shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    return (shape[-1], shape[0]) if len(shape) == 3 else (None, None)


def _json(path: Path) -> Mapping[str, Any]:
    return read_object(path, "a file of a run")
