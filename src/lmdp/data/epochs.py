"""Ordinary epochs for training without privacy: shuffled anew each time, and able to go on in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """The rest of the epoch in which the next step lies.

    The order of an epoch follows from the seed and the epoch's number, so a run continued in mid-epoch sees what the
    uninterrupted one would have seen. `position` tells how many steps have been made.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.position: Callable[[], int] = lambda: 0

    def __len__(self) -> int:
        """Of a whole epoch."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        epoch, done = divmod(self.position(), -(-self.size // self.batch_size))
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return iter(order[done * self.batch_size :].tolist())
