"""Folds of layers are attacked side by side: the same results on any number of workers, one thread each."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from lmdp.membership.crossfit import Result
from lmdp.membership.evidence import Evidence
from lmdp.membership.instrument import attack_layers, unheard
from lmdp.membership.workers import side_by_side

SIZE = 240


def layers() -> tuple[dict[str, Evidence], np.ndarray]:
    """Two layers, the second of which leaks, with all that an attack may ask for."""
    rng = np.random.default_rng(0)
    member = np.arange(SIZE) % 2 == 0
    collected = {}
    for name, lift in (("first", 0.0), ("second", 0.6)):
        rows = (rng.normal(size=(SIZE, 12)) + lift * member[:, None]).astype(np.float32)
        views = rows[:, None] + 0.1 * rng.normal(size=(SIZE, 2, 12)).astype(np.float32)
        collected[name] = Evidence(rows, rng.integers(0, 3, SIZE), views)
    return collected, member


def attacked(workers: int) -> dict[str, Result]:
    collected, member = layers()
    return attack_layers(collected, member, 0, lambda _: None, unheard, partial(side_by_side, workers=workers))


def test_results_are_the_same_to_the_last_bit_on_any_number_of_workers() -> None:
    torch.manual_seed(1)
    one = attacked(1)
    torch.manual_seed(2)  # what others draw meanwhile does not matter either
    several = attacked(4)
    for name, result in one.items():
        assert np.array_equal(result.scores, several[name].scores)
        assert result.metrics == several[name].metrics
        assert result.wins == several[name].wins
    assert one["second"].metrics.auc > 0.7


def test_attacking_leaves_the_generator_and_the_number_of_threads_alone() -> None:
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    attacked(2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_each_task_has_one_thread_and_results_come_in_order() -> None:
    def look(number: int) -> tuple[int, int, int]:
        blas = max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return number, torch.get_num_threads(), blas

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = list(side_by_side([lambda n=n: look(n) for n in range(6)], 3))  # type: ignore[misc]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert results == [(n, 1, 1) for n in range(6)]


def test_what_a_task_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("layer 'x' is ill")

    with pytest.raises(ValueError, match="layer 'x' is ill"):
        list(side_by_side([fail, fail], 2))
