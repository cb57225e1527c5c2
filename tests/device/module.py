"""`torch.pretend`: what PyTorch asks of a device in Python, as `torch.cuda` answers it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from tests.device import device as _device

Where = int | str | torch.device | None

_initialized = True  # gradient checkpointing asks, before it keeps a device's random state


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return _device.extension().DEVICES


def current_device() -> int:
    return _device.extension().current_device()


def set_device(where: Where) -> None:
    _device.extension().set_device(_index(where))


def synchronize(where: Where = None) -> None:
    """Nothing is ever outstanding; that somebody waited is counted."""
    with device(where):
        _device.extension().synchronize()


class device:
    """Makes a device the current one; a negative index changes nothing."""

    def __init__(self, where: Where) -> None:
        self._index = _index(where)

    def __enter__(self) -> None:
        self._before = current_device()
        if self._index >= 0:
            set_device(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        set_device(self._before)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(where: Where = "pretend") -> torch.Tensor:
    return default_generators[_index(where)].get_state()


def set_rng_state(state: torch.Tensor, where: Where = "pretend") -> None:
    default_generators[_index(where)].set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def _index(where: Where) -> int:
    if isinstance(where, int):
        return where
    index = None if where is None else torch.device(where).index
    return current_device() if index is None else index


default_generators = tuple(_device.extension().default_generator(i) for i in range(_device.extension().DEVICES))
