"""A SPEC string, taken apart: `kind`, `kind:PATH`, and options after a question mark, `kind?limit=1000&size=32`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lmdp.data.readers import GENERAL, READERS

MAX_SIZE = 4096
PATHS = ("landmarks", "test")
"""Options whose value is a path."""
_ENDINGS = {".npz": "npz", ".jsonl": "jsonl", ".csv": "csv"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is to be loaded, how it should look, and where files are kept.

    `classes` are those that somebody has declared, by number or by name; `splits` is how examples are chosen;
    `tokenizer` and `length` are how texts become numbers; `user` is the column that names the person of a row.
    `labelled`: whether examples must have labels; of files of one's own they may lack them all otherwise.
    """

    spec: str
    kind: str
    path: str
    options: Mapping[str, str]
    size: int | None
    channels: int | None
    limit: int | None
    half: int | None
    classes: int | tuple[str, ...] | None
    splits: str
    cache: Path | None
    say: Say
    tokenizer: str | None = None
    length: int | None = None
    user: str | None = None
    labelled: bool = True

    @property
    def folder(self) -> Path:
        """Where the files of this set are kept."""
        return (self.cache or default_cache()) / self.kind

    def number(self, option: str, high: int) -> int | None:
        return _number(self.options, option, high)


def parse(
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
) -> Request:
    """Everything that can be wrong with a SPEC is found here, before any file is touched."""
    name, _, query = spec.partition("?")
    kind, colon, path = name.partition(":")
    _check_kind(name, kind, bool(colon), path)
    options = _options(query, kind)
    size = _agreed("size", size, _number(options, "size", MAX_SIZE))
    channels = _agreed("channels", channels, _number(options, "channels", 3))
    if size is not None and not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size is {size}; it must be 1 to {MAX_SIZE}")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels}; it must be 1 (grey) or 3 (colour)")
    limit = _number(options, "limit", 10**9)
    half = _number(options, "half", 2)
    names = classes if classes is None or isinstance(classes, int) else tuple(classes)
    if splits not in ("content", "position"):
        raise ValueError(f"splits is {splits!r}; it must be 'content' or 'position'")
    _check_user(user, kind, spec, limit, splits)
    say = say or (lambda _: None)
    texts = (tokenizer, length, user, labelled)
    return Request(spec, kind, path, options, size, channels, limit, half, names, splits, cache, say, *texts)


def anchored(spec: str, folder: Path | None = None) -> str:
    """The same SPEC with its paths seen from `folder` (the current one unless given), so that it can be read anywhere.

    What cannot be taken apart is left as it is: `parse` says what is wrong with it.
    """
    name, question, query = spec.partition("?")
    kind, _, path = name.partition(":")
    if kind in READERS and READERS[kind].path == "PATH" and path:
        name = f"{kind}:{_absolute(path, folder)}"
    options = [part.partition("=") for part in query.split("&")]
    parts = [
        f"{key}{sign}{_absolute(value, folder) if key in PATHS and value else value}" for key, sign, value in options
    ]
    return f"{name}{question}{'&'.join(parts)}"


def _absolute(path: str, folder: Path | None) -> str:
    return os.path.normpath((folder or Path.cwd()) / Path(path).expanduser())


def default_cache() -> Path:
    """$LMDP_DATA, or the user's cache folder."""
    chosen = os.environ.get("LMDP_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("lmdp"))


def _check_kind(name: str, kind: str, colon: bool, path: str) -> None:
    if kind not in READERS:
        specs = ", ".join(reader.spec for reader in READERS.values())
        raise ValueError(f"unknown data {name!r}; {_guess(name, kind)}known are {specs}")
    reader = READERS[kind]
    if reader.path and not path:
        raise ValueError(f"{kind!r} lacks what it reads; write {reader.spec}")
    if colon and not reader.path:
        raise ValueError(f"{kind!r} takes no path but has {path!r}; write {kind}, and set LMDP_DATA for its folder")


def _check_user(user: str | None, kind: str, spec: str, limit: int | None, splits: str) -> None:
    if user is None:
        return
    if not READERS[kind].users:
        able = " and ".join(reader.spec for reader in READERS.values() if reader.users)
        raise ValueError(
            f"{spec} has no column {user!r} that could say whose a row is; {able} may have one. Write the data as one "
            "of them, or protect one example (leave unit out)"
        )
    if limit is not None or splits == "position":
        raise ValueError(
            f"{spec}: {'limit=' if limit is not None else 'splits = position'} lets rows of others in where those of a "
            "user go, so that no user has an epsilon; leave it out"
        )


def _guess(name: str, kind: str) -> str:
    if Path(name).is_dir():
        return f"did you mean 'folder:{name}'? "
    for ending, known_as in _ENDINGS.items():
        if name.endswith((ending, f"{ending}.gz")):
            return f"did you mean '{known_as}:{name}'? "
    near = difflib.get_close_matches(kind.lower(), READERS, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _options(query: str, kind: str) -> Mapping[str, str]:
    allowed = READERS[kind].options + GENERAL
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        option, equals, value = part.partition("=")
        if option not in allowed:
            near = difflib.get_close_matches(option.lower(), allowed, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown option {option!r} for {kind}; {guess}allowed are {', '.join(allowed)}")
        if not equals or not value:
            raise ValueError(f"option {option!r} for {kind} has no value; write {option}=VALUE")
        if option in options:
            raise ValueError(
                f"option {option!r} for {kind} is given twice ({options[option]!r}, {value!r}); give it once"
            )
        options[option] = value
    return MappingProxyType(options)


def _number(options: Mapping[str, str], option: str, high: int) -> int | None:
    text = options.get(option)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= high):
        raise ValueError(f"option {option} is {text!r}; it must be a whole number from 1 to {high}")
    return int(text)


def _agreed(what: str, called: int | None, written: int | None) -> int | None:
    if called is not None and written is not None and called != written:
        raise ValueError(f"{what} is {written} in the SPEC but {called} is needed here; leave {what}= out of the SPEC")
    return written if called is None else called
