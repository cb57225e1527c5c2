"""SPEC strings → datasets."""

from __future__ import annotations

from pathlib import Path

from lmdp.data.images import Images, Source
from lmdp.data.preprocess import fit
from lmdp.data.readers import READERS
from lmdp.data.request import Request, Say, parse
from lmdp.data.splits import split_per_class


def load(
    spec: str,
    *,
    size: int | None = None,
    channels: int | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> Source:
    """What `spec` names, as size×size images with `channels` channels where these are given.

    Official files are kept in `cache`, else in $LMDP_DATA, else in the user's cache folder. `say` is told of progress.
    Whatever is wrong with a SPEC or a file comes as ValueError or OSError, in one line that names it.
    """
    request = parse(spec, size=size, channels=channels, cache=cache, say=say)
    source = READERS[request.kind].read(request)
    train, test = source.train, source.test
    if request.half is not None:
        train, test = _half(train, request.half), None if test is None else _half(test, request.half)
    if request.limit is not None and request.limit < len(train):
        train = train.take_random(request.limit)
    return Source(spec, _fitted(train, request), None if test is None else _fitted(test, request), source.classes)


def _half(images: Images, number: int) -> Images:
    """One of two disjoint halves with the same mix of classes."""
    return images.take(split_per_class(images.labels.tolist(), 2)[number - 1])


def _fitted(images: Images, request: Request) -> Images:
    return fit(images, size=request.size, channels=request.channels)
