"""Every sound training ends certified: an alarm that is false teaches people to switch alarms off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certified.case import CERTIFIED, Case, parameters
from tests.certified.sound import SOUND


@pytest.mark.parametrize("case", parameters(SOUND))
def test_a_sound_training_runs_as_it_is_written_and_ends_certified(case: Case, tmp_path: Path) -> None:
    outcome = case.outcome(tmp_path)
    assert outcome.kind == CERTIFIED, outcome
    assert not outcome.text, outcome
    assert outcome.steps >= case.releases / 2  # in the other iterations the engine looked instead


def test_there_are_at_least_forty_of_them() -> None:
    assert len(SOUND) >= 40
