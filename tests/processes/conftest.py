"""Crews of two and three processes, started once for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.crew import Crew
from tests.processes.train import train


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    yield from _crew(2, tmp_path_factory)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    yield from _crew(3, tmp_path_factory)


def _crew(size: int, folders: pytest.TempPathFactory) -> Iterator[Crew]:
    train(steps=1)  # what is imported and compiled by now, the processes have at once
    crew = Crew(size, folders.mktemp(f"crew-{size}"))
    yield crew
    crew.close()
