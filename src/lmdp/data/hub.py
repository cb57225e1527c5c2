"""`hf:NAME`: a dataset of the Hugging Face hub, or of a local folder, by its `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmdp.data.classes import numbered, seen, seen_channels, seen_names
from lmdp.data.decode import Picture, decode
from lmdp.data.images import MAX_CLASSES, Images, Inferred, Source
from lmdp.data.request import Request
from lmdp.data.splits import at_most
from lmdp.data.tables import Row, checked, text_source

TRAIN, TEST = ("train",), ("test", "validation", "valid")
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)) | {"bool"}
STRINGS = ("string", "large_string")


def read_hub(request: Request) -> Source:
    splits = _load(request)
    train = next((splits[name] for name in TRAIN if name in splits), None)
    if train is None:
        raise ValueError(f"{request.spec} has no split named train; it has {', '.join(splits)}")
    text = _text_column(train.features, request)
    if text is not None:
        return _texts(splits, train, text, request)
    image, label = _columns(train.features, request)
    test = _held(splits, label, request)
    classes, inferred = _classes([part for part in (train, test) if part is not None], label, request)
    if request.limit is not None and request.limit < len(train):
        contents = (_content(file) for file in _files(train, image))
        train = train.select(at_most(request.limit, contents, len(train), request.splits))
    learnt = _images(train, image, label, request, request.channels)
    held = None if test is None else _images(test, image, label, request, request.channels or learnt.shape[0])
    if request.channels is None:
        inferred = (*inferred, seen_channels(learnt.shape[0]))
    return Source(request.spec, learnt, held, classes, inferred)


def _load(request: Request) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{request.spec} needs the package datasets, which is missing: pip install 'lmdp[hf]'"
        ) from error
    cache = (
        str(request.cache / "hf") if request.cache else None
    )  # None: the library's own cache, shared with other tools
    try:
        return datasets.load_dataset(request.path, request.options.get("config"), cache_dir=cache)
    except Exception as error:  # network, hub, parquet and image errors of several libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{request.spec} could not be loaded: {reason}") from error


def _held(splits: Any, label: str, request: Request) -> Any:
    """The first split to test on that has labels; None without one. Competitions publish others, with -1 for each."""
    for name in (name for name in TEST if name in splits):
        part = splits[name]
        if label in part.features and any(value not in (None, -1) for value in part[label]):
            return part
        request.say(f"note: split {name} of {request.spec} has no labels; it is left out")
    return None


def _text_column(features: Any, request: Request) -> str | None:
    """The column of texts that the option names, or the only one where there are no images."""
    import datasets

    texts = [name for name, kind in features.items() if getattr(kind, "dtype", None) in STRINGS]
    pictures = any(isinstance(kind, datasets.Image) for kind in features.values())
    if "text" in request.options or (texts and not pictures and "image" not in request.options):
        return _one("text", texts, features, request)
    return None


def _texts(splits: Any, train: Any, text: str, request: Request) -> Source:
    kinds = {name: kind for name, kind in train.features.items() if name != text}
    labels = [name for name, kind in kinds.items() if hasattr(kind, "names")]
    for types in (INTEGERS, STRINGS):
        labels = labels or [name for name, kind in kinds.items() if getattr(kind, "dtype", None) in types]
    label = _one("label", labels, kinds, request)
    test = _held(splits, label, request)
    names = getattr(kinds[label], "names", None)
    rows = [_rows(part, text, label, names, request) for part in (train, test) if part]
    local = Path(request.path).expanduser().exists() and request.classes is None
    asked = request if names is None else replace(request, classes=request.classes or tuple(names))
    source = text_source(asked, rows[0], rows[1] if len(rows) > 1 else None)
    return replace(source, inferred=(seen_names(tuple(names)),)) if names is not None and local else source


def _rows(part: Any, text: str, label: str, names: list[str] | None, request: Request) -> list[Row]:
    read = []
    for number, (words, value) in enumerate(zip(part[text], part[label])):
        where = f"{request.spec} {part.split} row {number}"
        if names is not None and (value is None or not 0 <= value < len(names)):
            raise ValueError(
                f"{where}: the label is {value}; it must be 0 to {len(names) - 1}. Label or remove the row"
            )
        read.append(checked(words, value if names is None else names[value], where))
    return read


def _columns(features: Any, request: Request) -> tuple[str, str]:
    """The image column and the label column, by their types, or as the options name them."""
    import datasets

    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [name for name, kind in features.items() if getattr(kind, "dtype", None) in INTEGERS]
    return _one("image", images, features, request), _one("label", labels, features, request)


def _one(what: str, candidates: list[str], features: Any, request: Request) -> str:
    chosen = request.options.get(what)
    if chosen is not None and chosen not in candidates and (what in ("image", "text") or chosen not in features):
        raise ValueError(f"{request.spec} has no {what} column {chosen!r}; it has {', '.join(candidates) or 'none'}")
    if chosen is None and what in candidates:
        return what
    if chosen is None and len(candidates) != 1:
        raise ValueError(
            f"{request.spec} has {len(candidates)} columns that could be the {what} (of {', '.join(features)}); "
            f"name one with ?{what}=COLUMN"
        )
    return chosen or candidates[0]


def _images(rows: Any, image: str, label: str, request: Request, channels: int | None) -> Images:
    pictures = [Picture(f"{request.spec} image {i}", file) for i, file in enumerate(_files(rows, image))]
    crop = request.number("crop", 1) is not None
    pixels = decode(pictures, size=request.size, channels=channels, crop=crop, say=request.say)
    return Images(pixels, torch.tensor(_labels(rows, label, request), dtype=torch.int64))


def _files(rows: Any, image: str) -> Iterator[Path | bytes]:
    import datasets

    return (_bytes(file) for file in rows.cast_column(image, datasets.Image(decode=False))[image])


def _content(file: Path | bytes) -> bytes:
    return file.read_bytes() if isinstance(file, Path) else file


def _labels(rows: Any, label: str, request: Request) -> list[int]:
    try:
        return [int(value) for value in rows[label]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{request.spec}: column {label!r} holds no whole numbers ({error}); name another") from error


def _classes(parts: list[Any], label: str, request: Request) -> tuple[tuple[str, ...], tuple[Inferred, ...]]:
    """As the hub's description of the set or the request says; else as the labels or local folders show."""
    names = getattr(parts[0].features[label], "names", None)
    if names is not None:
        local = Path(request.path).expanduser().exists() and request.classes is None
        return tuple(names), (seen_names(tuple(names)),) if local else ()
    if request.classes is not None:
        return numbered(request.classes) if isinstance(request.classes, int) else request.classes, ()
    highest = max((number for part in parts for number in _labels(part, label, request)), default=0)
    if highest >= MAX_CLASSES:
        raise ValueError(f"{request.spec}: label {highest}; labels must be 0 to {MAX_CLASSES - 1}")
    return numbered(highest + 1), (seen(highest + 1),)


def _bytes(file: Any) -> Path | bytes:
    if isinstance(file, dict) and isinstance(file.get("bytes"), bytes):
        return bytes(file["bytes"])
    return Path(str(file.get("path") if isinstance(file, dict) else file))
