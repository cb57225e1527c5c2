"""The flow as code: public shadow data → risk profile → private training → model → audit → report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmdp.app import planning, training
from lmdp.app.account import begin, open_account, refuse_empty, sides
from lmdp.app.canaries import ordinary, plant, still_there
from lmdp.app.chosen import keep
from lmdp.app.config import SHADOW, Config
from lmdp.app.embedding import audit_embedded, is_of_a_run
from lmdp.app.network import Network, freeze, fresh_model, laid_out, pooling_of, public_texts, trainable
from lmdp.app.parts import said_of_parts
from lmdp.app.progress import Show
from lmdp.app.reports import short, story, tpr_limit, write_report
from lmdp.app.rules import TANGENT
from lmdp.app.runs import Card, RunFolder, digest, foreign, load_model, statement_of, write_json
from lmdp.app.serving import built, write_card
from lmdp.app.shares import handed_out
from lmdp.app.staged import computed, said_of_stage
from lmdp.audit import Reference
from lmdp.audit.model import audit as audit_model
from lmdp.audit.model import audit_embeddings
from lmdp.audit.results import AuditReport
from lmdp.data import Examples, Source, load
from lmdp.data.classes import counted
from lmdp.data.examples import units
from lmdp.data.splits import FEWEST_NON_MEMBERS
from lmdp.layers import LayerMap
from lmdp.lineage import dataset_digest, in_common, keep_dataset
from lmdp.membership.examples import refuse_overlap
from lmdp.membership.workers import Share
from lmdp.methods import METHODS, SOURCES
from lmdp.processes import Group
from lmdp.risk import RiskProfile, estimate_risk
from lmdp.risk.shadow import Schedule

AUDIT_LIMIT = 10_000
"""Members and non-members of an audit, at most: more take longer and hardly narrow the intervals."""


def private_data(config: Config, show: Show) -> Source:
    show.say(f"data: {config.data}")
    source = load(
        config.data,
        size=config.size,
        channels=config.channels,
        classes=config.declared_classes,
        splits=config.splits,
        say=show.say,
        user=config.user_column,
        **config.data_options,
    )
    if not source.classes:
        raise ValueError(f"data {config.data!r} has 0 classes; a model needs labelled examples")
    if len(source.classes) == 1:
        raise ValueError(
            f"data {config.data!r} has 1 class ({source.classes[0]!r}); there is nothing to learn. It needs at least "
            "2; if the class folders lie deeper, name the folder that holds them"
        )
    return source


def parted_data(config: Config, show: Show) -> Source:
    """The private data of a run, with a part kept out of training, for audits."""
    source = private_data(config, show).keeping_out(config.holdout)
    if source.held_out is not None:
        show.say(
            f"training examples: {len(source.train)}; {len(source.held_out)} more of the same data are kept out of "
            "training, as non-members for audits (holdout)"
        )
    elif config.holdout:
        least = math.ceil(100 * FEWEST_NON_MEMBERS / len(source.train)) / 100
        remedy = f"holdout = {least:g} or more keeps some out" if least <= 0.5 else "the data is too small for that"
        show.say(
            f"note: {config.holdout:g} of {len(source.train)} examples are too few non-members for an audit, so none "
            f"are kept out of training; {remedy}"
        )
    show.say(counted(source))
    return source


def estimate(config: Config, private: Source | None, show: Show, share: Share | None = None) -> RiskProfile:
    """Risk on the shadow data, brought to the private data's shape; refused where the two overlap."""
    shape = None if private is None else private.train.shape
    shadow = public_data(config.shadow or SHADOW, shape, config, show)
    every = shadow.train if shadow.test is None else shadow.train.joined(shadow.test)
    with show.bar("estimate risk", 1.0):
        profile = estimate_risk(
            Network.of(config, shadow).untrained,
            every.tensors(),
            models=config.shadow_models,
            protocol=config.protocol,
            private_dataset=None if private is None else private.pool.tensors(),
            schedule=Schedule(epochs=config.shadow_epochs, enough=config.shadow_enough),
            seed=config.seed or 0,
            layers=config.layers,
            pooling=pooling_of(every),
            progress=show.say,
            part=show.part,
            share=share,
        )
    of = f"{config.model} on {short(config.shadow or SHADOW)}"
    keep_dataset(digest := dataset_digest(every))
    return replace(profile, shadow=replace(profile.shadow, of=of, dataset=digest))


def _refuse_own_risk(risk: RiskProfile, source: Source) -> None:
    """Raise where risk was estimated on examples of the private data: layer weights would follow from them."""
    if risk.shadow.dataset and in_common(risk.shadow.dataset, dataset_digest(source.pool)):
        raise ValueError(
            f"risk was estimated ({risk.shadow.of}) on examples that are in the private data, {source.spec}: layer "
            "weights would follow from them without noise. Estimate it on public data (lmdp risk --data SPEC says "
            "whether they have anything in common)"
        )


def public_data(spec: str, shape: tuple[int, ...] | None, config: Config, show: Show) -> Source:
    show.say(f"public data: {spec}")
    size, channels = (config.size, config.channels) if shape is None else image_shape(shape)
    return load(spec, size=size, channels=channels, say=show.say, **config.data_options)


def train(
    config: Config,
    out: Path,
    show: Show,
    *,
    command: str,
    resume: bool = False,
    source: Source | None = None,
    risk: RiskProfile | None = None,
    beside: Sequence[Path] = (),
    group: Group | None = None,
) -> RunFolder:
    """One run folder with a trained model, its metrics, its privacy statement and a report.

    Canaries are in or out as in the runs `beside` it, so that these compare fairly. `group`: processes that train
    together, of which this is the first; the others follow (`together.follow`).
    """
    folder = RunFolder(out)
    with folder.claim():
        config = folder.resumed(config)
        folder.check(config, resume=resume)
        source = source or parted_data(config, show)
        if not folder.has_run:
            refuse_empty(source, config)
        if risk is None and config.risk is not None:  # a resumed run goes on with the profile it began with
            risk = RiskProfile.load(folder / "risk.json" if folder.has_run else config.risk)
        if risk is not None:
            _refuse_own_risk(risk, source)
        model = fresh_model(config, source, show.say)
        public = public_examples(config, source, show)
        planting = plant(config, source, [folder, *(RunFolder(path) for path in beside)], show.say)
        if planting is not None:
            source = planting.source
            show.say(planting.said)
        config = planning.suited(config, units(source.train), trainable(model))
        account, members = open_account(config, source, folder, model, planting)
        if members is not None and (changes := members.test_changes(source.test)):
            show.say(f"note: the test examples have changed: compared with those of the run so far, {changes}")
        if risk is not None and risk.note and training.weighs_by_risk(config):
            show.say(f"note: {risk.note}")
        if members is not None and (changes := members.held_out_changes(source.held_out)):
            show.say(f"note: the examples kept out of training have changed: compared with those so far, {changes}")
        if group is not None and METHODS[config.method].private:
            group.same(Beginning(config, risk, account.lineage.run, None if planting is None else planting.key))
        if METHODS[config.method].private and (parted := said_of_parts(config, model, source.train)):
            show.say(parted)
        if said := said_of_stage(config, model, source.train):
            show.say(said)
        job = training.prepare(config, model, source.train, risk=risk, public=public, account=account, group=group)
        begin(account, members, planting, folder)
        write_card(folder, job.config, source, model)
        if METHODS[config.method].private:
            show.say(planning.told(job.config, units(source.train), trainable(model)))
        folder.begin(job.config)
        if risk is not None:
            write_json(folder / "risk.json", risk.to_dict())
        test = None if source.test is None else computed(config, model, source.test, exactly=True).tensors()
        training.run(job, folder, test, show)
        labels = [] if source.test is None else source.test.labels.tolist()
        if note := planning.like_chance(folder.metrics()[-1], labels):
            show.say(note)
        write_report(folder, story([folder], command, risk, LayerMap.chosen(model, config.layers).names))
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
    changed_data: bool = False,
    references: int = 0,
    white_box: bool = False,
    group: Group | None = None,
) -> tuple[AuditReport, Path]:
    """Attack every layer of a finished run: its training examples against those it kept out, or else test examples.

    Returns the report, and its page. Of other examples (`members`, `nonmembers`: SPECs) an audit is kept beside the
    run's own, with what it used.

    Refused where these are no longer the examples of the training, unless `changed_data` asks for those that are left.
    With `epsilon_runs`, also bound the epsilon of its training from below. With `references`, train the run's
    configuration as often again, each time with half of the examples, and judge every example's scores by those.
    `group`: processes of which this is the first; they share attacks and references.
    """
    folder = RunFolder(out)
    if not folder.has_run:
        raise FileNotFoundError(f"{out} is not a run folder: it has no config.toml. Make one with lmdp train.")
    if not folder.finished:
        raise ValueError(f"{out} holds an unfinished run. Finish it with lmdp train --resume, then audit it.")
    with folder.claim():
        config = folder.config()
        source = source or parted_data(config, show)
        card = Card.read(folder.path)
        model = fresh_model(config, source) if card is None else built(card.at(folder.path))
        sha256, stranger = digest(folder / "model.safetensors"), foreign(folder)
        load_model(folder / "model.safetensors", model)
        if stranger:
            show.say(f"WARNING: {stranger}. The statement is not of these weights, and certifies nothing of them")
        if config.freeze is not None:
            freeze(model, config.freeze)
        model.to(config.device)
        planting = plant(config, source, [folder], show.say)
        source = source if planting is None else planting.source
        others = source.test if source.held_out is None else source.held_out
        options = {**config.data_options, "user": config.user_column}
        given = (
            _examples(members, source.train, source, show, options),
            _examples(nonmembers, others, source, show, options),
        )
        inside, outside, note = sides(
            folder,
            *given,
            chosen=members is not None,
            held_out=nonmembers is None and source.held_out is not None,
            changed_data=changed_data,
        )
        if note:
            show.say(note)
        if config.unit is not None:
            show.say("note: single rows are attacked; who has all rows of a user sees more than this audit shows")
        inside = ordinary(inside, folder)
        parts = [i.take_random(AUDIT_LIMIT) if len(i) > AUDIT_LIMIT else i for i in (inside, outside)]
        beside = _references(references, folder, source, parts, show, group) if references else []
        with show.bar(f"audit {config.method}", 1.0):
            both = [(laid_out(inputs, model), y) for inputs, y in (part.tensors() for part in parts)]
            report = audit_model(
                model,
                *both,
                layers=config.layers,
                pooling=pooling_of(inside),
                seed=config.seed or 0,
                references=beside,
                white_box=white_box,
                progress=show.say,
                part=show.part,
                share=handed_out(group),
                canaries=None if planting is None else still_there(planting, folder, changed_data=changed_data),
                statement=statement_of(folder),
            )
        report = replace(report, tpr_limit_at_1pct=tpr_limit(folder), sha256=sha256)
        if stranger:
            report = replace(report, warning=f"{stranger}; {report.warning}")
        if changed_data:
            report = replace(report, warning=f"{note}; {report.warning}")
        page, chosen = folder / "report.html", members is not None or nonmembers is not None
        if chosen:
            name = "test" if source.held_out is None else "holdout"
            report, page = keep(report, folder, source.spec, (members, nonmembers), parts, given, name)
        else:
            write_json(folder / "audit.json", report.to_dict())
        if epsilon_runs:
            from lmdp.app.bounds import bound_epsilon

            bound_epsilon(folder, source, show, runs=epsilon_runs)
        if epsilon_runs or not chosen:
            risk = RiskProfile.load(folder / "risk.json") if (folder / "risk.json").exists() else None
            write_report(folder, story([folder], command, risk))
    return report, page


def _references(
    number: int, folder: RunFolder, source: Source, audited: Sequence[Examples], show: Show, group: Group | None
) -> list[Reference]:
    from lmdp.app.references import train_references

    inside, outside = audited
    path, config = folder / "risk.json", folder.config()
    return train_references(
        number,
        folder,
        source.train,
        inside,
        outside,
        Network.of(config, source),
        show,
        risk=RiskProfile.load(path) if path.exists() else None,
        public=public_examples(config, source, show),
        share=handed_out(group) if group is not None and group.several else None,
    )


def audit_file(embeddings: Path, page: Path, run: Path | None = None) -> AuditReport:
    """Audit embeddings that some service returned, or `lmdp embed` wrote; writes a page and JSON beside the file."""
    of_run = run is not None or is_of_a_run(embeddings)
    report = audit_embedded(embeddings, run) if of_run else audit_embeddings(embeddings)
    write_json(page.with_suffix(".json"), report.to_dict())
    report.to_html(page)
    return report


@dataclass(frozen=True)
class Beginning:
    """What the other processes must know to train with the first: the name of the run, and the key of its canaries."""

    config: Config
    risk: RiskProfile | None
    run: str
    key: bytes | None


def public_examples(config: Config, source: Source, show: Show) -> Any:
    """Public examples for weights = public, of the private data's shape and classes: tensors, or a dataset of texts.

    Refused where private examples are among them, or among the texts that say where adapters write.
    """
    if config.tune == TANGENT:
        refuse_overlap(public_texts(config), source.pool.tensors()[0], kind="public")
    if not METHODS[config.method].reweighted or not SOURCES[config.weights].needs_public_data:
        return None
    examples = public_data(config.public or config.shadow or SHADOW, source.train.shape, config, show).train
    inputs, labels = examples.tensors()
    if int(labels.max()) >= len(source.classes):
        raise ValueError(
            f"public data {config.public or config.shadow!r} has labels up to {int(labels.max())}, but the model has "
            f"{len(source.classes)} classes. Choose public data with at most as many classes (public = SPEC)."
        )
    refuse_overlap(inputs, source.pool.tensors()[0], kind="public")
    return (inputs, labels) if isinstance(inputs, Tensor) else examples


def _examples(
    spec: str | None, default: Examples | None, source: Source, show: Show, options: Mapping[str, Any]
) -> Examples:
    if spec is not None:
        size, channels = image_shape(source.train.shape)
        return load(spec, size=size, channels=channels, say=show.say, **options).train
    if default is None:
        raise ValueError(f"data {source.spec!r} has no test part; name examples that were not trained on: --nonmembers")
    return default


def image_shape(shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    return (shape[-1], shape[0]) if len(shape) == 3 else (None, None)
