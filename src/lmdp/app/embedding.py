"""`lmdp embed`: what a layer of a run makes of data, in a file; and such a file audited.

    embeddings [N, d]   labels [N]   classes [C] (which the labels number)   part [N] (train or test, of the SPEC)
    layer   pooling   run   digests [N]   names [N] (with `--names`)   inputs [N, …] (with `--inputs`)

Of data without labels there are no labels, classes and digests.

The file is as private as the data. Of a run's own data `part` is membership where nobody was kept out, and nearly so
otherwise: who was kept out is told by digests, which are keyed, and the key is in the run folder's private part. An
audit of the file looks there. The inputs make a control for that audit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmdp.app.network import laid_out
from lmdp.app.runs import IMAGES, TEXTS, Members, RunFolder
from lmdp.app.serving import load as load_run
from lmdp.audit import AuditReport
from lmdp.audit.model import audit
from lmdp.data import load
from lmdp.data.classes import UNLABELLED
from lmdp.data.examples import names_of
from lmdp.data.npz import read_arrays
from lmdp.data.readers import READERS
from lmdp.data.request import Say, anchored, parse
from lmdp.data.texts import IDS
from lmdp.membership.served import embed

ARRAYS = ("embeddings", "labels", "digests", "run", "inputs")
AS_PRIVATE = "is as private as the data: of a run's own data its array `part` can tell who was trained on"
"""Said of every such file."""


@dataclass(frozen=True)
class Embedded:
    """What was written."""

    layer: str
    rows: int
    width: int


def embed_data(
    run: Path,
    spec: str | None,
    out: Path,
    say: Say,
    *,
    layer: str | None,
    pooling: str,
    inputs: bool,
    names: bool,
    average: bool = False,
) -> Embedded:
    """The representations that a layer of a run has of the examples of a SPEC (its own data unless given)."""
    if out.suffix != ".npz":
        raise ValueError(f"--out is {out}; it must end in .npz")
    if out.exists():
        raise ValueError(f"{out} exists; remove it, or name another file")
    loaded = load_run(run, average=average)
    card, config = loaded.preprocess.card, RunFolder(run).config() if RunFolder(run).has_run else None
    spec = spec or (None if config is None else config.data)
    if spec is None:
        raise ValueError(f"{run} does not say which data it was trained on; name some: --data SPEC")
    size, channels = (card.shape[-1], card.shape[0]) if card.kind == IMAGES else (None, None)
    length = card.shape[0] if card.kind == TEXTS else None
    classes = card.classes if config is None or config.classes is None else config.declared_classes
    source = load(
        _cropped(spec, card.crop),
        size=size,
        channels=channels,
        classes=_declared(spec, config, classes),
        tokenizer=card.tokenizer,
        length=length,
        say=say,
        labelled=False,
    )
    if source.train.shape != card.shape:
        raise ValueError(f"examples of {spec} have shape {source.train.shape}; the model of {run} takes {card.shape}")
    every = source.train if source.test is None else source.train.joined(source.test)
    if names and not names_of(every):
        raise ValueError(
            f"{spec} names none of its examples; leave --names out, or keep them as folder:, csv: or jsonl:"
        )
    given, labels = every.tensors()
    chosen = loaded.layer(layer)
    rows = embed(loaded.model, laid_out(given, loaded.model), chosen, pooling=pooling)
    members = Members.read(RunFolder(run))
    arrays: dict[str, Any] = {
        "embeddings": rows,
        "layer": np.array(chosen),
        "pooling": np.array(pooling),
        "run": np.array(str(Path(run).absolute())),
    }
    if _is_own(spec, config):
        arrays["part"] = np.array(["train"] * len(source.train) + ["test"] * (len(every) - len(source.train)))
    labelled = source.classes != UNLABELLED
    if labelled:
        arrays |= {"labels": labels.numpy(), "classes": np.array(source.classes)}
    if members is not None and labelled:  # digests are of examples with their labels
        arrays["digests"] = np.array(every.digests(members.key))
    if names:
        arrays["names"] = np.array(names_of(every))
    if inputs:
        arrays["inputs"] = (given if not isinstance(given, dict) else given[IDS]).numpy()  # type: ignore[union-attr]
    with out.open("xb") as file:
        np.savez(file, **arrays)
    return Embedded(chosen, len(rows), rows.shape[1])


def _declared(spec: str, config: Any, classes: Any) -> Any:
    """The classes of the run are those of its own data; other data says itself which it has."""
    return classes if _is_own(spec, config) else None


def _is_own(spec: str, config: Any) -> bool:
    """Whether these are the data that the run was trained on."""
    return config is not None and anchored(spec) == config.data


def _cropped(spec: str, crop: bool) -> str:
    """The same, cut to its central square where the model was trained on such squares."""
    asked = parse(spec)
    if not crop or "crop" in asked.options or "crop" not in READERS[asked.kind].options:
        return spec
    return f"{spec}{'&' if '?' in spec else '?'}crop=1"


def is_of_a_run(path: Path) -> bool:
    """Whether a file was written by `lmdp embed`."""
    return {"embeddings", "run"} <= set(read_arrays(path, ("embeddings", "run")))


def audit_embedded(path: Path, run: Path | None = None) -> AuditReport:
    """Those that the run was trained on against the others, by the run's own digests."""
    arrays = {name: array.copy() for name, array in read_arrays(path, ARRAYS).items()}
    folder = RunFolder(run or str(arrays["run"]))
    members = Members.read(folder) if folder.has_run else None
    if members is None or "digests" not in arrays:
        raise ValueError(
            f"{path} holds embeddings by the run {folder.path}, which is not there or kept no digests of its examples, "
            "or are of data without labels: nobody knows who was trained on. Name the folder with --run DIR, or write "
            "arrays member and nonmember."
        )
    if folder.config().canaries and folder.config().canary_kind == "mislabelled":
        raise ValueError(
            f"{folder.path} was trained with mislabelled canaries, which these embeddings cannot tell from others; "
            f"audit the run itself: lmdp audit {folder.path}"
        )
    trained, labels = set(members.train), arrays["labels"]
    inside = np.array([str(digest) in trained for digest in arrays["digests"].reshape(-1)])
    both = [(arrays["embeddings"][side], labels[side]) for side in (inside, ~inside)]
    inputs = [arrays["inputs"][side] for side in (inside, ~inside)] if "inputs" in arrays else None
    return audit(None, *both, inputs=inputs)
