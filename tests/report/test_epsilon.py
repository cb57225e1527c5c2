"""The chart of lower bounds says what the bounds say, and draws nothing outside of itself."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ET

import pytest

from lmdp.audit import EpsilonBound
from lmdp.report.epsilon import figure

BOUND = EpsilonBound(
    claimed=1.65,
    lower=0.4,
    delta=1e-5,
    confidence=0.99,
    method="repeated",
    canary="dirac",
    canaries=1,
    runs=100,
    training="dpsgd",
    accountant="rdp",
)


def test_every_bound_has_a_row_and_a_refuted_claim_is_marked() -> None:
    refuted = dataclasses.replace(BOUND, lower=3.1, training="lm, weights batch", canary="tipping")
    svg = figure([BOUND, refuted, dataclasses.replace(BOUND, claimed=math.inf)])
    ET.fromstring(svg)
    assert "dpsgd · dirac" in svg
    assert "more than claimed" in svg
    assert "The claim does not hold" in svg
    assert "more than claimed" not in figure([BOUND])
    assert "not a proof" in svg


def test_no_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        figure([])
