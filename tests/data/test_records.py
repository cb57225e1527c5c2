"""Dataclasses are written as JSON and read back; whatever their types do not allow is refused by the field's name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdp.data.records import (
    MAY_BE_MISSING,
    Amount,
    AmountOrInfinity,
    Count,
    Must,
    Share,
    at_least,
    decoded,
    encoded,
    field_of,
    one_of,
    read_object,
)


@dataclass(frozen=True)
class Inner:
    name: str
    share: Share


@dataclass(frozen=True)
class Outer:
    text: str
    flag: bool
    whole: int
    count: Count
    number: float
    amount: Amount
    most: AmountOrInfinity
    kind: Annotated[str, one_of("a", "b")]
    layers: Annotated[int, at_least(1)]
    one: Inner
    many: tuple[Inner, ...]
    words: tuple[str, ...]
    pair: Annotated[tuple[Share, Share], Must("two numbers")]
    curve: Annotated[tuple[tuple[Share, ...], tuple[Share, ...]], Must("alike", lambda c: len(c[0]) == len(c[1]))]
    rest: Mapping[str, Any]
    perhaps: Inner | None = None
    newer: Annotated[str, MAY_BE_MISSING] = "not stated"
    required: str = "a default that no file may rely on"
    derived: bool = field(init=False, default=True)


VALUE = Outer(
    text="é",
    flag=False,
    whole=-3,
    count=0,
    number=-1.5,
    amount=2.0,
    most=math.inf,
    kind="b",
    layers=1,
    one=Inner("x", 0.5),
    many=(Inner("y", 0.0), Inner("z", 1.0)),
    words=("a", ""),
    pair=(0.25, 0.75),
    curve=((0.0, 1.0), (0.5, 1.0)),
    rest={"anything": [1, {"x": None}]},
    required="here",
)


def content(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(encoded(VALUE), allow_nan=False)) | changes


def test_what_is_encoded_is_json_and_is_read_back_as_it_was() -> None:
    assert decoded(Outer, content(), "it") == VALUE


def test_infinity_is_written_as_text_at_any_depth() -> None:
    assert encoded({"a": [math.inf, (1, math.inf)], "b": VALUE})["a"] == ["inf", [1, "inf"]]
    assert content()["most"] == "inf"


def test_unknown_keys_and_fields_that_no_constructor_takes_are_passed_over() -> None:
    assert decoded(Outer, content(other=1, derived="no"), "it") == VALUE


def test_a_field_may_be_missing_only_where_its_type_says_so() -> None:
    for name in content():
        held = {key: value for key, value in content().items() if key != name}
        if name in ("perhaps", "newer", "derived"):
            assert decoded(Outer, held, "it") == VALUE
        else:
            with pytest.raises(ValueError, match=f"^it lacks the field '{name}'$"):
                decoded(Outer, held, "it")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"text": 3}, "it: text is '3'; it must be text"),
        ({"flag": 1}, "it: flag is '1'; it must be true or false"),
        ({"whole": 1.0}, "it: whole is '1.0'; it must be a whole number"),
        ({"whole": True}, "it: whole is 'True'; it must be a whole number"),
        ({"count": -1}, "it: count is '-1'; it must be a whole number of at least 0"),
        ({"layers": 0}, "it: layers is '0'; it must be a whole number of at least 1"),
        ({"number": "inf"}, "it: number is 'inf'; it must be a number between -1e+300 and 1e+300"),
        ({"number": False}, "it: number is 'False'; it must be a number between -1e+300 and 1e+300"),
        ({"number": math.inf}, "it: number is 'inf'; it must be a number between -1e+300 and 1e+300"),
        ({"number": math.nan}, "it: number is 'nan'; it must be a number between -1e+300 and 1e+300"),
        ({"amount": 10**301}, f"it: amount is '1{'0' * 59}'; it must be a number between 0 and 1e+300"),
        ({"amount": "inf"}, "it: amount is 'inf'; it must be a number between 0 and 1e+300"),
        ({"most": -1}, "it: most is '-1'; it must be a number between 0 and inf"),
        ({"most": math.inf}, "it: most is 'inf'; it must be a number between 0 and inf"),
        ({"most": 1e301}, "it: most is '1e+301'; it must be a number between 0 and inf"),
        ({"most": "Infinity"}, "it: most is 'Infinity'; it must be a number between 0 and inf"),
        ({"kind": "c"}, "it: kind is 'c'; it must be one of a, b"),
        ({"one": 3}, "it: one is a int; it must be an object with fields"),
        ({"one": {"name": "x"}}, "it: one lacks the field 'share'"),
        ({"many": "x"}, "it: many is 'x'; it must be a list"),
        ({"many": [{"name": "x", "share": 2}]}, "it: many[0]: share is '2'; it must be a number between 0 and 1"),
        ({"many": [None]}, "it: many[0] is a NoneType; it must be an object with fields"),
        ({"words": ["a", 1]}, "it: words is '1'; it must be text"),
        ({"pair": [0.1]}, "it: pair is '[0.1]'; it must be two numbers"),
        ({"pair": [0.1, "x"]}, "it: pair is 'x'; it must be a number between 0 and 1"),
        ({"curve": [[0.1], []]}, "it: curve is '[[0.1], []]'; it must be alike"),
        ({"rest": []}, "it: rest is a list; it must be an object with fields"),
        ({"perhaps": 1}, "it: perhaps is a int; it must be an object with fields"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_it_must_be(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        decoded(Outer, content(**changes), "it")
    assert str(error.value) == complaint


def test_another_version_is_refused_before_anything_else_is_looked_at() -> None:
    for written, complaint in ((9, "it: format is 9; this version of lmdp reads format 1"), (None, "a whole number")):
        with pytest.raises(ValueError, match=complaint):
            decoded(Outer, {"format": written}, "it", version=1)
    with pytest.raises(ValueError, match="it lacks the field 'format'"):
        decoded(Outer, content(), "it", version=1)
    assert decoded(Outer, content(format=1), "it", version=1) == VALUE


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(value=st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_value_in_any_field_is_read_or_refused(value: Any) -> None:
    for name in content():
        with contextlib.suppress(ValueError):
            decoded(Outer, content(**{name: value}), "it")


def test_one_field_is_read_alone() -> None:
    assert field_of({"steps": 3}, "steps", Count, "it") == 3
    with pytest.raises(ValueError, match="it lacks the field 'steps'"):
        field_of({}, "steps", Count, "it")


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [(b"{", "is not a story: it is not JSON"), (b"\xff", "not JSON"), (b"[1]", "it is a list"), (b"[" * 10**5, "JSON")],
)
def test_a_file_that_is_no_object_is_refused(raw: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(ValueError, match=complaint):
        read_object(tmp_path / "x.json", "a story")
