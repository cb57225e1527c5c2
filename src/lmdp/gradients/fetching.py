"""Numbers that wait on a device until they are fetched together: every transfer to the host holds a device up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Flag = bool | Tensor


class Fetching:
    """Flags of one training that nobody has read yet. Those on the host are read at once."""

    def __init__(self) -> None:
        self._flags: list[tuple[list[Tensor], Callable[[], object]]] = []

    def when(self, flags: Sequence[Flag], then: Callable[[], object]) -> None:
        """Call `then` if one of the flags is set; for flags on a device, with the next `read`."""
        far = [flag for flag in flags if isinstance(flag, Tensor) and not flag.is_cpu]
        if any(flag for flag in flags if isinstance(flag, bool) or flag.is_cpu):
            then()
        elif far:
            self._flags.append((far, then))

    def read(self, *numbers: Tensor) -> list[int]:
        """These whole numbers, and all flags that wait: one transfer from each device."""
        flags, self._flags = self._flags, []
        values = iter(_fetched([*numbers, *(flag for far, _ in flags for flag in far)]))
        wanted = [next(values) for _ in numbers]
        with contextlib.ExitStack() as every:  # all are called, also if one of them raises
            for far, then in flags:
                if sum(next(values) for _ in far):
                    every.callback(then)
        return wanted


def _fetched(numbers: Sequence[Tensor]) -> list[int]:
    """0-dim tensors as whole numbers, in their order."""
    if all(number.is_cpu for number in numbers):
        return [int(number) for number in numbers]
    values: dict[int, int] = {}
    for device in dict.fromkeys(number.device for number in numbers):
        at = [i for i, number in enumerate(numbers) if number.device == device]
        fetched: list[int] = torch.stack([numbers[i].to(torch.int64) for i in at]).tolist()
        values.update(zip(at, fetched))
    return [values[i] for i in range(len(numbers))]
