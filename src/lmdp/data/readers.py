"""One table of data readers: everything that is said of a kind of data stands in its record.

Parser, loader, command line, docs and tests read these records. Torch is not imported here, so that help is quick: a
reader's file is opened when it is first asked to read. To add a reader, add a record.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdp.data.images import Source
    from lmdp.data.request import Request

    Read = Callable[[Request], Source]

GENERAL = ("half", "limit", "size", "channels")
"""Options that every reader takes."""


@dataclass(frozen=True)
class Reader:
    """One kind of data.

    name     how a SPEC begins
    help     what it is, and where it comes from
    read     request → source
    path     what stands after a colon, as users know it; "" if nothing does
    options  beyond the general ones
    users    whether a column may name the person of every row
    """

    name: str
    help: str
    read: Read
    path: str = ""
    options: tuple[str, ...] = ()
    users: bool = False

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.path}" if self.path else self.name


def _by(file: str, function: str) -> Read:
    """A function of a file of this room."""

    def read(request: Request) -> Source:
        source: Source = getattr(importlib.import_module(f"lmdp.data.{file}"), function)(request)
        return source

    return read


READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("mnist", "handwritten digits, 28x28 grey; downloaded", _by("idx", "read_idx_set")),
        Reader("fashion-mnist", "garments, 28x28 grey; downloaded", _by("idx", "read_idx_set")),
        Reader("cifar10", "ten kinds of things, 32x32 colour; downloaded", _by("cifar", "read_cifar")),
        Reader("cifar100", "a hundred kinds of things, 32x32 colour; downloaded", _by("cifar", "read_cifar")),
        Reader("svhn", "house numbers, 32x32 colour; downloaded", _by("svhn", "read_svhn")),
        Reader(
            "celeba",
            "faces with 40 attributes; from files you put into the cache folder",
            _by("celeba", "read_celeba"),
            options=("attribute", "landmarks"),
        ),
        Reader("digits", "1,797 digits, 8x8 grey; installs with scikit-learn", _by("bundled", "read_digits")),
        Reader("mnist-5k", "5,000 of the MNIST digits; installs with lmdp[demo]", _by("bundled", "read_mnist_5k")),
        Reader(
            "npz",
            "arrays x_train, y_train and, if there, x_test, y_test, classes, num_classes",
            _by("npz", "read_npz"),
            path="PATH",
        ),
        Reader(
            "folder",
            "one folder of images for each class",
            _by("folder", "read_folder"),
            path="PATH",
            options=("landmarks", "classes", "crop"),
        ),
        Reader(
            "jsonl",
            "texts: an object with a text and a label in every line; .gz too",
            _by("tables", "read_jsonl"),
            path="PATH",
            options=("text", "label", "test"),
            users=True,
        ),
        Reader(
            "csv",
            "texts: a table with a line of column names; .gz too",
            _by("tables", "read_csv"),
            path="PATH",
            options=("text", "label", "test"),
            users=True,
        ),
        Reader("scipy-docs", "texts: documentation that installs with scipy", _by("docstrings", "read_docs")),
        Reader("sklearn-docs", "texts: documentation that installs with scikit-learn", _by("docstrings", "read_docs")),
        Reader(
            "hf",
            "a Hugging Face dataset, by name or local path; needs lmdp[hf]",
            _by("hub", "read_hub"),
            path="NAME",
            options=("config", "image", "text", "label", "crop"),
        ),
    )
}
