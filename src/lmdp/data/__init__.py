"""Data in: SPEC strings → examples in memory (`load`); JSON files → values.

readers      one record for each kind of data that a SPEC can name
request      a SPEC taken apart and checked, before any file is touched
loading      `load`: SPEC → source
examples     what every kind of data is once it is read: inputs and labels
texts        texts with their labels in memory, as numbers for words
tokens       texts → numbers for words
images       images with their labels in memory, and what a loaded source is
splits       splits in which each example's place follows from its own content
classes      which classes there are: declared, a public fact, or read off the labels
preprocess   images brought to another size or number of channels
augment      random views of images, each drawn for itself
decode       image files → bytes
faces        faces aligned by five landmarks
download     files from the network, resumed and verified
official     where the official files are, and what they must hash to
idx          mnist, fashion-mnist
cifar        cifar10, cifar100
svhn         svhn
celeba       celeba
bundled      digits, mnist-5k
npz          npz:PATH
folder       folder:PATH
tables       jsonl:PATH, csv:PATH
docstrings   scipy-docs, sklearn-docs
hub          hf:NAME
epochs       the order of ordinary epochs, for training without privacy
records      JSON → dataclasses and back, as their types say
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdp.data.epochs import EpochOrder
    from lmdp.data.examples import Examples
    from lmdp.data.images import Images, Source
    from lmdp.data.loading import load
    from lmdp.data.readers import READERS
    from lmdp.data.texts import Texts

__all__ = ["READERS", "EpochOrder", "Examples", "Images", "Source", "Texts", "load"]

_FILE_OF = {
    "READERS": "readers",
    "EpochOrder": "epochs",
    "Examples": "examples",
    "Images": "images",
    "Source": "images",
    "Texts": "texts",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    """Files are opened when they are first asked for: the table of readers can be read without torch."""
    if name in _FILE_OF:
        return getattr(importlib.import_module(f"lmdp.data.{_FILE_OF[name]}"), name)
    raise AttributeError(f"module 'lmdp.data' has no attribute {name!r}")
