"""Files that somebody else may have made are read or refused with a ValueError or OSError, and nothing else happens.

A few hundred inputs per reader; `python -m tests.fuzz.long` makes as many as one likes, with bounds on memory and time.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import Parser, outcome, parsers


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.name)
@settings(max_examples=200, deadline=5000, suppress_health_check=list(HealthCheck))
@given(number=st.integers(0, 2**63))
def test_a_mutated_file_is_read_or_refused(
    parser: Parser, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{parser.name}"
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow and NumPy warn of what they still read
        outcome(parser, parser.mutate(random.Random(number), parser.valid), folder)


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.name)
def test_the_valid_file_is_read_and_leaves_nothing_behind(
    parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    raw = parser.valid or parser.mutate(Unchanged(), b"")
    assert outcome(parser, raw, tmp_path / "inside") == "read"
    assert os.listdir(tmp_path / "here") == []
    assert sorted(os.listdir(tmp_path)) == ["here", "inside"]


class Unchanged(random.Random):
    """Chooses no file to change."""

    def sample(self, *_: object, **__: object) -> list[str]:
        return []
