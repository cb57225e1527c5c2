"""Faces in one place: five landmarks, a similarity transform onto a template, a square crop.

As for the paper's face sets. The template is the one in common use for 112×112 face recognition; it is public.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Points = NDArray[np.float64]  # [5, 2]: left eye, right eye, nose, left and right corner of the mouth

TEMPLATE: Points = (
    np.array([[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]) / 112
)
MARGIN = 0.1  # of the template's square, left around it on every side
MAX_OVERSAMPLING = 8
MAX_CANVAS = 2048


def frame(size: int) -> Points:
    """Where the landmarks lie in an aligned image: the template's square, centred, with the margin around it."""
    return (TEMPLATE + MARGIN) / (1 + 2 * MARGIN) * size


def similarity(points: Points, target: Points) -> NDArray[np.float64]:
    """[2, 3]: the rotation, scaling and shift that takes `points` to `target` with the least squared error.

    In the plane, Umeyama's solution without reflection is a regression on one complex number.
    """
    z, w = points @ [1, 1j], target @ [1, 1j]
    around, towards = z - z.mean(), w - w.mean()
    spread = float((np.abs(around) ** 2).sum())
    turn = complex(np.vdot(around, towards)) / spread if spread > 0 else 0j
    if not (math.isfinite(abs(turn)) and abs(turn) > 1e-9):
        raise ValueError(f"landmarks {points.tolist()} do not span a face; five different points are needed")
    shift = complex(w.mean() - turn * z.mean())
    return np.array([[turn.real, -turn.imag, shift.real], [turn.imag, turn.real, shift.imag]])


def align(image: Image, landmarks: Points, size: int) -> Image:
    """The face at its template's place in a size×size image, resampled bicubically, without aliasing when shrinking."""
    from PIL import Image as pillow

    shrinking = 1 / math.hypot(*similarity(landmarks, frame(size))[:, 0])
    finer = max(1, min(math.ceil(shrinking), MAX_OVERSAMPLING, MAX_CANVAS // size))
    there = similarity(landmarks, frame(size * finer))
    linear = np.linalg.inv(there[:, :2])
    back = np.column_stack([linear, -linear @ there[:, 2]])  # Pillow asks where each new pixel comes from
    canvas = (size * finer, size * finer)
    warped = image.transform(
        canvas, pillow.Transform.AFFINE, tuple(back.reshape(-1).tolist()), pillow.Resampling.BICUBIC
    )
    return warped if finer == 1 else warped.resize((size, size), pillow.Resampling.BICUBIC)


def read_landmarks(path: Path) -> dict[str, Points]:
    """Image name → landmarks, from CSV lines `relative/path,x1,y1,…,x5,y5` or from CelebA's own list."""
    if not path.is_file():
        raise FileNotFoundError(
            f"landmarks file {path} does not exist; give landmarks=FILE with lines name,x1,y1,…,x5,y5"
        )
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        lines = file.read().splitlines()
    of_celeba = bool(lines) and lines[0].strip().isdigit()
    rows = [line.split() for line in lines] if of_celeba else list(csv.reader(lines))
    landmarks = {}
    for number, row in enumerate(rows, start=1):
        if not row or number <= (2 if of_celeba else 0):
            continue
        try:
            points = np.array([float(value) for value in row[1:]]).reshape(5, 2)
        except ValueError as error:
            if number == 1:  # a line of column names
                continue
            raise ValueError(f"{path} line {number}: {len(row)} fields; a name and ten numbers are needed") from error
        landmarks[_key(row[0])] = points
    return landmarks


def landmarks_for(name: str, landmarks: dict[str, Points], path: Path) -> Points:
    """Those of one image. Lists that name images without a suffix (VGGFace2's) are understood."""
    key = _key(name)
    points = landmarks.get(key, landmarks.get(str(PurePosixPath(key).with_suffix(""))))
    if points is None:
        raise ValueError(f"{path} has no landmarks for {name}; add a line for it or remove the image")
    return points


def _key(name: str) -> str:
    return str(PurePosixPath(name.strip().replace("\\", "/")))
