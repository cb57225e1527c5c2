"""Poisson sampling is Poisson: independent coins of probability q, empty batches included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from lmdp.guards import looks
from lmdp.guards.looks import PARTS, Wish, look
from lmdp.private.noise import Entropy, Randomness, Seeded
from lmdp.private.sampling import poisson_loader
from lmdp.processes import sample_rate_of


def loader(size: int, batch: int, **options: object) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(size), torch.arange(size) * 2), batch_size=batch, **options)


def sampled(size: int, batch: int, passes: int, seed: int = 0) -> np.ndarray:
    """[draws, size] of 0 and 1."""
    source = poisson_loader(loader(size, batch), uniforms=Seeded(seed).uniforms)
    rows = []
    for _ in range(passes):
        for x, y in source:
            assert torch.equal(x * 2, y)
            counted = x[: source.log.mark_used().size]
            rows.append(np.bincount(counted.numpy(), minlength=size))
    return np.array(rows)


def test_every_example_is_drawn_at_rate_q_and_at_most_once_per_batch() -> None:
    drawn = sampled(size=50, batch=10, passes=800)
    assert drawn.max() == 1
    draws, q = len(drawn), 0.2
    statistic = ((drawn.sum(0) - draws * q) ** 2 / (draws * q * (1 - q))).sum()
    assert stats.chi2(50).sf(statistic) > 1e-4
    assert stats.chi2(50).cdf(statistic) > 1e-4


def test_batch_sizes_are_binomial() -> None:
    sizes = sampled(size=40, batch=8, passes=1000).sum(1)
    expected = stats.binom(40, 0.2).pmf(np.arange(41)) * len(sizes)
    usual = expected > 5
    statistic = ((np.bincount(sizes, minlength=41) - expected)[usual] ** 2 / expected[usual]).sum()
    assert stats.chi2(usual.sum() - 1).sf(statistic) > 1e-4


def test_draws_are_independent_between_examples_and_between_steps() -> None:
    drawn = sampled(size=30, batch=6, passes=2000).astype(float)
    bound = 4.9 / np.sqrt(len(drawn))
    between_examples = np.corrcoef(drawn.T) - np.eye(30)
    assert np.abs(between_examples).max() < bound
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < bound / np.sqrt(30)


def test_empty_batches_occur_and_one_example_is_handed_out_in_their_place() -> None:
    """So that models which cannot run without rows can; the delivery says that it counts for nothing."""
    source = poisson_loader(loader(4, 1), uniforms=Seeded(0).uniforms)
    deliveries = []
    for _ in range(100):
        for x, _ in source:
            deliveries.append(source.log.mark_used())
            assert len(x) == max(1, deliveries[-1].size)
    assert [d.empty for d in deliveries].count(True) / len(deliveries) == pytest.approx(0.75**4, abs=0.1)


@pytest.mark.parametrize("randomness", [Seeded(0), Entropy()])
def test_a_batch_stays_the_same_until_it_is_stepped(randomness: Randomness) -> None:
    """Whoever could draw again until a batch suits them would have another sampling than the accountant's."""
    steps = 0
    source = poisson_loader(loader(40, 8), uniforms=randomness.uniforms)
    source.follow(lambda: steps)
    batches = [next(iter(source))[0] for _ in range(5)]
    assert all(torch.equal(batches[0], x) for x in batches)
    looked_at = [x for x, _ in source]
    assert torch.equal(looked_at[0], batches[0])
    steps = 1
    later = [x for x, _ in source]
    assert all(torch.equal(a, b) for a, b in zip(looked_at[1:], later))
    assert not torch.equal(later[-1], looked_at[-1])


def test_a_batch_that_is_left_after_its_first_part_was_skipped() -> None:
    source = poisson_loader(loader(100, 30), uniforms=Seeded(3).uniforms, max_physical_batch_size=8)
    batches = 0
    for _ in source:
        delivery = source.log._current
        batches += delivery.first
        if batches > 1 or delivery.first:
            source.log.mark_used()
    assert source.log.skipped >= 1


def as_rows(at: Tensor, still: bool) -> tuple[Any, bool]:
    return [at], False


@pytest.mark.parametrize("most", [None, 1, 4])
@given(size=st.integers(0, 40))
def test_the_parts_of_a_look_share_examples_and_have_a_stranger_each(size: int, most: int | None) -> None:
    drawn = torch.arange(100, 100 + size)[: most or size]
    parts, _ = look(Wish(drawn), 140, most, as_rows)
    rows, deliveries = [batch[0] for batch, _ in parts], [delivery for _, delivery in parts]
    assert len(parts) == PARTS
    assert [(d.company, d.companies, d.first or d.last) for d in deliveries] == [
        (i, PARTS, False) for i in (1, 2, 3, 4)
    ]
    assert [d.still for d in deliveries] == [False, False, True, True]
    assert [len(at) for at in rows] == [d.size for d in deliveries]
    assert len(rows[0]) <= max(2, min(4, most or 4), len(drawn))
    assert 1 <= len(rows[3]) < len(rows[0]) == len(rows[1]) == len(rows[2])
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(rows[one][list(deliveries[one].shared)], rows[other][list(deliveries[other].shared)])
    others = {*range(len(rows[0]))} - {*deliveries[0].shared}
    assert all(len({int(at[place]) for place in others}) == 1 for at in rows[1:3])
    assert size > 30 or not {int(at[place]) for at in rows[1:3] for place in others} & {*drawn.tolist()}
    changed = (rows[0][: len(drawn)] != drawn).sum()
    assert changed <= 1  # one who is rare stays as well


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("again", [1, 2])
@given(size=st.integers(0, 40))
def test_a_look_at_a_difference_is_at_the_same_examples_with_the_first_part_twice(
    size: int, again: int, alone: bool
) -> None:
    drawn = torch.arange(100, 100 + size)
    before, chosen = look(Wish(drawn), 140, None, as_rows)
    parts, _ = look(Wish(drawn, again=again, alone=alone), 140, None, as_rows, chosen)
    rows, deliveries = [batch[0] for batch, _ in parts], [delivery for _, delivery in parts]
    first, other = (2, 3) if alone else (0, 1)
    assert {d.still for d in deliveries} == {alone}
    for i, (at, delivery) in enumerate(zip(rows, deliveries)):
        same, as_before = before[other if i == 3 - again else first]
        assert torch.equal(at, same[0])
        assert delivery.shared == as_before.shared


def test_a_stranger_with_a_rare_label_is_preferred_and_stays_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whatever is counted over a batch differs between companies, also where it changes its own kind only."""
    monkeypatch.setattr(looks, "_FRESH", torch.Generator().manual_seed(0))  # else a run may draw no rare label
    labels = (torch.arange(400) % 5 == 0).long()
    for _ in range(20):
        _, chosen = look(Wish(torch.arange(1, 7)), 400, None, lambda at, still: ([at.float(), labels[at]], False))
        given_away = ({*range(6)} - {*chosen.shared.tolist()}).pop()
        assert {int(labels[chosen.beside[i][given_away]]) for i in (0, 1)} == {0, 1}
        assert labels[chosen.every[chosen.shared]].any()


def test_a_look_has_as_many_parts_where_no_two_batches_have_one_shape() -> None:
    """How many batches make no step must not depend on the data. Nobody is shared: there is nothing to compare."""
    lengths = iter(range(1000))
    parts, _ = look(Wish(torch.arange(6)), 40, None, lambda at, still: (torch.zeros(len(at), next(lengths)), False))
    assert len(parts) == PARTS
    assert {d.shared for _, d in parts if not d.still} == {()}


@pytest.mark.parametrize("most", [None, 3])
def test_a_pass_that_is_broken_off_goes_on_with_what_was_not_stepped(most: int | None) -> None:
    """Whole batches or parts, seen or not: the draws that are stepped are those of a single pass."""
    steps, number = 0, 0
    source = poisson_loader(loader(40, 8), uniforms=Seeded(0).uniforms, max_physical_batch_size=most)
    source.follow(lambda: steps)
    stepped: list[list[int]] = [[]]
    for x, _ in poisson_loader(loader(40, 8), uniforms=Seeded(0).uniforms):
        stepped.append(x.tolist())
    taken: list[list[int]] = [[]]
    while steps < 5:
        for x, _ in source:
            number += 1
            if number % 3 == 0:
                break  # seen, and not stepped
            delivery = source.log.mark_used()
            taken[-1] += x[: delivery.size].tolist()
            steps += delivery.last
            taken += [[]] if delivery.last else []
            if number % 4 == 0 or steps == 5:
                break
    assert taken[:5] == stepped[1:]
    assert source.log.skipped == 0


class Pairs(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"image": torch.full((2, 3), float(i)), "label": i, "name": f"n{i}"}


@pytest.mark.parametrize("workers", [0, 1])
def test_any_dataset_and_collation_gives_whole_and_empty_batches(workers: int) -> None:
    source = poisson_loader(DataLoader(Pairs(), batch_size=1, num_workers=workers), uniforms=Seeded(1).uniforms)
    sizes, empty = [], 0
    for batch in source:
        sizes.append(len(batch["image"]))
        empty += source.log.mark_used().empty
        assert batch["image"].shape[1:] == (2, 3)
        assert len(batch["label"]) == sizes[-1]
        assert batch["image"].dtype == torch.float32
        assert len(batch["name"]) == sizes[-1]
    assert len(sizes) == len(source) == 6
    assert empty > 0


def test_parts_of_a_batch_are_the_batch_and_only_the_last_says_so() -> None:
    whole = poisson_loader(loader(100, 30), uniforms=Seeded(3).uniforms)
    parts = poisson_loader(loader(100, 30), uniforms=Seeded(3).uniforms, max_physical_batch_size=8)
    batches = [x for x, _ in whole]
    joined: list[Tensor] = []
    pending: list[Tensor] = []
    for x, _ in parts:
        assert len(x) <= 8
        pending.append(x)
        handout = parts.log.mark_used()
        assert handout is not None
        assert handout.size == len(x)
        if handout.last:
            joined.append(torch.cat(pending))
            pending = []
    assert not pending
    assert len(batches) == len(joined) == len(parts) == 4
    assert all(torch.equal(a, b) for a, b in zip(batches, joined))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_abandoned_pass_leaves_nothing_behind(workers: int) -> None:
    """A worker is ahead of the loop: parts were drawn that an abandoned pass never handed out."""
    source = loader(100, 30, num_workers=workers)
    parts = poisson_loader(source, uniforms=Seeded(3).uniforms, max_physical_batch_size=8)
    next(iter(parts))
    for x, _ in parts:
        handout = parts.log.mark_used()
        assert handout is not None
        assert handout.size == len(x)


def test_every_batch_skipped_in_a_pass_that_steps_others_is_counted() -> None:
    source = poisson_loader(loader(4, 1), uniforms=Seeded(0).uniforms)
    source.follow(lambda: steps)
    steps = empty = last = 0
    for _ in range(20):
        used = empty_here = 0
        for _ in source:
            if source.log._current.empty:
                empty_here += 1
                continue
            source.log.mark_used()
            used, steps, last = used + 1, steps + 1, empty_here
        empty += last if used else 0  # after the last step of a pass none is skipped: the next pass begins with it
    assert empty > 0
    assert source.log.skipped == empty


def test_looking_without_stepping_and_breaking_off_for_good_skip_nothing() -> None:
    source = poisson_loader(loader(40, 4), uniforms=Seeded(0).uniforms)
    next(iter(source))
    assert len(list(source)) == 10
    for i, _ in enumerate(source):
        source.log.mark_used()
        if i == 5:
            break
    assert len(list(source)) == 10
    for i, _ in enumerate(source):
        if i == 5:
            break
        source.log.mark_used()
    next(iter(source))
    assert source.log.skipped == 0


def test_the_sampling_rate_is_the_batch_size_over_the_dataset_size() -> None:
    assert sample_rate_of(loader(50, 10)) == (0.2, 50)
    assert sample_rate_of(loader(5, 10)) == (1.0, 5)
    assert sample_rate_of(loader(103, 10)) == (10 / 103, 103)
    assert len(poisson_loader(loader(103, 10), uniforms=Seeded(0).uniforms)) == 11


class Stream(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        yield torch.zeros(1)


def test_loaders_that_cannot_be_sampled_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"IterableDataset.*__getitem__"):
        sample_rate_of(DataLoader(Stream(), batch_size=2))
    with pytest.raises(ValueError, match="no batch_size"):
        sample_rate_of(DataLoader(TensorDataset(torch.zeros(4)), batch_size=None))
    with pytest.raises(ValueError, match="empty"):
        sample_rate_of(DataLoader(TensorDataset(torch.zeros(0)), batch_size=2, sampler=[0]))
    some = SubsetRandomSampler(range(2))
    with pytest.raises(ValueError, match=r"SubsetRandomSampler.*Subset"):
        poisson_loader(loader(4, 2, sampler=some), uniforms=Seeded(0).uniforms)
    with pytest.raises(ValueError, match="max_physical_batch_size is 0"):
        poisson_loader(loader(4, 2), uniforms=Seeded(0).uniforms, max_physical_batch_size=0)


def test_a_dataset_of_ones_own_gives_its_own_examples_whatever_it_is_made_of() -> None:
    class Sevens(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return (torch.full((2,), 7.0),)

        def examples_at(self, indices: Tensor) -> list[Tensor]:
            return [torch.zeros(len(indices), 2)]

        def __lmdp_examples_at__(self, indices: Tensor) -> list[Tensor]:
            return [torch.full((len(indices), 2), 7.0)]

    source = poisson_loader(DataLoader(Sevens(torch.zeros(20, 2)), batch_size=10), Seeded(0).uniforms)
    assert {float(value) for (batch,) in source for value in batch.flatten()} == {7.0}


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("most", [None, 3])
def test_passes_that_take_turns_use_every_draw_once(most: int | None, evaluated: bool) -> None:
    """Also with passes in between in which nothing is stepped."""
    source = poisson_loader(loader(60, 10), Seeded(0).uniforms, most)
    steps, used = 0, list[tuple[int, int]]()
    source.follow(lambda: steps)
    passes = [iter(source) for _ in range(4)]
    for _ in range(40):
        for one in passes:
            if next(one, None) is not None:
                delivery = source.log.mark_used()
                assert delivery is not None
                used.append((delivery.number, delivery.part))
                steps += delivery.last
        if evaluated:
            assert sum(1 for _ in source) >= len(source)
    assert used == sorted(set(used))
    assert {number for number, _ in used} == {*range(steps)}
    assert source.log.skipped == 0


def test_a_draw_that_was_stepped_in_another_pass_is_not_stepped_again() -> None:
    source = poisson_loader(loader(60, 10), Seeded(0).uniforms)
    steps = 0
    source.follow(lambda: steps)
    first, second = iter(source), iter(source)
    next(first)
    held = source.log._current
    next(second)
    assert source.log.mark_used() is not None
    steps += 1
    assert held is not None
    source.log.deliver(held)
    assert source.log.mark_used() is None
