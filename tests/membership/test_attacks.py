"""The table of attacks is the only list of them: instrument, documentation and tests read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import lmdp
from lmdp.membership.attacks import ATTACKS, Attack, attacks_on
from lmdp.membership.calibration import CALIBRATIONS
from lmdp.membership.evidence import Evidence, Score

SIZE = 200
MEMBER = np.arange(SIZE) % 2 == 0


def whole() -> Evidence:
    """Evidence with everything that an attack may ask for."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(SIZE, 6))
    views = np.stack([features, features + 0.1 * rng.normal(size=features.shape)], axis=1)
    return Evidence(features, np.arange(SIZE) % 3, views, rng.normal(size=(SIZE, 3)))


def test_every_attack_says_what_it_is_once() -> None:
    assert all(attack.name == name and attack.help for name, attack in ATTACKS.items())
    assert len({attack.help for attack in ATTACKS.values()}) == len(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=lambda attack: attack.name)
def test_every_attack_is_fitted_on_evidence_that_has_all_and_scores_others(attack: Attack) -> None:
    fit = attacks_on(whole(), attack.target)[attack.name]
    score = fit(whole(), MEMBER, 0)
    others = whole().at(np.arange(0, SIZE, 3))
    assert score(others).shape == (len(others),)
    assert np.isfinite(score(others)).all()


@pytest.mark.parametrize("part", ["labels", "views", "outputs"])
def test_an_attack_is_tried_exactly_where_there_is_what_it_needs(part: str) -> None:
    without = dataclasses.replace(whole(), **{part: None})
    for target in ("layer", "output"):
        tried = {name for name, attack in ATTACKS.items() if attack.target == target and part not in attack.needs}
        assert set(attacks_on(without, target)) == tried


def test_nothing_is_combined_where_there_is_one_summary_only() -> None:
    bare = Evidence(whole().features)
    assert "combined" not in attacks_on(bare)
    assert "combined" in attacks_on(whole())


def test_an_attack_that_is_added_to_the_table_is_tried_and_chosen_where_it_is_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(0).normal(size=(400, 6))
    x[:200, 0] = np.floor(x[:200, 0]) + 0.25  # what is left over tells members, and nothing else does

    def fit(*_: object) -> Score:
        return lambda seen: -np.abs(seen.features[:, 0] % 1 - 0.25)

    monkeypatch.setitem(ATTACKS, "made-up", Attack("made-up", "looks at what is left over", fit))
    report = lmdp.audit(None, x[:200], x[200:])
    assert report.layers[0].attack == "made-up"
    assert report.layers[0].auc > 0.95


@pytest.mark.parametrize("name", [*ATTACKS, *CALIBRATIONS])
def test_the_documentation_names_every_attack_and_calibration(name: str) -> None:
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
