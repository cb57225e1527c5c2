"""Poisson sampling is Poisson: independent coins of probability q, empty batches included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from lmdp.private.noise import Seeded
from lmdp.private.sampling import poisson_loader, sample_rate_of


def loader(size: int, batch: int, **options: object) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(size), torch.arange(size) * 2), batch_size=batch, **options)


def sampled(size: int, batch: int, passes: int, seed: int = 0) -> np.ndarray:
    """[draws, size] of 0 and 1."""
    source = poisson_loader(loader(size, batch), uniforms=Seeded(seed).uniforms)
    rows = []
    for _ in range(passes):
        for x, y in source:
            assert torch.equal(x * 2, y)
            rows.append(np.bincount(x.numpy(), minlength=size))
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


def test_empty_batches_occur_and_keep_the_shape_of_an_example() -> None:
    source = poisson_loader(loader(4, 1), uniforms=Seeded(0).uniforms)
    sizes = [len(x) for _ in range(100) for x, _ in source]
    assert sizes.count(0) / len(sizes) == pytest.approx(0.75**4, abs=0.1)


class Pairs(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"image": torch.full((2, 3), float(i)), "label": i, "name": f"n{i}"}


@pytest.mark.parametrize("workers", [0, 1])
def test_any_dataset_and_collation_gives_whole_and_empty_batches(workers: int) -> None:
    source = poisson_loader(DataLoader(Pairs(), batch_size=1, num_workers=workers), uniforms=Seeded(1).uniforms)
    sizes = []
    for batch in source:
        sizes.append(len(batch["image"]))
        assert batch["image"].shape[1:] == (2, 3)
        assert len(batch["label"]) == sizes[-1]
        assert batch["image"].dtype == torch.float32
        assert len(batch["name"]) == sizes[-1]
    assert len(sizes) == len(source) == 6
    assert 0 in sizes


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
    empty = 0
    for _ in range(20):
        for x, _ in source:
            if len(x) == 0:
                empty += 1
                continue
            source.log.mark_used()
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
    assert source.log.skipped == 0
    next(iter(source))  # it went on after all: the batch at which it broke off was seen, and left out
    assert source.log.skipped == 1


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
