"""The same weights, and the same promise, for any number of processes and any parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Subset

from lmdp.private.noise import Seeded, Shared
from lmdp.processes import Group, Population
from lmdp.units import PerUser, Views
from tests.processes.crew import Crew
from tests.processes.train import BATCH, EXAMPLES, Trained, data, train, work
from tests.tables import Choice, choices

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def away(some_weights: Trained, others: Trained) -> float:
    return float((some_weights.flat - others.flat).norm() / others.flat.norm())


def check(alone: Trained, together: list[Trained], tolerance: float) -> None:
    """All processes have the very same bits, and those of one process up to rounding."""
    for one in together:
        assert torch.equal(one.flat, together[0].flat)
        assert away(one, alone) <= tolerance
        differing = {key for key, value in one.statement.items() if value != alone.statement[key]}
        assert differing <= {"processes", "verdicts"}
        assert one.statement["processes"] == len(together)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", choices(), ids="-".join)
def test_one_two_and_three_processes_make_the_same_model(
    pair: Crew, trio: Crew, choice: Choice, dtype: torch.dtype
) -> None:
    quick: dict[str, Any] = {"check_mixing": False}
    alone = train(*choice, dtype, **quick)
    check(alone, pair(work, (*choice, dtype), quick), TOLERANCE[dtype])
    in_parts = trio(work, (*choice, dtype), quick | {"max_physical_batch_size": 2})
    assert len({one.parts for one in in_parts}) > 1
    check(alone, in_parts, TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("choice", choices(), ids="-".join)
def test_looks_change_nothing_of_the_answer(pair: Crew, choice: Choice) -> None:
    check(train(*choice), pair(work, choice, {}), 1e-5)
    check(train(*choice), pair(work, choice, {"max_physical_batch_size": 4}), 1e-5)


def test_processes_without_examples_and_draws_without_any_are_steps_like_others(trio: Crew) -> None:
    """At this rate most draws leave a process with nobody, and some leave all."""
    rare = {"dataset": Subset(data(), range(20)), "batch_size": 1, "check_mixing": False, "allow_large_delta": True}
    check(train(**rare), trio(work, (), rare), 1e-5)


def test_without_a_seed_all_processes_have_the_same_weights_and_one_certified_statement(pair: Crew) -> None:
    first, second = pair(work, (), {"seed": None})
    assert torch.equal(first.flat, second.flat)
    assert first.statement == second.statement
    assert first.statement["certified"], first.statement["reasons"]
    stated = {name: first.statement[name] for name in ("dataset_size", "expected_batch_size", "sample_rate", "steps")}
    assert stated == {
        "dataset_size": EXAMPLES,
        "expected_batch_size": BATCH,
        "sample_rate": BATCH / EXAMPLES,
        "steps": 20,
    }
    again, _ = pair(work, (), {"seed": None})
    assert not torch.equal(first.flat, again.flat)


def part(rank: int, size: int) -> Any:
    return Subset(data(torch.float64), range(rank, EXAMPLES, size))


def sharded(options: dict[str, Any]) -> Trained:
    group = Group()
    return train(dtype=torch.float64, dataset=part(group.rank, group.size), sharded=True, **options)


def test_processes_with_parts_of_their_own_add_up_to_the_whole(trio: Crew) -> None:
    """Where everybody is drawn, the sum is that of all examples, whoever has them."""
    everybody = {"check_mixing": False, "batch_size": EXAMPLES, "steps": 6}
    alone = train(dtype=torch.float64, **everybody)
    together = trio(sharded, everybody)
    check(alone, together, 1e-12)


def test_processes_with_parts_of_their_own_are_certified_for_the_whole(pair: Crew) -> None:
    first, second = pair(sharded, {"seed": None})
    assert torch.equal(first.flat, second.flat)
    assert first.statement["certified"], first.statement["reasons"]
    assert (first.statement["dataset_size"], first.statement["sample_rate"]) == (EXAMPLES, BATCH / EXAMPLES)


class Place(Group):
    """One of several processes, of which there is only this."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


@given(seed=st.integers(0, 2**32), draw=st.integers(0, 50), size=st.integers(1, 8), rate=st.floats(0.01, 1.0))
def test_the_union_of_all_shares_is_the_draw_of_one_process(seed: int, draw: int, size: int, rate: float) -> None:
    uniforms, examples = Seeded(seed).uniforms, 57

    def drawn(rank: int, size: int) -> Tensor:
        numbers = Population(rate, examples, Place(rank, size)).uniforms(uniforms)(draw, examples)
        return (numbers < rate).nonzero().squeeze(1)

    shares = [drawn(rank, size) for rank in range(size)]
    assert torch.cat(shares).sort().values.tolist() == drawn(0, 1).tolist()


@given(seed=st.integers(0, 2**32), one=st.integers(0, 56), size=st.integers(2, 8), rate=st.floats(0.01, 1.0))
def test_one_example_less_moves_no_other_one_to_another_process(seed: int, one: int, size: int, rate: float) -> None:
    """Processes may differ in their loss: whoever changed places would move the sum too."""
    drawn = torch.arange(57) != one

    def shares(without: bool) -> list[list[int]]:
        def uniforms(draw: int, n: int) -> Tensor:
            numbers = Seeded(seed).uniforms(draw, n)
            return torch.where(drawn, numbers, 1.0) if without else numbers

        each = [Population(rate, 57, Place(rank, size)).uniforms(uniforms)(0, 57) < rate for rank in range(size)]
        return [(mine & drawn).nonzero().squeeze(1).tolist() for mine in each]

    assert shares(without=True) == shares(without=False)


@pytest.mark.parametrize("number", [0.0, 0.1 - 1e-17, math.nextafter(0.1, 0), -1.0])
def test_whatever_is_drawn_has_a_process(number: float) -> None:
    shares = [
        Population(0.1, 1, Place(rank, 3)).uniforms(
            lambda draw, size: torch.full((size,), number, dtype=torch.float64)
        )(0, 1)
        for rank in range(3)
    ]
    assert sum(int((share < 0.1).sum()) for share in shares) == int(number < 0.1)


def test_processes_have_about_as_many_examples_each() -> None:
    sizes = []
    for rank in range(4):
        numbers = Population(0.5, 10_000, Place(rank, 4)).uniforms(Seeded(1).uniforms)(0, 10_000)
        sizes.append(int((numbers < 0.5).sum()))
    assert all(abs(size - 1250) < 5 * 1250**0.5 for size in sizes)


def test_bits_of_one_key_differ_by_draw_by_rank_and_from_the_noise() -> None:
    """And are the same again for the same draw, which is what processes have in common."""
    key = bytes(range(32))
    streams = [Shared(key, rank).uniforms(draw, 4) for rank in (None, 0, 1) for draw in (0, 1, 2)]
    assert len({tuple(stream.tolist()) for stream in streams}) == len(streams)
    assert torch.equal(Shared(key, 1).uniforms(2, 4), streams[-1])
    words = [Shared(key)._stream(kind, number).words(4) for kind in (0, 1) for number in (1, 2)]
    assert len({tuple(word.tolist()) for word in words}) == 4
    with pytest.raises(TypeError, match="cannot be copied"):
        __import__("copy").deepcopy(Shared(key))


def jittered(rows: Tensor, uniforms: Tensor) -> Tensor:
    return rows + uniforms[:, :1].to(rows)


def per_user(options: dict[str, Any]) -> Trained:
    users = [i % 30 for i in range(EXAMPLES)]
    dataset = PerUser(data(torch.float64), users, rows=4, seed=options.get("seed", 11))
    dataset.moment = lambda: 7  # what is chosen follows from the user alone
    return train(dtype=torch.float64, dataset=dataset, collate_fn=dataset.collate, **options)


def test_units_of_several_rows_are_dealt_whole(pair: Crew) -> None:
    """And what is drawn for a unit is the same on whichever process it is, though each has made the dataset itself."""
    quick = {"check_mixing": False, "steps": 6}
    alone = per_user(quick)
    together = pair(per_user, quick)
    check(alone, together, 1e-12)
    assert (alone.statement["unit"], alone.statement["dataset_size"]) == ("user", 30)
    first, second = pair(per_user, quick | {"seed": None, "check_mixing": True})
    assert torch.equal(first.flat, second.flat)
    assert first.statement["certified"], first.statement["reasons"]


def views(options: dict[str, Any]) -> Trained:
    dataset = Views(data(torch.float64), 3, jittered)
    dataset.moment = lambda: 7
    return train(dtype=torch.float64, dataset=dataset, collate_fn=dataset.collate, **options)


def test_views_are_drawn_by_the_key_of_the_first_process(pair: Crew) -> None:
    first, second = pair(views, {"seed": None, "steps": 3})
    assert torch.equal(first.flat, second.flat)
    assert first.statement["certified"], first.statement["reasons"]
