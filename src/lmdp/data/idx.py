"""`mnist` and `fashion-mnist`: four gzipped IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lmdp.data.download import fetch
from lmdp.data.images import Images, Source
from lmdp.data.official import REMOTES
from lmdp.data.request import Request

MAX_BYTES = 1 << 30  # unpacked; the largest official file has 47 MB
DIGITS = tuple(str(digit) for digit in range(10))
GARMENTS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def read_idx_set(request: Request) -> Source:
    files = [fetch(remote, request.folder, request.say) for remote in REMOTES[request.kind]]
    train, test = _images(*files[:2]), _images(*files[2:])
    return Source(request.spec, train, test, DIGITS if request.kind == "mnist" else GARMENTS)


def _images(images: Path, labels: Path) -> Images:
    pixels = parse_idx(_unpacked(images), images.name, dimensions=3)
    numbers = parse_idx(_unpacked(labels), labels.name, dimensions=1)
    if len(pixels) != len(numbers):
        raise ValueError(f"{images.name} has {len(pixels)} images but {labels.name} has {len(numbers)} labels")
    return Images(torch.tensor(pixels).unsqueeze(1), torch.tensor(numbers.astype(np.int64)))


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a whole gzip file ({error}). Delete it, and it is downloaded again."
        ) from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} unpacks to more than {MAX_BYTES} bytes; it is not an image set of this kind")
    return data


def parse_idx(data: bytes, name: str, *, dimensions: int) -> NDArray[np.uint8]:
    """An array of bytes. The header is believed only if it accounts for every byte that follows."""
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(
            f"{name} begins with {data[:4].hex(' ') or 'nothing'}; an IDX file of bytes in {dimensions} "
            f"dimensions begins with 00 00 08 {dimensions:02x}"
        )
    shape = [int(size) for size in np.frombuffer(data, ">u4", dimensions, offset=4)]
    if math.prod(shape) != len(data) - header:
        raise ValueError(f"{name} announces {shape}, {math.prod(shape)} bytes, but holds {len(data) - header}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
