"""No training whose guarantee is broken ends certified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certified.broken import BROKEN
from tests.certified.case import NOT_CERTIFIED, REFUSED, Case, parameters


@pytest.mark.parametrize("case", parameters(BROKEN))
def test_a_broken_training_is_refused_with_a_remedy_or_not_certified_with_its_reason(
    case: Case, tmp_path: Path
) -> None:
    outcome = case.outcome(tmp_path)
    assert outcome.kind in (REFUSED, NOT_CERTIFIED), outcome
    assert outcome.kind == NOT_CERTIFIED or outcome.names_a_remedy, outcome
