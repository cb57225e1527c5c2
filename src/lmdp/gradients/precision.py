"""Full precision, for as long as a block lasts.

A Gram matrix or a sum made in bfloat16 or TF32 is off by a part in a thousand, and by any factor where terms cancel:
norms would come out too small. Users save time in the forward and backward pass in two ways: autocast, and settings
under which products of float32 numbers are made from fewer bits, as by torch.set_float32_matmul_precision("medium").
Both are put aside while a rule runs or sums are made, then restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

FULL = ("none", "ieee")


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context without autocast and without shortened products."""
    shortened = [setting for setting in _settings(device.type) if setting.fp32_precision not in FULL]
    if shortened or torch.is_autocast_enabled(device.type):
        return _restoring(device.type, shortened)
    return contextlib.nullcontext()


@functools.cache
def _settings(kind: str) -> Sequence[Any]:
    """Those that decide about the products made on this kind of device."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # torch before 2.9
        return [_Matmul(), _CudnnConvolution()] if kind == "cuda" else [_Matmul()]
    if kind == "cuda":
        return [backends.cuda.matmul, backends.cudnn.conv]
    return [backends.mkldnn.matmul, backends.mkldnn.conv]


@contextlib.contextmanager
def _restoring(kind: str, shortened: Sequence[Any]) -> Iterator[None]:
    before = [setting.fp32_precision for setting in shortened]
    for setting in shortened:
        setting.fp32_precision = "ieee"
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        for setting, value in zip(shortened, before):
            setting.fp32_precision = "none"  # as a more general setting has it
            if setting.fp32_precision != value:
                setting.fp32_precision = value


class _Matmul:
    """The one setting that older versions of torch have for products of matrices."""

    @property
    def fp32_precision(self) -> str:
        precision: str = torch.get_float32_matmul_precision()
        return "none" if precision == "highest" else precision

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision("highest" if value in FULL else value)


class _CudnnConvolution:
    """And the one for convolutions."""

    @property
    def fp32_precision(self) -> str:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "none"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.backends.cudnn.allow_tf32 = value not in FULL
