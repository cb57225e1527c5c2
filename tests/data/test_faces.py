"""Alignment undoes a known rotation, scaling and shift, and does it in the least-squares sense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmdp.data.faces import TEMPLATE, align, frame, landmarks_for, read_landmarks, similarity


def turned(degrees: float, scale: float, shift: tuple[float, float]) -> np.ndarray:
    angle = np.deg2rad(degrees)
    linear = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return np.column_stack([linear, shift])


def moved(points: np.ndarray, by: np.ndarray) -> np.ndarray:
    return points @ by[:, :2].T + by[:, 2]


def face(coordinates: np.ndarray, width: float) -> np.ndarray:
    """Brightness at coordinates of the aligned frame: a blob of its own height on every landmark."""
    distance = ((coordinates[..., None, :] - frame(64)) ** 2).sum(-1)
    return np.clip((np.exp(-distance / (2 * width**2)) * [250, 200, 150, 220, 170]).sum(-1), 0, 255)


def centres(side: int) -> np.ndarray:
    across = np.arange(side) + 0.5
    return np.stack(np.meshgrid(across, across), axis=-1)


@pytest.mark.parametrize("degrees, scale", [(0, 1), (25, 2.3), (-70, 4.5), (180, 1.3), (10, 0.7)])
def test_a_face_that_was_turned_scaled_and_shifted_comes_back(degrees: float, scale: float) -> None:
    wanted = face(centres(64), width=4)
    by = turned(degrees, scale, (0, 0))
    by[:, 2] = 200 - moved(np.array([[32.0, 32.0]]), by)[0]
    inverse = np.linalg.inv(by[:, :2])
    photograph = face((centres(400) - by[:, 2]) @ inverse.T, width=4)
    aligned = align(Image.fromarray(np.rint(photograph).astype(np.uint8)), moved(frame(64), by), 64)
    difference = np.abs(np.asarray(aligned, float) - wanted)
    assert aligned.size == (64, 64)
    assert difference.max() < 8
    assert difference.mean() < 1


def test_shrinking_averages_instead_of_dropping_pixels() -> None:
    stripes = np.zeros((400, 400), np.uint8)
    stripes[:, ::2] = 255
    aligned = np.asarray(align(Image.fromarray(stripes), frame(64) * 6.1, 64), float)
    assert aligned[8:-8, 8:-8].std() < 5


def test_the_similarity_is_exact_where_there_is_one_and_best_where_there_is_none() -> None:
    by = turned(33, 1.7, (5, -3))
    np.testing.assert_allclose(similarity(TEMPLATE, moved(TEMPLATE, by)), by, atol=1e-12)
    rng = np.random.default_rng(0)
    points, target = rng.normal(size=(5, 2)), rng.normal(size=(5, 2))
    best = similarity(points, target)
    error = ((moved(points, best) - target) ** 2).sum()
    for _ in range(200):
        a, b, c, d = rng.normal(size=4) * 0.05
        other = best + np.array([[a, -b, c], [b, a, d]])
        assert ((moved(points, other) - target) ** 2).sum() >= error
    assert np.linalg.det(best[:, :2]) > 0


def test_a_mirrored_face_is_not_mirrored_back() -> None:
    assert np.linalg.det(similarity(TEMPLATE * [-1, 1], TEMPLATE)[:, :2]) > 0


def test_the_frame_is_the_template_with_a_tenth_around_it() -> None:
    corners = (np.array([0.0, 1.0]) + 0.1) / 1.2
    np.testing.assert_allclose((frame(120) / 120 - corners[0]) / (corners[1] - corners[0]), TEMPLATE)


@pytest.mark.parametrize("points", [np.ones((5, 2)), np.full((5, 2), np.nan), np.full((5, 2), np.inf)])
def test_landmarks_that_span_no_face_are_refused(points: np.ndarray) -> None:
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="do not span a face"):
        align(Image.new("L", (9, 9)), points, 8)


def test_lists_of_landmarks(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text('a/b.jpg,1,2,3,4,5,6,7,8,9,10\n\n"n1/0001_01",1,1,1,1,1,1,1,1,1,2\n')
    landmarks = read_landmarks(path)
    assert landmarks_for("a/b.jpg", landmarks, path).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert landmarks_for("n1/0001_01.jpg", landmarks, path)[4].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"no landmarks for c\.jpg"):
        landmarks_for("c.jpg", landmarks, path)
    path.write_text("a,1,2,3,4,5,6,7,8,9,10\nb,1,2,3\n")
    with pytest.raises(ValueError, match="line 2: 4 fields; a name and ten numbers"):
        read_landmarks(path)
