"""`svhn`: the cropped digits, two MATLAB files. The digit 0 is stored as label 10.

SciPy's reader of MATLAB files can crash the process on forged ones: only files whose SHA-256 is the published one get
to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmdp.data.download import fetch
from lmdp.data.images import Images, Source
from lmdp.data.official import REMOTES
from lmdp.data.request import Request


def read_svhn(request: Request) -> Source:
    train, test = (parse_mat(fetch(remote, request.folder, request.say)) for remote in REMOTES["svhn"])
    return Source(request.spec, train, test, tuple(str(digit) for digit in range(10)))


def parse_mat(path: Path) -> Images:
    x, y = _arrays(path)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3:
        raise ValueError(f"{path}: X is {x.dtype} of shape {x.shape}; it must be uint8 [H, W, 3, N]")
    if y.dtype.kind not in "iu" or y.size != x.shape[3] or (y.size and not (y.min() >= 1 and y.max() <= 10)):
        raise ValueError(f"{path}: y is {y.dtype} of shape {y.shape}; it must be {x.shape[3]} whole numbers, 1 to 10")
    labels = torch.tensor(y.reshape(-1).astype(np.int64) % 10)
    return Images(torch.tensor(np.ascontiguousarray(x.transpose(3, 2, 0, 1))), labels)


def _arrays(path: Path) -> tuple[Any, Any]:
    import scipy.io

    try:
        arrays = scipy.io.loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # the reader raises whatever a broken file makes it stumble over
        raise ValueError(
            f"{path} is not a readable MATLAB file ({error!r}). Delete it, and it is downloaded again."
        ) from error
    if "X" not in arrays or "y" not in arrays:
        raise ValueError(f"{path} lacks X or y; it is not a file of SVHN digits")
    return np.asarray(arrays["X"]), np.asarray(arrays["y"])
