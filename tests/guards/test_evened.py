"""How gradients are made about as long before they are compared: layers are raised, gradients of nearly nothing not."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmdp.guards.replay import TOLERANCE, _evened

TOLERATED = TOLERANCE[torch.float32]
SHORT = 10 * TOLERATED
"""Of the longest gradient: below this an example's own rounding may be as long as itself."""


@given(st.lists(st.floats(-6, 0), min_size=2, max_size=8), st.floats(-9, 0))
def test_a_short_gradient_is_raised_only_as_far_as_one_of_a_hundredth(layers: list[float], shorter: float) -> None:
    row = 10 ** torch.tensor(layers, dtype=torch.float64)
    norms = torch.stack([row, row * 10**shorter])
    long, short = (norms / _evened(norms, TOLERATED)).unbind()
    share = min(1.0, 10**shorter / SHORT)
    assert torch.allclose(short, long * share, rtol=1e-6, atol=0)


@given(st.lists(st.floats(-6, 0), min_size=2, max_size=8))
def test_no_layer_hides_behind_another_of_the_same_example(layers: list[float]) -> None:
    row = 10 ** torch.tensor(layers, dtype=torch.float64)
    even = (row[None] / _evened(row[None], TOLERATED))[0]
    whole = row.norm()
    assert torch.allclose(even[row >= 3 * TOLERATED * whole], torch.ones((), dtype=torch.float64))
    assert bool((even * 3 * TOLERATED * whole >= row * (1 - 1e-6))[row < 3 * TOLERATED * whole].all())


def test_a_gradient_of_nothing_stays_nothing() -> None:
    norms = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    even = norms / _evened(norms, TOLERATED)
    assert torch.isfinite(even).all()
    assert not even[0].any()
