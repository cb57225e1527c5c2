"""What a run's account rests on beside its steps: what was spent before, and whether what is published is public."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmdp.accounting import check_delta
from lmdp.app.canaries import Planting
from lmdp.app.config import Config
from lmdp.app.network import begun_with, weights_file, weights_named
from lmdp.app.runs import Changes, Members, RunFolder, read_weights, spent_for, write_json
from lmdp.data import Examples, Source
from lmdp.data.examples import units, users_of
from lmdp.data.folder import class_folders
from lmdp.data.records import encoded, read_object
from lmdp.data.request import parse
from lmdp.guards import NOT_ESTABLISHED, VIOLATED, Verdict, fingerprints
from lmdp.guards.words import LOOK_AGAIN, MORE_STEPS
from lmdp.lineage import Lineage, Spending, dataset_digest, earlier, spendings
from lmdp.methods import METHODS

if TYPE_CHECKING:
    from torch import nn

    from lmdp.private import PrivacyStatement

EARLIER = "private/earlier.json"
SIZE_IS_PUBLIC = (
    "the number of training examples counts as public: it can be read off the sample rate and the expected batch size"
)
SIZE_IS_NOT = (
    "the number of training examples is not public (public_size = false), but it can be read off the sample rate and "
    "the expected batch size"
)


@dataclass(frozen=True)
class Account:
    """Beside the steps of a training: `doubts` are why it is not certified, `said` is what a reader must know.

    `examples` tells how many are in each part of the data, where a part is kept out of training.
    """

    lineage: Lineage
    doubts: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    examples: Mapping[str, int] = field(default_factory=dict)

    def stated(self, statement: PrivacyStatement) -> PrivacyStatement:
        """The statement of an engine that was given this lineage, with what it cannot know."""
        doubts = list(self.doubts)
        if (asked := self.lineage.unit.partition(":")[0]) != statement.unit:
            doubts.append(
                f"the privacy of one {asked} was asked for (unit), and epsilon is that of one {statement.unit}: the "
                "examples do not say whose they are"
            )
        how = {key: Verdict(v.state, v.how.replace(LOOK_AGAIN, MORE_STEPS)) for key, v in statement.verdicts.items()}
        statement = replace(statement, verdicts=how)
        if not doubts:
            return statement
        before = statement.verdicts["account"]
        reasons = dict.fromkeys([*([] if before.holds else [before.how]), *doubts])
        account = Verdict(VIOLATED if before == VIOLATED else NOT_ESTABLISHED, "; ".join(reasons))
        return replace(statement, verdicts={**statement.verdicts, "account": account})


def open_account(
    config: Config, source: Source, folder: RunFolder, model: nn.Module, planting: Planting | None = None
) -> tuple[Account, Members | None]:
    """The account of a run that begins or goes on, before its first step; and who is in it.

    Refused: data that is not that of the run so far, and what would publish a private fact.
    """
    private = METHODS[config.method].private
    digest = dataset_digest(source.train)
    if folder.has_run:
        members = Members.read(folder)
        _refuse_changes(folder, members, source)
    else:
        members = Members.of(source, _run_name(config, digest, model))
    if private and not folder.has_run:
        refuse_inferred(source, config)
    large = check_delta(config.delta, units(source.train), allowed=config.allow_large_delta) if private else ""
    lineage = Lineage(
        dict([*model.named_parameters(), *model.named_buffers()]),
        run="" if members is None else members.run,
        dataset=digest,
        inherited=_inherited(folder, config),
        unit=config.unit or "example",
    )
    doubts = {
        f"the shape of the model was read off the private examples: {'; '.join(map(str, source.inferred))}": bool(
            source.inferred
        ),
        f"{source.spec} is split by position (splits = position): one example moves others in and out of the training "
        "data": source.by_position,
        "this run began without digests of its examples: they may have been others when it was resumed": members
        is None,
        SIZE_IS_NOT: not config.public_size,
        large: bool(large),
        **dict.fromkeys([*_untold(config), *lineage.doubts], True),
    }
    planted = "" if planting is None else planting.said
    size = SIZE_IS_PUBLIC if config.public_size else ""
    size = size if config.unit is None else size.replace("examples", "users")
    said = (size, limited(source), kept_out(source), planted, *begun_with(config), *lineage.said)
    account = Account(
        lineage,
        tuple(d for d, holds in doubts.items() if holds),
        tuple(filter(None, said)),
        _examples(source, planting),
    )
    return account, members


def limited(source: Source) -> str:
    """What `limit=` does to the relation: the statement speaks of the examples that were taken."""
    if "limit=" not in source.spec.partition("?")[2]:
        return ""
    return (
        f"neighbours differ in one of the examples that {source.spec} takes. An example that is taken out of the whole "
        "data lets another one in (limit), which is two such changes and is not covered by epsilon"
    )


def kept_out(source: Source) -> str:
    """Who is in no model of this run, and why nobody's part tells of anybody else; nothing where all are trained on."""
    if source.held_out is None:
        return ""
    of_what = "the name of its user" if users_of(source.train) else "its own content"
    return (
        f"{len(source.held_out)} private examples were kept out of training (holdout), as non-members for "
        f"audits: each by a public hash of {of_what}, so that nobody's part depends on anybody else. Epsilon, "
        "sample rate and steps are those of the examples that were trained on"
    )


def _examples(source: Source, planting: Planting | None) -> dict[str, int]:
    """How many are in each part; canaries that are in are trained on too."""
    held_out = {} if source.held_out is None else {"held_out": len(source.held_out)}
    planted = {} if planting is None else {"canaries": len(planting.images)}
    return {"trained_on": len(source.train), **held_out, **planted} if held_out or planted else {}


def begin(account: Account, members: Members | None, planting: Planting | None, folder: RunFolder) -> None:
    """Write down who is in a new run, which canaries are, and what was spent before it."""
    if folder.has_run:
        return
    folder.path.mkdir(exist_ok=True)
    if members is not None:
        members.save(folder)
    if planting is not None:
        planting.coins.save(folder)
    if account.lineage.earlier:
        write_json(folder / EARLIER, {"spent": encoded(account.lineage.earlier)})


def refuse_inferred(source: Source, config: Config) -> None:
    """Refuse a shape that follows from private examples: one of them could change what is published.

    Runs of old, which are split by position, go on as they began, and are not certified.
    """
    if source.inferred and config.splits != "position":
        raise ValueError(
            f"{source.spec}: the model would show in its shape what was read off the private examples; "
            f"{'; '.join(map(str, source.inferred))}"
        )


def refuse_empty(source: Source, config: Config) -> None:
    """Refuse declared classes of which there is no example: a name is misspelt, or the number is wrong."""
    where = parse(config.data)
    if config.classes is None and where.kind != "folder":
        return  # an official set says which there are, and a part of it may lack some
    labels = {label for part in (source.pool, source.test) if part is not None for label in part.labels.tolist()}
    empty = [name for label, name in enumerate(source.classes) if label not in labels]
    if empty:
        there = ", ".join(name for label, name in enumerate(source.classes) if label in labels)
        folders = f"; its folders are {', '.join(class_folders(where.path)[:20])}" if where.kind == "folder" else ""
        raise ValueError(
            f"{source.spec} has no example of class {empty[0]!r}, which is declared; there are examples of "
            f"{there}{folders}. Correct the name or the number of classes, or leave it out."
        )


def sides(
    folder: RunFolder, inside: Examples, outside: Examples, *, chosen: bool, held_out: bool, changed_data: bool
) -> tuple[Examples, Examples, str]:
    """Those who were trained on and those who were not, by the run's own digests, and what is to be said of them.

    Refused where one side holds examples of the other, or where a run's own examples are no longer all there; with
    `changed_data`, those that are left are taken. Copies of training examples among the run's own test examples are
    left out. `chosen` says that the members were named, and may be fewer; `held_out` that the non-members are those
    whom the run kept out.
    """
    members = Members.read(folder)
    if members is None:
        return (
            inside,
            outside,
            "note: this run kept no digests of its examples: whether these are its members is unknown",
        )
    changes = members.train_changes(inside)
    lost = 0 if chosen else len(changes.gone)
    strangers = [i for i, trained in enumerate(members.trained_on(inside)) if not trained]
    trained_on = [i for i, trained in enumerate(members.trained_on(outside)) if trained]
    others = members.held_out_changes(outside) if held_out else Changes()
    if not (lost or strangers or trained_on or others):
        return inside, outside, ""
    own_test = not held_out and sorted(members.test) == sorted(outside.digests(members.key))
    if own_test and not (lost or strangers) and len(trained_on) < len(outside):
        note = f"{len(trained_on)} of {len(outside)} test examples are copies of training examples; these were left out"
        return inside, outside.take(sorted(set(range(len(outside))) - set(trained_on))), note
    told = (
        f"the data has changed since {folder.path} was trained: compared with its training examples, {changes}; "
        f"{len(trained_on)} of the non-members were trained on"
    )
    if held_out:
        told += f"; compared with those kept out, {others}"
        trained_on = [i for i, kept in enumerate(members.kept_out(outside)) if not kept]
    if not changed_data:
        raise ValueError(
            f"{told}. An audit would be about other examples. Restore them, or audit those that are left with "
            "--changed-data."
        )
    kept = sorted(set(range(len(inside))) - set(strangers)), sorted(set(range(len(outside))) - set(trained_on))
    if not all(kept):
        raise ValueError(f"{told}. Nobody is left to compare.")
    return inside.take(kept[0]), outside.take(kept[1]), f"{told}; these were left out"


def _refuse_changes(folder: RunFolder, members: Members | None, source: Source) -> None:
    if members is not None and (changes := members.train_changes(source.train)):
        raise ValueError(
            f"{folder.path} was begun with other training examples: compared with them, {changes}. Restore them, or "
            "start a new run in another folder."
        )


def _run_name(config: Config, digest: str, model: nn.Module) -> str:
    """Of a new run. One with a seed is the same training whenever it begins with the same weights on the same data."""
    if config.seed is None:
        return secrets.token_hex(16)
    training = [config.to_dict(), digest, fingerprints(model.named_parameters())]
    return hashlib.blake2b(json.dumps(training).encode(), digest_size=16).hexdigest()


def _inherited(folder: RunFolder, config: Config) -> tuple[Spending, ...]:
    """What the run knew of when it began, whatever has become of the index since; of a new one, what a file of weights
    that it begins with says itself."""
    path = folder / EARLIER
    if folder.has_run:
        listed = read_object(path, "a list of earlier trainings").get("spent") if path.exists() else []
        return spendings(listed, str(path))
    return tuple(one for name in weights_named(config) for one in _told_by(weights_file(name)))


def _told_by(file: Path) -> tuple[Spending, ...]:
    """What a file of weights says that it cost."""
    return spent_for(file) if file.suffix == ".safetensors" else ()


def _untold(config: Config) -> list[str]:
    """Of weights that a privacy statement lies beside, while neither they nor this machine tell what they cost."""
    files = [file for file in map(weights_file, weights_named(config)) if (file.parent / "privacy.json").exists()]
    return [
        f"a privacy statement lies beside {file}, but what was spent for these weights is neither in their header nor "
        "known here, and not in this epsilon: begin with the run itself, or with what lmdp export makes of it"
        for file in files
        if not (_told_by(file) or earlier(read_weights(file)))
    ]
