"""Image files → one tensor of bytes. A file that cannot be read is named; absurdly large ones are refused."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lmdp.data.faces import Points, align
from lmdp.data.request import Say

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOS = (".heic", ".heif", ".avif", ".dng", ".raw", ".jxl", ".cr2", ".nef", ".arw")
"""Endings of photos that phones and cameras make and Pillow does not read by itself."""
ORIENTATION = 0x0112  # of EXIF
GREY = ("1", "L", "LA", "La")
COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


@dataclass(frozen=True)
class Picture:
    """An encoded image: its name in messages, where its bytes are, and its landmarks if it is a face to be aligned."""

    name: str
    file: Path | bytes
    landmarks: Points | None = None


def decode(
    pictures: Sequence[Picture], *, size: int | None, channels: int | None, crop: bool = False, say: Say
) -> Tensor:
    """uint8 [N, C, H, W]. Without `size` all must be of one size; without `channels` one colour image makes all colour.

    `crop` takes the largest central square first.
    """
    if channels is None:
        channels = 1 if all(_is_grey(picture) for picture in pictures) else 3
    if not pictures:
        return torch.zeros(0, channels, size or 1, size or 1, dtype=torch.uint8)
    first = _pixels(pictures[0], size, channels, crop)
    pixels = torch.empty(len(pictures), *first.shape, dtype=torch.uint8)
    for index, picture in enumerate(pictures):
        try:
            one = first if index == 0 else _pixels(picture, size, channels, crop)
        except ValueError as error:
            raise ValueError(f"{error}{_others(pictures[index + 1 :])}") from error
        if one.shape != first.shape:
            raise ValueError(
                f"{picture.name} is {one.shape[2]}×{one.shape[1]} but {pictures[0].name} is "
                f"{first.shape[2]}×{first.shape[1]}; add ?size= to bring all images to one size"
            )
        pixels[index] = one
        if 10 * index // len(pictures) < 10 * (index + 1) // len(pictures) and len(pictures) >= 1000:
            say(f"{index + 1} of {len(pictures)} images decoded")
    return pixels


def _others(pictures: Sequence[Picture]) -> str:
    """Which of the rest cannot be opened either, so that all can be mended at once."""
    broken = []
    for picture in pictures:
        try:
            _is_grey(picture)
        except ValueError:
            broken.append(picture.name)
    more = f", and {len(broken) - 5} more" if len(broken) > 5 else ""
    return f" The same holds of {', '.join(broken[:5])}{more}." if broken else ""


def _pixels(picture: Picture, size: int | None, channels: int, crop: bool) -> Tensor:
    """uint8 [C, H, W]"""
    from PIL.Image import Resampling

    with _opened(picture) as opened:
        image = _upright(opened, picture).convert("L" if channels == 1 else "RGB")
        if picture.landmarks is not None:
            image = align(image, picture.landmarks, size or min(image.size))
        elif crop:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Resampling.BILINEAR)
        return torch.tensor(np.asarray(image, np.uint8)).view(image.height, image.width, channels).permute(2, 0, 1)


def _upright(image: Image, picture: Picture) -> Image:
    """As the camera was held: phones store the sensor's pixels, and beside them how to turn them (EXIF).

    Landmarks are places among the pixels as stored, so that a face with landmarks is left as it is.
    """
    from PIL import ImageOps

    return image if picture.landmarks is not None or _orientation(image) == 1 else ImageOps.exif_transpose(image)


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a damaged note beside good pixels: they are taken as stored
        return 1


def encoded(image: Image, name: str, channels: int) -> bytes:
    """An image of Pillow as a file of it would be read: upright, and grey or in colour."""
    if image.mode not in GREY + COLOUR:
        raise ValueError(f"{name} has pixels of kind {image.mode!r}; convert it to 8 bits per channel: RGB or L")
    raw = io.BytesIO()
    upright = _upright(image, Picture(name, b"")).convert("L" if channels == 1 else "RGB")
    upright.save(raw, "PNG")
    return raw.getvalue()


def _is_grey(picture: Picture) -> bool:
    with _opened(picture) as image:
        return image.mode in GREY


@contextmanager
def _opened(picture: Picture) -> Iterator[Image]:
    """The image, not yet decoded; whatever Pillow finds wrong with it, now or later, becomes an error with its name."""
    from PIL import Image as pillow

    file = io.BytesIO(picture.file) if isinstance(picture.file, bytes) else picture.file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(file) as image:
                if image.mode not in GREY + COLOUR:
                    raise ValueError(f"its pixels are of kind {image.mode!r}; save it with 8 bits per channel")
                yield image
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ValueError(f"{picture.name} is refused, it may be a decompression bomb: {error}") from error
    except FileNotFoundError as error:
        raise ValueError(f"{picture.name} cannot be read as an image: there is no file {picture.file!s}") from error
    except Exception as error:  # Pillow's plugins raise whatever a broken file makes them stumble over
        raise ValueError(f"{picture.name} cannot be read as an image: {error}. {_remedy(picture)}") from error


def _remedy(picture: Picture) -> str:
    ending = picture.file.suffix.lower() if isinstance(picture.file, Path) else ""
    return f"{ending} photos are not read here: save it as .jpg." if ending in PHOTOS else "Repair or remove it."
