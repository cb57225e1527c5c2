"""JSON → dataclasses and back. The types of a dataclass say all that is asked of a file; errors name the field.

    decoded(Kind, content, where)              a dataclass of any depth
    field_of(content, name, kind, where)       one field alone
    encoded(value)                             the JSON that `decoded` reads

A field may be `str`, `int`, `float`, `bool`, another dataclass, `X | None` (None where it is missing), `tuple[X, ...]`,
`tuple[X, Y]`, a `Mapping` (not looked into) or `Any`; `Annotated[X, Must(...)]` asks for more. Keys that are no field,
and fields that no constructor takes (`init=False`), are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

LARGEST = 1e300
"""No number in these files is larger; Python's whole numbers may be, and would not fit a float."""

MAY_BE_MISSING = "may be missing"
"""In `Annotated[X, MAY_BE_MISSING]`: older files lack this field, and its default takes its place."""


@dataclass(frozen=True)
class Must:
    """What a value must be beyond its type; an error says it in these words."""

    be: str
    holds: Callable[[Any], bool] = lambda value: True


def between(low: float, high: float) -> Must:
    """Of a float. Only where `high` is infinite may a file hold "inf", which JSON has no number for."""
    return Must(f"a number between {low:g} and {high:g}", lambda value: low <= value <= high)


def at_least(low: int) -> Must:
    return Must(f"a whole number of at least {low}", lambda value: value >= low)


def one_of(*words: str) -> Must:
    return Must(f"one of {', '.join(words)}", lambda value: value in words)


Share = Annotated[float, between(0, 1)]
Amount = Annotated[float, between(0, LARGEST)]
AmountOrInfinity = Annotated[float, between(0, math.inf)]
Count = Annotated[int, at_least(0)]

_UNLESS_ANNOTATED = {
    str: Must("text"),
    int: Must("a whole number"),
    float: between(-LARGEST, LARGEST),
    bool: Must("true or false"),
}


def read_object(path: str | Path, what: str) -> Mapping[str, Any]:
    """The JSON object in a file; `what` says what it should have been."""
    try:
        content = json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {what}: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not {what}: it is a {type(content).__name__}; it must be an object with fields")
    return content


def decoded(kind: type[T], content: Any, where: str, *, version: int | None = None) -> T:
    """The dataclass that a JSON object holds. `where` says what the object is a part of.

    With `version`, a file whose field 'format' is another one is refused before anything else is looked at.
    """
    values = _object(content, where)
    if version is not None and (written := field_of(values, "format", int, where)) != version:
        raise ValueError(f"{where}: format is {written}; this version of lmdp reads format {version}")
    kinds = get_type_hints(kind, include_extras=True)
    named = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    held = [name for name in named if name in values or MAY_BE_MISSING not in get_args(kinds[name])]
    return kind(**{name: field_of(values, name, kinds[name], where) for name in held})


def field_of(content: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    """One field of a JSON object, as a value of this type."""
    if name not in content and NoneType not in get_args(kind):
        raise ValueError(f"{where} lacks the field '{name}'")
    return _value(kind, content.get(name), where, name)


def encoded(value: Any) -> Any:
    """The same in plain JSON values. Infinity becomes the string "inf", because JSON has no infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: encoded(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [encoded(part) for part in value]
    return "inf" if value == math.inf else value


def _object(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} is a {type(content).__name__}; it must be an object with fields")
    return content


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    plain, marks = (kind.__origin__, kind.__metadata__) if get_origin(kind) is Annotated else (kind, ())
    parts = get_args(plain)
    if plain is Any:
        return value
    if NoneType in parts:
        (other,) = (part for part in parts if part is not NoneType)
        return None if value is None else _value(other, value, where, name)
    if is_dataclass(plain):
        return decoded(plain, value, f"{where}: {name}")  # type: ignore[arg-type]
    if get_origin(plain) is Mapping:
        return _object(value, f"{where}: {name}")
    must = next((mark for mark in marks if isinstance(mark, Must)), _UNLESS_ANNOTATED.get(plain, Must("a list")))
    read = _items(parts, value, where, name) if get_origin(plain) is tuple else _scalar(plain, value)
    if read is None or not must.holds(read):
        raise ValueError(f"{where}: {name} is {str(value)[:60]!r}; it must be {must.be}")
    return read


def _items(parts: tuple[Any, ...], value: Any, where: str, name: str) -> tuple[Any, ...] | None:
    """None if this is no list, or one of another length."""
    if not isinstance(value, list):
        return None
    kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    if len(kinds) != len(value):
        return None
    names = (f"{name}[{i}]" if is_dataclass(kind) else name for i, kind in enumerate(kinds))
    return tuple(_value(kind, item, where, one) for kind, item, one in zip(kinds, value, names))


def _scalar(plain: type, value: Any) -> Any:
    """None if the value is not of this type. Whole numbers are floats too; true and false are no numbers."""
    if plain is float:
        if value == "inf":
            return math.inf
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        return float(value) if number else None
    return value if isinstance(value, plain) and (plain is bool or not isinstance(value, bool)) else None
