"""Compiled loops for what PyTorch has no fast operation for, on CPUs: see `kernels.c` and `loops.h`.

    linear_rows, patch_rows   per-example weight gradients with their norms, and per-example bias gradients
    patch_sums                two weighted sums of per-example weight gradients, which are formed but not kept
    normal_pairs              normal numbers from random bits

They are optional. Without a C compiler at installation, on other devices and for other types of numbers, the same
results come from PyTorch's operations. LMDP_COMPILED=0 in the environment switches them off.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SWITCH = "LMDP_COMPILED"
_KINDS = {torch.float32: "float", torch.float64: "double"}
_ALIGNED = 16
"""Numbers to which parts of scratch memory are rounded up."""

PANEL_BYTES = 128
"""Of the widest panel."""

IN_CACHE = 2**22
"""Numbers that stay in cache until they are read again; more are written past it."""


_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Patches(ctypes.Structure):
    """As in `kernels.c`."""

    _fields_ = [
        *((name, _NUMBER) for name in ("batch", "outputs", "taps", "positions", "runs", "length", "step")),
        *((name, _POINTER) for name in ("start", "tap")),
        *((name, _NUMBER) for name in ("image", "frame", "rows", "width")),
        *((name, _POINTER) for name in ("row_from", "row_to")),
        *((name, _NUMBER) for name in ("positions_last", "past_cache", "threads", "room")),
    ]


class _Linear(ctypes.Structure):
    """As in `kernels.c`."""

    _fields_ = [
        (name, _NUMBER) for name in ("batch", "positions", "outputs", "inputs", "past_cache", "threads", "room")
    ]


@dataclass(frozen=True)
class Walk:
    """How a convolution reads an image: offsets, in numbers, into the frame that padding makes around the image.

    `taps`: of each weight of one output. `starts`: of each run of output positions, which has `length` of them, `step`
    apart. `rows_from`, `rows_to`: of each row of `width` numbers, in the image and in the frame; none without padding.
    """

    taps: Tensor
    starts: Tensor
    length: int
    step: int
    frame: int
    rows_from: Tensor
    rows_to: Tensor
    width: int


@dataclass(frozen=True)
class Formed:
    """Weight gradients of successive examples in blocks [b, D], their squared norms [B]; bias gradients [B, out]."""

    blocks: tuple[Tensor, ...]
    squared_norms: Tensor
    bias: Tensor | None


@functools.cache
def vector_bytes() -> int | None:
    """Width of the vectors that the loops work on here; none if they are not used."""
    library = _library()
    return None if library is None else int(library.lmdp_vector_bytes())


def description() -> str:
    width = vector_bytes()
    if width is not None:
        return f"inner loops: compiled, for vectors of {width} bytes"
    if os.environ.get(SWITCH) == "0":
        return f"inner loops: PyTorch ({SWITCH}=0)"
    return "inner loops: PyTorch (to compile them, which is faster, install lmdp again where there is a C compiler)"


def applies(*tensors: Tensor) -> bool:
    """Whether the loops take these: plain tensors of one type, in memory."""
    first = tensors[0]
    return vector_bytes() is not None and first.dtype in _KINDS and all(_plain(t, first.dtype) for t in tensors)


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    kind = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_neg()
    return kind and tensor.dtype == dtype and tensor.device.type == "cpu"


def linear_rows(x: Tensor, g: Tensor, blocks: list[slice], *, bias: bool) -> Formed:
    """Gradients [out · in] from inputs [B, T, in] and output gradients [B, T, out]."""
    x, g = x.contiguous(), g.contiguous()
    (positions, inputs), outputs = x.shape[1:], g.shape[2]
    room = positions * (_rounded(inputs, PANEL_BYTES // x.element_size()) + _rounded(outputs, 8))
    past_cache = len(x) * inputs * outputs > IN_CACHE

    def struct(batch: int, threads: int) -> _Linear:
        return _Linear(batch, positions, outputs, inputs, past_cache, threads, room)

    return _formed("linear", x, g, struct, blocks, outputs * inputs, outputs if bias else 0, room)


def patch_rows(walk: Walk, x: Tensor, g: Tensor, blocks: list[slice], *, bias: bool) -> Formed:
    """Gradients [taps · out] from images [B, …], as they are in memory, and output gradients [B, out, …].

    The memory of output gradients is in the order of their dimensions, or with the channels last.
    """
    outputs, taps = g.shape[1], len(walk.taps)
    past_cache = len(x) * taps * outputs > IN_CACHE

    def struct(batch: int, threads: int) -> _Patches:
        return _patches(walk, x, g, batch, threads, past_cache)

    return _formed("patches", x, g, struct, blocks, taps * outputs, outputs if bias else 0, struct(1, 1).room)


def patch_sums(walk: Walk, x: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    """Both weighted sums [2, out, taps] of the same gradients, under weights [2, B]."""
    struct = _patches(walk, x, g, len(x), torch.get_num_threads(), False)
    scratch, weights = x.new_empty(len(x) * struct.room), weights.contiguous()
    sums = x.new_empty(2, g.shape[1], len(walk.taps))
    _function("patch_sums", x.dtype)(ctypes.byref(struct), *map(_at, (x, g, weights, sums, scratch)))
    return sums


def _patches(walk: Walk, x: Tensor, g: Tensor, batch: int, threads: int, past_cache: bool) -> _Patches:
    outputs, positions = g.shape[1], g.shape[2:].numel()
    frame = _rounded(walk.frame, _ALIGNED) if len(walk.rows_to) else 0
    room = frame + positions * _rounded(outputs, PANEL_BYTES // x.element_size())
    starts, taps, row_from, row_to = (t.data_ptr() for t in (walk.starts, walk.taps, walk.rows_from, walk.rows_to))
    return _Patches(
        *(batch, outputs, len(walk.taps), positions, len(walk.starts), walk.length, walk.step, starts, taps),
        *(x[0].numel(), frame, len(walk.rows_to), walk.width, row_from, row_to),
        *(g.is_contiguous(), past_cache, threads, room),
    )


def normal_pairs(words: Tensor, std: float, first: Tensor, second: Tensor) -> bool:
    """Box–Muller: from words int64 [2, pairs] to normal numbers [pairs] each.

    False if there is a uniform number so small that it needs more bits: what was written is then not to be used.
    """
    normal = _function("normal", first.dtype)
    small = normal(_at(words), len(first), std, _at(first), _at(second), torch.get_num_threads())
    return int(small) == 0


def _formed(
    name: str,
    x: Tensor,
    g: Tensor,
    struct: Callable[[int, int], ctypes.Structure],
    blocks: list[slice],
    width: int,
    bias_width: int,
    room: int,
) -> Formed:
    threads = min(torch.get_num_threads(), max(b.stop - b.start for b in blocks))
    function = _function(name, x.dtype)
    scratch = x.new_empty(threads * room)
    norms = torch.empty(len(x), dtype=torch.float64, device=x.device)
    bias = x.new_empty(len(x), bias_width) if bias_width else None
    kept = []
    for some in blocks:
        count = some.stop - some.start
        block = x.new_empty(count, width)
        function(
            ctypes.byref(struct(count, threads)),
            *(_at(t, some.start) for t in (x, g)),
            _at(block),
            None if bias is None else _at(bias, some.start),
            _at(norms, some.start),
            _at(scratch),
        )
        kept.append(block)
    return Formed(tuple(kept), norms, bias)


def _at(tensor: Tensor, row: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _function(name: str, kind: torch.dtype) -> Any:
    return _loaded(f"lmdp_{name}_{_KINDS[kind]}_{vector_bytes()}")


@functools.cache
def _loaded(name: str) -> Any:
    function = getattr(_library(), name)
    normal = "normal" in name
    function.restype = _NUMBER if normal else None
    if normal:
        function.argtypes = [_POINTER, _NUMBER, ctypes.c_double, _POINTER, _POINTER, _NUMBER]
    return function


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        return None
    found = importlib.util.find_spec("lmdp.gradients.compiled._kernels")
    if found is None or found.origin is None:
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:
        return None
