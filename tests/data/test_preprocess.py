"""Resizing and channels, and that both roads to them, tensors and Pillow, arrive at the same images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lmdp.data import Images
from lmdp.data.preprocess import fit
from tests.data.files import random_images


def images(array: np.ndarray) -> Images:
    return Images(torch.tensor(array), torch.zeros(len(array)).long())


def test_grey_becomes_colour_by_repetition_and_colour_grey_by_luminance() -> None:
    grey = images(random_images(4, 1, 6, 6))
    colour = fit(grey, size=None, channels=3)
    assert colour.shape == (3, 6, 6)
    assert all(torch.equal(colour.pixels[:, c], grey.pixels[:, 0]) for c in range(3))
    assert torch.equal(fit(colour, size=None, channels=1).pixels, grey.pixels)
    primaries = images(np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8).reshape(3, 3, 1, 1))
    assert fit(primaries, size=None, channels=1).pixels.flatten().tolist() == [76, 150, 29]


@pytest.mark.parametrize("size", [7, 16, 40])
def test_resizing_is_pillows_bilinear_to_the_nearest_level(size: int) -> None:
    array = random_images(3, 3, 16, 20)
    ours = fit(images(array), size=size, channels=None).pixels
    for before, after in zip(array, ours):
        image = Image.fromarray(before.transpose(1, 2, 0)).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(image).astype(int).transpose(2, 0, 1) - after.numpy()).max() <= 1


def test_shrinking_averages_instead_of_dropping_pixels() -> None:
    stripes = np.zeros((1, 1, 64, 64), np.uint8)
    stripes[..., ::2] = 255
    assert fit(images(stripes), size=8, channels=None).pixels.float().std() < 3


def test_a_resized_example_does_not_depend_on_the_others() -> None:
    array = random_images(1030, 3, 6, 6)
    together = fit(images(array), size=4, channels=1).pixels
    alone = fit(images(array[1027:1028]), size=4, channels=1).pixels
    assert torch.equal(together[1027:1028], alone)


def test_what_fits_already_is_untouched_and_what_is_no_image_is_refused() -> None:
    fitting = images(random_images(2, 3, 8, 8))
    assert fit(fitting, size=8, channels=3) is fitting
    features = Images(torch.randn(4, 7), torch.zeros(4).long())
    assert fit(features, size=None, channels=None) is features
    with pytest.raises(ValueError, match=r"examples of shape \(7,\) are no images"):
        fit(features, size=8, channels=None)
    floats = Images(torch.rand(4, 1, 6, 6), torch.zeros(4).long())
    assert fit(floats, size=3, channels=3).tensors()[0].shape == (4, 3, 3, 3)
