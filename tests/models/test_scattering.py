"""The scattering transform: agreement with its definition, and what it is and is not moved by."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmdp.models import Scattering, build
from lmdp.models.scattering import BORDER, DIRECTIONS, PER_COLOUR, averaged, wavelets


def images(n: int, channels: int = 3, side: int = 32) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1


def by_definition(image: Tensor, place: tuple[int, int]) -> list[float]:
    """All paths of one colour [H, W] at one place, pixel by pixel, in double precision, from the formulas."""
    x = np.pad(image.double().numpy(), BORDER, mode="reflect")

    def lengths(x: np.ndarray, j: int, angle: float, step: int) -> np.ndarray:
        width, wave = 0.8 * 2**j, 3 * math.pi / 4 / 2**j
        at = np.arange(-3.0, 4.0) if j == 0 else np.arange(-6.5, 7.0)
        u, v = np.meshgrid(at, at)
        along, across = u * math.cos(angle) + v * math.sin(angle), v * math.cos(angle) - u * math.sin(angle)
        envelope = np.exp(-(along**2 + across**2 / 4) / (2 * width**2)) / (4 * math.pi * width**2)
        psi = envelope * np.exp(1j * wave * along)
        psi -= envelope * psi.sum() / envelope.sum()
        before = (len(at) - 1) // 2
        filled = np.pad(x, before)
        starts = range(0, len(x), step)
        size = len(at)
        ends = [s for s in starts if s + size <= len(filled)]
        return np.array([[abs((psi * filled[r : r + size, c : c + size]).sum()) for c in ends] for r in ends])

    def average(x: np.ndarray, step: int) -> float:
        places = np.arange(len(x)) * step + (step - 1) / 2
        rows, columns = (np.exp(-(((places - (BORDER + 4 * p + 1.5)) / 1.6) ** 2) / 2) for p in place)
        return float(rows @ x @ columns / rows.sum() / columns.sum())

    angles = [math.pi * k / DIRECTIONS for k in range(DIRECTIONS)]
    fine = [lengths(x, 0, a, 1) for a in angles]
    coarse = [lengths(x, 1, a, 2) for a in angles]
    second = [average(lengths(each, 1, a, 2), 2) for each in fine for a in angles]
    return [average(x, 1), *(average(each, 1) for each in fine), *(average(each, 2) for each in coarse), *second]


def test_every_path_is_what_the_formulas_say() -> None:
    image = images(1, 1, 8)
    low, fine, coarse, *second = Scattering().double().kinds(image.double())
    given = torch.cat([low, fine, coarse, *second], 1)[0]
    assert given.shape == (PER_COLOUR, 2, 2)
    for place in ((0, 0), (1, 0), (1, 1)):
        assert given[:, place[0], place[1]].tolist() == pytest.approx(by_definition(image[0, 0], place), abs=1e-6)


def test_a_moved_image_gives_moved_features() -> None:
    """By four pixels, where nothing comes near the border."""
    picture = F.pad(images(2, 3, 8), (28, 28, 28, 28))
    moved = picture.roll((4, -8), (2, 3))
    for here, there in zip(Scattering().kinds(picture), Scattering().kinds(moved)):
        assert torch.allclose(here.roll((1, -2), (2, 3)), there, atol=1e-6)


def test_a_small_move_changes_less_than_it_does_to_the_pixels() -> None:
    x = images(8, 1, 64)
    features = [torch.cat(Scattering().kinds(each), 1)[..., 2:-2, 2:-2] for each in (x, x.roll(1, 3))]
    changed = (features[0] - features[1]).norm() / features[0].norm()
    assert changed < 0.5 * (x - x.roll(1, 3)).norm() / x.norm()


def test_wavelets_and_window_together_give_no_energy_that_was_not_there() -> None:
    """At every frequency the squared gains add up to at most 1: so each order has at most the energy of what it had."""
    side, gains = 64, torch.zeros(64, 64)
    for j, reach in ((0, 7), (1, 14)):
        real, imaginary = wavelets(j, torch.arange(float(reach)) - (reach - 1) / 2)[:, 0].chunk(2)
        squares = torch.fft.fft2(torch.complex(real, imaginary), (side, side)).abs().square().sum(0)
        gains += (squares + squares.flip(0, 1).roll((1, 1), (0, 1))) / 2
    window = torch.exp(-((torch.arange(-16.0, 17) / 1.6) ** 2) / 2)
    low = torch.fft.fft(window / window.sum(), side).abs().square()
    assert float((gains + low[:, None] * low).max()) < 1.001


def test_features_have_no_more_energy_than_the_image_with_its_border() -> None:
    x = images(4)
    kinds = Scattering().kinds(x)
    assert sum(float(kind.square().sum()) for kind in kinds) < float(F.pad(x, [BORDER] * 4, "reflect").square().sum())


def test_an_even_image_answers_to_no_wavelet() -> None:
    low, *waves = Scattering().kinds(torch.full((1, 3, 64, 64), 0.7))
    assert torch.allclose(low, torch.full_like(low, 0.7))
    assert max(float(kind[..., 4:-4, 4:-4].abs().max()) for kind in waves) < 1e-6


def test_features_of_an_image_are_the_same_bits_whoever_else_is_in_the_batch() -> None:
    x, stage = images(50), Scattering()
    whole = stage(x)
    others = torch.cat([x[:1], 100 * torch.flip(x[1:], (0,))])
    assert torch.equal(stage(others)[0], whole[0])
    assert torch.allclose(stage(x[:3]), whole[:3], atol=1e-5)


def test_nothing_is_learnt_in_the_stage_and_none_of_it_is_saved() -> None:
    for name in ("scatter-linear", "scatter-cnn"):
        model = build(name, (3, 32, 32), 10)
        assert not list(model.stage.parameters())
        assert not any(key.startswith("stage") for key in model.state_dict())


@pytest.mark.parametrize("name", ["scatter-linear", "scatter-cnn"])
def test_images_and_their_features_get_the_same_scores(name: str) -> None:
    torch.manual_seed(0)
    model, x = build(name, (3, 12, 17), 4), torch.randn(3, 3, 12, 17)
    assert torch.equal(model(x), model(model.stage(x)))


def test_the_window_weighs_every_place_by_its_distance_and_keeps_a_constant() -> None:
    assert torch.allclose(averaged(torch.ones(1, 1, 20, 16), 2), torch.ones(1, 1, 8, 6))
