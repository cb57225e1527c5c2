"""SPEC strings → datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lmdp.data.bundled import read_digits, read_mnist_5k
from lmdp.data.celeba import read_celeba
from lmdp.data.cifar import read_cifar
from lmdp.data.folder import read_folder
from lmdp.data.hub import read_hub
from lmdp.data.idx import read_idx_set
from lmdp.data.images import Images, Source
from lmdp.data.npz import read_npz
from lmdp.data.preprocess import fit
from lmdp.data.request import Request, Say, parse
from lmdp.data.splits import split_per_class
from lmdp.data.svhn import read_svhn

READERS: Mapping[str, Callable[[Request], Source]] = {
    "mnist": read_idx_set,
    "fashion-mnist": read_idx_set,
    "cifar10": read_cifar,
    "cifar100": read_cifar,
    "svhn": read_svhn,
    "celeba": read_celeba,
    "digits": read_digits,
    "mnist-5k": read_mnist_5k,
    "npz": read_npz,
    "folder": read_folder,
    "hf": read_hub,
}


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
    source = READERS[request.kind](request)
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
