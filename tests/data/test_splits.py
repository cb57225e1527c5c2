"""Who is kept out of training: chosen by everybody's own content alone, about as many as asked for, within bounds."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdp.data import Images, Source
from lmdp.data.splits import FEWEST_NON_MEMBERS, MOST_NON_MEMBERS, non_member_chance, non_members

CONTENTS = st.lists(st.binary(max_size=6), max_size=40)


def pool(count: int, classes: int = 4, seed: int = 0) -> Source:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), dtype=torch.uint8, generator=generator)
    images = Images(pixels, torch.arange(count) % classes)
    return Source("made up", images, None, tuple(map(str, range(classes))))


@settings(max_examples=200, deadline=None)
@given(CONTENTS, st.floats(0, 0.9), st.randoms(use_true_random=False), st.data())
def test_nobodys_part_follows_from_anybody_else(
    contents: list[bytes], chance: float, chaos: random.Random, data: st.DataObject
) -> None:
    """Others may come, go and be shuffled: who was kept out stays out, and who was trained on stays in."""
    _, out = non_members(contents, chance)
    kept_out = {contents[i] for i in out}
    others = [content for content in contents if data.draw(st.booleans())] + data.draw(CONTENTS)
    chaos.shuffle(others)
    keep, hold = non_members(others, chance)
    assert sorted([*keep, *hold]) == list(range(len(others)))
    assert {others[i] for i in hold} & set(contents) == kept_out & set(others)
    assert not {others[i] for i in keep} & {others[i] for i in hold}, "copies are never parted"


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_every_class_is_kept_out_at_the_same_rate(share: float) -> None:
    source = pool(8000).keeping_out(share)
    assert source.held_out is not None
    for count in Counter(source.held_out.labels.tolist()).values():
        spread = (2000 * share * (1 - share)) ** 0.5
        assert abs(count - 2000 * share) < 4 * spread
    assert len(source.train) + len(source.held_out) == len(source.pool) == 8000
    assert sorted(source.pool.contents()) == sorted(pool(8000).train.contents())


def test_the_number_kept_out_stays_within_its_bounds() -> None:
    assert non_member_chance(0.0, 10**6) == 0
    assert non_member_chance(0.1, FEWEST_NON_MEMBERS * 10 - 1) == 0
    assert non_member_chance(0.1, FEWEST_NON_MEMBERS * 10) == 0.1
    assert non_member_chance(0.1, 10 * MOST_NON_MEMBERS) == 0.1
    for size in (10 * MOST_NON_MEMBERS + 1, 162_770, 10**6, 10**8):
        expected = non_member_chance(0.1, size) * size
        assert MOST_NON_MEMBERS / 2 <= expected <= MOST_NON_MEMBERS
    assert pool(400).keeping_out(0.1).held_out is None
    assert pool(2000).keeping_out(0.0).held_out is None


def test_an_example_more_changes_the_chance_at_few_sizes_only() -> None:
    chances = [non_member_chance(0.1, size) for size in range(1, 500_000, 7)]
    assert sum(a != b for a, b in itertools.pairwise(chances)) == 1 + 3  # from 0, and halved three times
