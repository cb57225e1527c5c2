"""`npz:PATH`: NumPy arrays x_train, y_train and, if there, x_test, y_test, classes or num_classes.

Pickled objects are never read.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from lmdp.data.classes import numbered, seen
from lmdp.data.images import MAX_CLASSES, Images, Inferred, Source
from lmdp.data.preprocess import fit
from lmdp.data.request import Request, Say

DATA = ("x_train", "y_train", "x_test", "y_test")
BRIGHT = 16.0
"""No image that was standardised in any usual way has values of 0 to more than this."""
CLASSES = ("classes", "num_classes")


def read_npz(request: Request) -> Source:
    path = Path(request.path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; npz:PATH needs one with the arrays x_train and y_train")
    arrays = read_arrays(path, (*DATA, *CLASSES))
    train, test = (_images(arrays, part, path, request) for part in ("train", "test"))
    if train is None:
        raise ValueError(f"{path} lacks x_train; it has {', '.join(sorted(arrays)) or 'none of the known arrays'}")
    classes, inferred = _classes(arrays, [part for part in (train, test) if part], path, request)
    return Source(request.spec, train, test, classes, inferred)


def _images(arrays: dict[str, NDArray[Any]], part: str, path: Path, request: Request) -> Images | None:
    x, y = arrays.get(f"x_{part}"), arrays.get(f"y_{part}")
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise ValueError(f"{path} has only one of x_{part} and y_{part}; it needs both")
    if x.ndim < 2:
        raise ValueError(
            f"{path}: x_{part} has shape {x.shape}; it needs a first axis of examples and at least one more"
        )
    if y.dtype.kind not in "iub" or y.shape not in ((len(x),), (len(x), 1)):
        raise ValueError(f"{path}: y_{part} is {y.dtype} of shape {y.shape}; it must be {len(x)} whole numbers")
    images = Images(_pixels(x, f"{path}: x_{part}", request.say), torch.from_numpy(y.reshape(-1).astype(np.int64)))
    return fit(images, size=request.size, channels=request.channels)  # here, since the parts may differ in shape


def _pixels(x: NDArray[Any], name: str, say: Say) -> Tensor:
    """Bytes as [N, C, H, W]; floats as they are, but for channels that come last."""
    if x.dtype.kind == "f":
        if x.ndim in (3, 4) and x.size and x.min() >= 0 and BRIGHT < x.max() <= 255:
            raise ValueError(
                f"{name} is {x.dtype} from {x.min():g} to {x.max():g}: bytes saved as floats, which are taken as they "
                "are. Save them as uint8, or standardise them yourself: (x / 255 - 0.5) / 0.5"
            )
        return _floats(x, name, say)
    if x.dtype != np.uint8:
        raise ValueError(f"{name} is {x.dtype}; it must be uint8 (0 to 255) or floats")
    if x.ndim == 3:
        return torch.tensor(x).unsqueeze(1)
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return torch.from_numpy(np.array(x.transpose(0, 3, 1, 2), order="C"))
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return torch.tensor(x)
    raise ValueError(f"{name} has shape {x.shape}; bytes must be NHW, NHWC or NCHW with 1 or 3 channels")


def _floats(x: NDArray[Any], name: str, say: Say) -> Tensor:
    """As they are. What is not finite is refused; what is perhaps meant otherwise is told of."""
    with np.errstate(over="ignore"):
        values = x.astype(np.float32)
    if not np.isfinite(values).all():
        at = np.argwhere(~np.isfinite(values))
        raise ValueError(
            f"{name} has {len(at)} values that are NaN, infinite or too large for float32, the first at "
            f"{tuple(at[0].tolist())}: of example {at[0][0]}. Replace them, or leave those examples out"
        )
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if max(-low, high) > BRIGHT:
        say(
            f"note: {name} goes from {low:g} to {high:g}, and is taken as it is; models learn best from about -1 to 1: "
            f"{'bytes, it seems: ' if low >= 0 and high <= 255 else ''}standardise with public numbers, such as "
            "(x / 255 - 0.5) / 0.5"
        )
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        say(f"note: {name} has shape {x.shape}: read as NHWC, channels last")
        values = np.array(values.transpose(0, 3, 1, 2), order="C")
    return torch.from_numpy(values)


def _classes(
    arrays: dict[str, NDArray[Any]], parts: list[Images], path: Path, request: Request
) -> tuple[tuple[str, ...], tuple[Inferred, ...]]:
    """As the file or the request says; else as many as the highest label needs, which is inferred."""
    if "classes" in arrays:
        return tuple(str(name) for name in arrays["classes"].reshape(-1).tolist()), ()
    if "num_classes" in arrays:
        return numbered(_count(arrays["num_classes"], f"{path}: num_classes")), ()
    if request.classes is not None:
        return numbered(request.classes) if isinstance(request.classes, int) else request.classes, ()
    count = 1 + max((int(part.labels.max()) for part in parts if len(part)), default=0)
    if count > MAX_CLASSES:
        raise ValueError(f"{path}: label {count - 1}; labels must be 0 to {MAX_CLASSES - 1}")
    return numbered(count), (seen(count, path.name),)


def _count(array: NDArray[Any], name: str) -> int:
    if array.dtype.kind not in "iu" or array.size != 1 or not 1 <= int(array.reshape(-1)[0]) <= MAX_CLASSES:
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; it must be 1 number, 1 to {MAX_CLASSES}")
    return int(array.reshape(-1)[0])


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that the file has."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            present = set(archive.namelist())
            for name in names:
                if f"{name}.npy" in present:
                    with archive.open(f"{name}.npy") as file:
                        arrays[name] = _array(file, archive.getinfo(f"{name}.npy").file_size)
    except Exception as error:  # zip, its compressions and npy headers each fail in their own ways
        raise ValueError(f"{path} is not a readable npz file: {error}") from error
    return arrays


def _array(file: IO[bytes], size: int) -> NDArray[Any]:
    """One array. Its header is believed only if it accounts for every byte that follows."""
    version = npy.read_magic(file)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read_header is None:
        raise ValueError(f"an array is of npy version {version}; 1.0 and 2.0 are read")
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("an array holds pickled Python objects, which are never loaded; save plain numbers")
    expected, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if expected != held or min(shape, default=0) < 0:
        raise ValueError(f"an array announces shape {shape}, {expected} bytes, but holds {held}")
    data = file.read()
    if len(data) != expected:
        raise ValueError(f"an array breaks off after {len(data)} of {expected} bytes")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
