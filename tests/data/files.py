"""The official formats, small: what the real files look like, made from a few random images."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image


def random_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_gz(array: np.ndarray) -> bytes:
    return gzip.compress(idx(array))


def tar_gz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def records(x: np.ndarray, *labels: list[int]) -> bytes:
    """CIFAR's: the label bytes, then 3072 bytes of pixels by channel."""
    columns = [np.array(column, np.uint8).reshape(-1, 1) for column in labels]
    return np.concatenate([*columns, x.reshape(len(x), -1)], axis=1).tobytes()


def mat(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    scipy.io.savemat(out, arrays, do_compression=True)
    return out.getvalue()


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path
