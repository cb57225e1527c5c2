"""What a finished training leaves, bound together: weights, and a statement that names them by SHA-256.

It is no signature: who can write the folder can write both. It tells a model that was put in another's place, changed,
or copied beside the wrong statement.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lmdp.app.runs.checkpoint import packed, spent_for
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.folder import AVERAGE, MODEL, RunFolder
from lmdp.averages import WeightAverage
from lmdp.data.records import read_object
from lmdp.guards import VIOLATED, Verdict
from lmdp.lineage import Spending
from lmdp.private import PrivacyStatement

STATEMENT = "privacy.json"
SHA = "sha256"
"""In privacy.json: file → SHA-256 of the weights that it speaks of. In audit.json: of the model that was attacked."""


def versions() -> str:
    """Of what the numbers come from."""
    names = ("lmdp", "torch", "dp-accounting")
    told = (f"{name} {importlib.metadata.version(name)}" for name in names)
    return ", ".join([*told, f"Python {platform.python_version()}"])


def leave(
    folder: RunFolder,
    privacy: Mapping[str, Any],
    model: nn.Module,
    average: WeightAverage | None,
    spent: Sequence[Spending],
) -> None:
    """The statement first, then what it speaks of; the model last, with which a run is finished."""
    files = {}
    if average is not None:
        with average.applied():
            files[AVERAGE] = packed(model, spent)
    files[MODEL] = packed(model, spent)
    when = {"versions": versions(), "trained": datetime.date.today().isoformat()}
    write_json(
        folder / STATEMENT, {**privacy, **when, SHA: {n: hashlib.sha256(raw).hexdigest() for n, raw in files.items()}}
    )
    for name, raw in files.items():
        write(folder / name, raw)


def digest(path: Path) -> str:
    """SHA-256 of a file; "" of none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def foreign(folder: RunFolder) -> str:
    """Why the weights in a folder are not those that its statement speaks of; "" where they are.

    A statement of the middle of a training names none yet. Of a run of an earlier version, which recorded nothing, it
    is told by what the header of the weights says was spent for them.
    """
    content = read_object(folder / STATEMENT, "a privacy statement")
    recorded = content.get(SHA)
    if recorded is None:
        return _foreign_of_old(folder, content)
    if not isinstance(recorded, Mapping):
        return f"{STATEMENT} is damaged: {SHA} is a {type(recorded).__name__}, and must name files with their SHA-256"
    for name in (MODEL, AVERAGE):
        if (now := digest(folder / name)) and now != recorded.get(name):
            then = recorded.get(name)
            return (
                f"{name} is not the file that was trained: its SHA-256 is {now[:16]}…, and {STATEMENT} "
                f"{f'speaks of {str(then)[:16]}…' if then else 'names none'}. Put back the file that belongs to it"
            )
    return ""


def _foreign_of_old(folder: RunFolder, content: Mapping[str, Any]) -> str:
    if {"versions", "trained"} & content.keys():
        return f"{STATEMENT} is damaged: it names no weights, and once did. Put back the file that belongs to them"
    spent = spent_for(folder / MODEL) if folder.finished else ()
    told = tuple(content.get(name) for name in ("steps", "noise_multiplier", "sample_rate"))
    if not spent or any(told == (one.steps, one.noise_multiplier, one.sample_rate) for one in spent):
        return ""
    return (
        f"{STATEMENT} speaks of {told[0]} steps, and the header of {MODEL} of {spent[-1].steps}. Put back the "
        "statement that belongs to it"
    )


def unfinished(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A statement of the middle of a training, which speaks of no weights that may be given out."""
    return {**privacy, SHA: {}}


def privacy_of(folder: RunFolder) -> dict[str, Any]:
    """The content of privacy.json; beside weights of which it does not speak it is not certified."""
    content, why = read_object(folder / STATEMENT, "a privacy statement"), foreign(folder)
    return {**content, **statement_of(folder, why).to_dict()} if why else dict(content)


def statement_of(folder: RunFolder, why: str | None = None) -> PrivacyStatement:
    """The statement of a run; of weights of which it does not speak it promises nothing that is certified.

    `why`: what `foreign` says, where it was asked already; it reads all weights.
    """
    statement = PrivacyStatement.from_dict(read_object(folder / STATEMENT, "a privacy statement"))
    if why := foreign(folder) if why is None else why:
        return replace(statement, verdicts={**statement.verdicts, "content": Verdict(VIOLATED, why)})
    return statement
