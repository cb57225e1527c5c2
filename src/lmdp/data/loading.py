"""SPEC strings → datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmdp.data.classes import agreed
from lmdp.data.examples import Examples, owners
from lmdp.data.images import Images, Source
from lmdp.data.preprocess import fit
from lmdp.data.readers import READERS
from lmdp.data.request import Request, Say, parse
from lmdp.data.splits import at_most, halves


def load(
    spec: str,
    *,
    size: int | None = None,
    channels: int | None = None,
    classes: int | Sequence[str] | None = None,
    splits: str = "content",
    cache: Path | None = None,
    say: Say | None = None,
    tokenizer: str | None = None,
    length: int | None = None,
    user: str | None = None,
    labelled: bool = True,
) -> Source:
    """What `spec` names, as size×size images with `channels` channels where these are given.

    Texts become `length` numbers each, by `tokenizer`: words, bytes, or the folder of one of transformers. `user` is
    the column of a table that says whose each row is: rows of a user are then in one part of the data, all of them.

    `classes` declares how many classes there are, or their names; what is not declared and no public fact is read off
    the examples, and the source says so (`inferred`). `splits="position"` chooses parts as earlier versions did.
    `labelled=False` also takes tables without a column of labels, and a folder of photos without class folders: its
    one class is then called "". Official files are kept in `cache`, else in $LMDP_DATA, else in the user's cache
    folder. `say` is told of progress.
    Whatever is wrong with a SPEC or a file comes as ValueError or OSError, in one line that names it.
    """
    request = parse(
        spec,
        size=size,
        channels=channels,
        classes=classes,
        splits=splits,
        cache=cache,
        say=say,
        tokenizer=tokenizer,
        length=length,
        user=user,
        labelled=labelled,
    )
    source = READERS[request.kind].read(request)
    train, test = source.train, source.test
    chosen = source.by_position
    if request.half is not None:
        chosen = True
        train, test = _half(train, request), None if test is None else _half(test, request)
    if request.limit is not None and request.limit < len(train):
        chosen = True
        train = train.take(at_most(request.limit, train.contents(), len(train), request.splits))
    return replace(
        source,
        train=_fitted(train, request),
        test=None if test is None else _fitted(test, request),
        classes=agreed(source.classes, request),
        by_position=chosen and request.splits == "position",
    )


def _half(examples: Examples, request: Request) -> Examples:
    """One of two disjoint halves."""
    both = halves(owners(examples), examples.labels.tolist(), request.splits)
    return examples.take(both[(request.half or 1) - 1])


def _fitted(examples: Examples, request: Request) -> Examples:
    return fit(examples, size=request.size, channels=request.channels) if isinstance(examples, Images) else examples
