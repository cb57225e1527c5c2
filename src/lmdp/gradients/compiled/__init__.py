"""Compiled loops for what PyTorch has no fast operation for, on CPUs.

    linear_rows, patch_rows   per-example weight gradients with their norms, and per-example bias gradients
    patch_sums                two weighted sums of per-example weight gradients, which are formed but not kept
    on_grid                   sums with normal noise from random bits, rounded to a grid

In reading order:

    __init__    calls them, and finds the library
    bounds      what is checked before C gets a pointer
    kernels.c   structures, and the loops for every type of numbers and width of vectors
    width.h     the loops for one width
    loops.h     the loops of gradients
    grid.h      the loop of noise
    grid        what it computes, and how: by PyTorch too, and by intervals where double precision cannot tell
    rounds      many sums at a time
    parts       parts of them, as the whole would come out there
    far         the same on a device other than the host, which is waited for once

They are optional. Without a C compiler at installation, on other devices and for other types of numbers, the same
results come from PyTorch's operations. In the environment, LMDP_COMPILED=0 switches them off, and LMDP_KERNELS names
another library to load, as `make sanitize` does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmdp.gradients.compiled import bounds
from lmdp.gradients.compiled.bounds import Walk as Walk
from lmdp.gradients.compiled.bounds import channels_last as channels_last

SWITCH, KERNELS = "LMDP_COMPILED", "LMDP_KERNELS"
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
        *((name, _NUMBER) for name in ("batch", "outputs", "pixels", "positions", "runs", "length", "step")),
        *((name, _POINTER) for name in ("start", "pixel")),
        *((name, _NUMBER) for name in ("image", "frame", "rows", "width")),
        *((name, _POINTER) for name in ("row_from", "row_to")),
        *((name, _NUMBER) for name in ("positions_last", "past_cache", "threads", "room")),
    ]


class _Linear(ctypes.Structure):
    """As in `kernels.c`."""

    _fields_ = [
        (name, _NUMBER) for name in ("batch", "positions", "outputs", "inputs", "past_cache", "threads", "room")
    ]


class _OnGrid(ctypes.Structure):
    """As in `kernels.c`."""

    _fields_ = [
        ("count", _NUMBER),
        *((name, ctypes.c_double) for name in ("weight", "deviation", "step")),
        *((name, _NUMBER) for name in ("room", "threads")),
    ]


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
    dtype = tensors[0].dtype
    return vector_bytes() is not None and dtype in bounds.KINDS and all(bounds.plain(t, dtype) for t in tensors)


def linear_rows(x: Tensor, g: Tensor, blocks: list[slice], *, bias: bool) -> Formed:
    """Gradients [out · in] from inputs [B, T, in] and output gradients [B, T, out]."""
    x, g = x.contiguous(), g.contiguous()
    bounds.check_linear(x, g)
    batch, positions, inputs = x.shape
    outputs = g.shape[2]
    room = positions * (_rounded(inputs, PANEL_BYTES // x.element_size()) + _rounded(outputs, 8))
    past_cache = batch * inputs * outputs > IN_CACHE
    job = _Linear(batch, positions, outputs, inputs, past_cache, torch.get_num_threads(), room)
    return _formed("linear", job, x, g, blocks, outputs * inputs, bias)


def patch_rows(walk: Walk, x: Tensor, g: Tensor, blocks: list[slice], *, bias: bool) -> Formed:
    """Gradients [pixels · out] from images [B, …], as they are in memory, and output gradients [B, out, …].

    The memory of output gradients is in the order of their dimensions, or with the channels last.
    """
    job = _patches(walk, x, g)
    job.past_cache = len(x) * job.pixels * job.outputs > IN_CACHE
    return _formed("patches", job, x, g, blocks, job.pixels * job.outputs, bias)


def patch_sums(walk: Walk, x: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    """Both weighted sums [2, out, pixels] of the same gradients, under weights [2, B]."""
    job, weights = _patches(walk, x, g), weights.contiguous()
    bounds.check_weights(weights, x)
    scratch = _scratch("patches", job, x, parts=len(x))
    sums = x.new_empty(2, job.outputs, job.pixels)
    _function("patch_sums", x.dtype)(ctypes.byref(job), *map(_at, (x, g, weights, sums, scratch)))
    return sums


def _patches(walk: Walk, x: Tensor, g: Tensor) -> _Patches:
    bounds.check_images(walk, x, g)
    outputs, positions = g.shape[1], walk.positions
    frame = _rounded(walk.frame, _ALIGNED) if len(walk.rows_to) else 0
    room = frame + positions * _rounded(outputs, PANEL_BYTES // x.element_size())
    starts, pixels, row_from, row_to = (t.data_ptr() for t in (walk.starts, walk.pixels, walk.rows_from, walk.rows_to))
    return _Patches(
        *(len(x), outputs, len(walk.pixels), positions, len(walk.starts), walk.length, walk.step, starts, pixels),
        *(walk.image, frame, len(walk.rows_to), walk.width, row_from, row_to),
        *(g.is_contiguous(), False, torch.get_num_threads(), room),
    )


def on_grid(words: Tensor, sums: Tensor, out: Tensor, *, weight: float, deviation: float, step: float) -> Tensor:
    """Writes `sums` · weight + normal numbers · deviation, rounded to whole numbers, times `step`. All tensors are [n].

    Words int64 [2, pairs] give a radius and an angle for each pair of normal numbers. Returns the places, in no order,
    where double precision cannot tell which whole number is nearest: NaN is written there.
    """
    bounds.check_on_grid(words, sums, out)
    unsure = torch.empty(256, dtype=torch.int64, device="cpu")
    job = _OnGrid(out.numel(), weight, deviation, step, len(unsure), torch.get_num_threads())
    count = int(_function("on_grid", out.dtype)(ctypes.byref(job), *map(_at, (words, sums, out, unsure))))
    return unsure[:count] if count <= len(unsure) else out.isnan().nonzero().squeeze(1)


def _formed(
    name: str, job: _Linear | _Patches, x: Tensor, g: Tensor, blocks: list[slice], width: int, bias: bool
) -> Formed:
    """The gradients of a job, one block of examples after the other."""
    function, batch = _function(name, x.dtype), job.batch
    bounds.check_blocks(blocks, batch)
    job.threads = min(job.threads, max(block.stop - block.start for block in blocks))
    scratch = _scratch(name, job, x, parts=job.threads)
    norms = torch.empty(batch, dtype=torch.float64, device=x.device)
    biases = x.new_empty(batch, job.outputs) if bias else None
    gradients = []
    for block in blocks:
        job.batch = block.stop - block.start
        gradients.append(x.new_empty(job.batch, width))
        function(
            ctypes.byref(job),
            *(_at(t, block.start) for t in (x, g)),
            _at(gradients[-1]),
            None if biases is None else _at(biases, block.start),
            _at(norms, block.start),
            _at(scratch),
        )
    return Formed(tuple(gradients), norms, biases)


def _scratch(name: str, job: _Linear | _Patches, x: Tensor, *, parts: int) -> Tensor:
    """As many parts of `job.room` numbers, which is what the loops need at least."""
    scratch = x.new_empty(parts * job.room)
    bounds.check_scratch(scratch, parts, job.room, _function(f"{name}_room", x.dtype)(ctypes.byref(job)))
    return scratch


def _at(tensor: Tensor, row: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _function(name: str, kind: torch.dtype) -> Any:
    return _loaded(name, kind, vector_bytes())


@functools.cache
def _loaded(name: str, kind: torch.dtype, width: int) -> Any:
    function = getattr(_library(), f"lmdp_{name}_{bounds.KINDS[kind]}_{width}")
    function.restype = _NUMBER if name in ("on_grid", "patches_room", "linear_room") else None
    return function


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        return None
    if path := os.environ.get(KERNELS):
        return _agreeing(ctypes.CDLL(path))
    spec = importlib.util.find_spec("lmdp.gradients.compiled._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        return _agreeing(ctypes.CDLL(spec.origin))
    except OSError:
        return None


def _agreeing(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, if it was compiled for the structures that are handed to it."""
    sizes = [ctypes.sizeof(structure) for structure in (_Patches, _Linear, _OnGrid)]
    try:
        compiled_for = list((_NUMBER * len(sizes)).in_dll(library, "lmdp_structures"))
    except ValueError:
        compiled_for = []
    if compiled_for != sizes:
        raise RuntimeError(
            f"the compiled loops in {library._name} take structures of {compiled_for} bytes; this version of lmdp has "
            f"{sizes}. Install lmdp again, or set {SWITCH}=0 to do without them."
        )
    return library
