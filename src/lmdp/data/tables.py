"""`jsonl:PATH` and `csv:PATH`: a text and a label in every line. Files that end in .gz are read as they are.

A file named by `test=` is the test part; without one, about one text in five is, by its own content. Which classes
there are is declared (`classes`): labels are then numbers below their count, or their names.
"""

from __future__ import annotations

import csv
import gzip
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from lmdp.data.classes import UNLABELLED, numbered, seen, seen_names
from lmdp.data.images import MAX_CLASSES, Inferred, Source
from lmdp.data.request import Request
from lmdp.data.splits import hold_out
from lmdp.data.texts import Texts
from lmdp.data.tokens import check_length, tokenizer_for


class Row(NamedTuple):
    """A text, its label, where a column says so whose it is, and in which line of which file it stands."""

    text: str
    label: int | str
    user: str = ""
    name: str = ""


LONGEST_FIELD = 2**24
"""Characters of a field of a CSV file; the standard library stops at 131,072 otherwise."""


def read_jsonl(request: Request) -> Source:
    return _read(request, _json_rows)


def read_csv(request: Request) -> Source:
    return _read(request, _csv_rows)


def text_source(request: Request, train: Sequence[tuple[Any, ...]], test: Sequence[tuple[Any, ...]] | None) -> Source:
    """Rows of text and label as numbers for words and classes; `test` None: a part of the others is, all rows of a user
    or none."""
    if request.size is not None or request.channels is not None:
        raise ValueError(f"{request.spec} holds texts; size and channels are for images, leave them out")
    if request.tokenizer is None:
        raise ValueError(
            f"{request.spec} holds texts, and no tokenizer is given; add --tokenizer FOLDER (one of transformers), or "
            "--tokenizer words or bytes, which need none"
        )
    tokenizer, length = tokenizer_for(request.tokenizer), check_length(request.length)
    by_content = test is None
    pool, others = [Row(*row) for row in train], [Row(*row) for row in test or ()]
    classes, inferred = _classes([row.label for row in [*pool, *others]], request)
    if by_content:
        labels = [number_of(row.label, classes, request) for row in pool]
        whose = ((row.user or row.text).encode("utf-8", "replace") for row in pool)
        keep, hold = hold_out(whose, labels, request.splits)
        pool, others = [pool[i] for i in keep], [pool[i] for i in hold]
    parts = []
    for rows in (pool, others):
        ids, mask = tokenizer.encode([row.text for row in rows], length)
        labels = [number_of(row.label, classes, request) for row in rows]
        users = tuple(row.user for row in rows) if request.user else ()
        names = tuple(row.name for row in rows) if all(row.name for row in rows) else ()
        parts.append(Texts(ids, mask, torch.tensor(labels, dtype=torch.int64), users, names))
    return Source(
        request.spec,
        parts[0],
        parts[1] if len(parts[1]) else None,
        classes,
        inferred,
        by_position=by_content,
        tokenizer=tokenizer,
    )


def _read(request: Request, rows_of: Callable[[Path, Request], Iterator[Row]]) -> Source:
    path = Path(request.path).expanduser()
    test = request.options.get("test")
    named = [path, *([Path(test).expanduser()] if test else [])]
    for one in named:
        if not one.is_file():
            raise FileNotFoundError(f"{one} is not a file; {request.kind}:PATH needs one with a text in every line")
    parts = [list(rows_of(one, request)) for one in named]
    lacking = [row.name for rows in parts for row in rows if row.label == ""]  # only where the request allows it
    if not lacking:
        return text_source(request, parts[0], parts[1] if test else None)
    if len(lacking) < sum(map(len, parts)):
        raise ValueError(f"{request.spec}: {lacking[0]} has no label, and other rows have one; label all, or none")
    train, others = ([row._replace(label=0) for row in rows] for rows in [*parts, []][:2])
    request.say(f"note: {request.spec} has no column of labels; its texts are taken without")
    return replace(text_source(replace(request, classes=1), train, others), classes=UNLABELLED)


def _opened(path: Path) -> TextIO:
    form: Any = {"encoding": "utf-8", "newline": ""}
    return gzip.open(path, "rt", **form) if path.suffix == ".gz" else path.open(**form)  # type: ignore[no-any-return]


def _json_rows(path: Path, request: Request) -> Iterator[Row]:
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield _row(_object(line, where), where, request)._replace(name=f"{path.name}:{number}")
    except (UnicodeDecodeError, EOFError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); write one object into every line") from None


def _csv_rows(path: Path, request: Request) -> Iterator[Row]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        with _opened(path) as file:
            reader = csv.DictReader(file, strict=True)
            for fields in reader:
                row = _row(fields, f"{path} line {reader.line_num}", request)
                yield row._replace(name=f"{path.name}:{reader.line_num}")
    except (csv.Error, UnicodeDecodeError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    finally:
        csv.field_size_limit(before)


def _row(fields: Any, where: str, request: Request) -> Row:
    """The text and the label that the columns hold; a number written as text is a number."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is a {type(fields).__name__}; it must be an object with a text and a label")
    text = _field(fields, request.options.get("text", "text"), "text", where)
    user = _user(fields, where, request.user)
    if not request.labelled and "label" not in fields and "label" not in request.options:
        return checked(text, 0, where)._replace(label="", user=user)
    label = _field(fields, request.options.get("label", "label"), "label", where)
    return checked(text, label, where)._replace(user=user)


def checked(text: Any, label: Any, where: str) -> Row:
    """A row of this text and this label, if they are ones."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: the text is {text!r}; it must be a string")
    if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 7:
        label = int(label)
    if not isinstance(label, int | str) or label == "":
        raise ValueError(f"{where}: the label is {label!r}; it must be a whole number or a name")
    return Row(text, int(label) if isinstance(label, int) else label)


def _user(fields: dict[str, Any], where: str, column: str | None) -> str:
    if column is None:
        return ""
    if column not in fields:
        names = ", ".join(str(name) for name in list(fields)[:20])
        raise ValueError(f"{where} has no column {column!r} for the user; it has {names}: write unit = user:COLUMN")
    user = fields[column]
    if isinstance(user, bool) or not isinstance(user, int | str) or not str(user).strip():
        raise ValueError(
            f"{where}: the user is {user!r}; it must be a name or a number. A row of nobody protects nobody."
        )
    return unicodedata.normalize("NFC", str(user)).strip()


def _field(fields: dict[str, Any], column: str, what: str, where: str) -> Any:
    if column not in fields:
        names = ", ".join(str(name) for name in list(fields)[:20])
        raise ValueError(
            f"{where} has no column {column!r} for the {what}; it has {names}: name one with ?{what}=COLUMN"
        )
    return fields[column]


def number_of(label: int | str, classes: tuple[str, ...], request: Request) -> int:
    """The number of a label's class."""
    if isinstance(label, str):
        if label not in classes:
            raise ValueError(
                f"{request.spec} has label {label!r}, which is none of the classes {', '.join(classes[:20])}; correct "
                "the label, or classes"
            )
        return classes.index(label)
    if str(label) in classes:
        return classes.index(str(label))
    if not 0 <= label < len(classes):
        raise ValueError(
            f"{request.spec} has label {label}; with {len(classes)} classes labels must be 0 to {len(classes) - 1}"
        )
    return label


def _classes(labels: Sequence[int | str], request: Request) -> tuple[tuple[str, ...], tuple[Inferred, ...]]:
    """As declared; else the names that occur, or as many as the highest number needs, which is inferred."""
    declared = request.classes
    if isinstance(declared, tuple):
        return declared, ()
    names = tuple(sorted({label for label in labels if isinstance(label, str)}))
    if names:
        if any(isinstance(label, int) for label in labels):
            raise ValueError(f"{request.spec} has labels that are numbers and labels that are names; use one kind")
        return names, () if declared == len(names) else (seen_names(names),)
    if declared is not None:
        return numbered(declared), ()
    count = 1 + max((int(label) for label in labels), default=0)
    if count > MAX_CLASSES:
        raise ValueError(f"{request.spec}: label {count - 1}; labels must be 0 to {MAX_CLASSES - 1}")
    return numbered(count), (seen(count),)
