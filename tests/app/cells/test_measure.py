"""What a cell is measured on."""

from __future__ import annotations

from lmdp.app.cells.measure import _source, _thinned
from lmdp.app.config import Config


def test_members_are_drawn_anew_for_every_seed_and_alike_for_every_method() -> None:
    base = Config(data="digits", holdout=0.3, seed=1, method="dpsgd")
    one = _source(base)
    sides = [set(part.digests(b"k")) for part in (one.train, one.held_out)]  # type: ignore[union-attr]
    assert not sides[0] & sides[1]
    for changed in ({"method": "sgd"}, {"epsilon": 1.0}, {"learning_rate": 3.0}):
        same = _source(base.changed(**changed))
        assert set(same.train.digests(b"k")) == sides[0]
    other = _source(base.changed(seed=2))
    members = set(other.train.digests(b"k"))
    assert len(other.train) == len(one.train)
    assert members | set(other.held_out.digests(b"k")) == sides[0] | sides[1]  # type: ignore[union-attr]
    assert 0.5 < len(members & sides[0]) / len(sides[0]) < 0.9  # 0.7 by chance


def test_a_long_curve_is_thinned_by_means_of_neighbours() -> None:
    curve = [(float(i), float(i % 2)) for i in range(600)]
    thin = _thinned(curve)
    assert len(thin) == 60
    assert {y for _, y in thin} == {0.5}
    assert _thinned(curve[:3]) == curve[:3]
    assert _thinned([]) == []
