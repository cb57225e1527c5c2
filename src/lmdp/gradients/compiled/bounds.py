"""What must be true of memory before the loops get a pointer to it: C checks nothing.

    Walk      once per geometry, when it is made: every offset that a convolution reads or writes at
    check_*   at every call: comparisons of a few numbers

Whatever does not hold is a ValueError, before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

KINDS = {torch.float32: "float", torch.float64: "double"}
"""Types of numbers that there are loops for, and their names in C."""


@dataclass(frozen=True)
class Walk:
    """How a convolution reads an image: offsets, in numbers, into the frame that padding makes around the image.

    `pixels`: of what each weight of one output multiplies. `starts`: of each run of output positions, which has
    `length` of them, `step` apart. `rows_from`, `rows_to`: of each row of `width` numbers, in the image and in the
    frame; none without padding. `image` and `frame` are how many numbers there are: all of this lies in them, so
    nothing may be written to the offsets later.
    """

    pixels: Tensor
    starts: Tensor
    length: int
    step: int
    image: int
    frame: int
    rows_from: Tensor
    rows_to: Tensor
    width: int

    def __post_init__(self) -> None:
        for name in ("pixels", "starts", "rows_from", "rows_to"):
            offsets = getattr(self, name)
            if not plain(offsets, torch.int64) or offsets.dim() != 1 or not offsets.is_contiguous():
                _refuse(f"{name} of a walk", _described(offsets), "int64 [n], contiguous, on the CPU")
        counts = {"pixels": len(self.pixels), "starts": len(self.starts), "length": self.length, "width": self.width}
        for name, count in counts.items():
            if count < 1:
                _refuse(f"{name} of a walk", count, "1 or more")
        if self.step < 0:
            _refuse("step of a walk", self.step, "0 or more")
        if len(self.rows_from) != len(self.rows_to):
            _refuse("rows_to of a walk", len(self.rows_to), f"{len(self.rows_from)}, as many as rows_from")
        if not len(self.rows_to) and self.frame != self.image:
            _refuse("frame of a walk without padding", self.frame, f"{self.image}, the image")
        run = (self.length - 1) * self.step + 1
        first = int(self.pixels.min()) + int(self.starts.min())
        last = int(self.pixels.max()) + int(self.starts.max())
        _check_span("runs, from pixels and starts,", first, last + run, self.frame)
        if len(self.rows_to):
            _check_span("rows_from", int(self.rows_from.min()), int(self.rows_from.max()) + self.width, self.image)
            _check_span("rows_to", int(self.rows_to.min()), int(self.rows_to.max()) + self.width, self.frame)

    @cached_property
    def positions(self) -> int:
        return len(self.starts) * self.length


def plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the numbers of a tensor are of this type, and lie in memory as its strides say."""
    kind = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_neg()
    return kind and tensor.dtype is dtype and tensor.is_cpu


def channels_last(tensor: Tensor) -> bool:
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.movedim(1, -1).is_contiguous()


def check_images(walk: Walk, x: Tensor, g: Tensor) -> None:
    """Images [B, …] of the walk's size and output gradients [B, out, …] of its positions, of one type.

    Either in the order of their dimensions, or with the channels last.
    """
    if x.dim() < 3 or g.dim() < 3:
        _refuse("images and output gradients", f"{list(x.shape)}, {list(g.shape)}", "[B, in, …], [B, out, …]")
    _check_numbers("images", x, x.dtype, x.is_contiguous() or channels_last(x))
    _check_numbers("output gradients", g, x.dtype, g.is_contiguous() or channels_last(g))
    batch, (examples, outputs, *_) = x.shape[0], g.shape
    if examples != batch or not batch:
        _refuse("examples of output gradients", examples, f"{batch}, as of images, and 1 or more")
    if x.numel() != batch * walk.image:
        _refuse("numbers of an image", x.numel() // batch, f"{walk.image}, as the walk has")
    if g.numel() != batch * outputs * walk.positions:
        _refuse("positions of output gradients", list(g.shape[2:]), f"{walk.positions}, as the walk has")


def check_linear(x: Tensor, g: Tensor) -> None:
    """Inputs [B, T, in] and output gradients [B, T, out], contiguous, of one type."""
    _check_numbers("inputs", x, x.dtype, x.is_contiguous())
    _check_numbers("output gradients", g, x.dtype, g.is_contiguous())
    of_x, of_g = x.shape, g.shape
    if len(of_x) != 3 or len(of_g) != 3 or of_x[0] != of_g[0] or of_x[1] != of_g[1] or not of_x[0]:
        _refuse("inputs and output gradients", f"{list(x.shape)}, {list(g.shape)}", "[B, T, in], [B, T, out]")


def check_weights(weights: Tensor, x: Tensor) -> None:
    """Weights [2, B], contiguous, of the images' type."""
    if weights.shape != (2, x.shape[0]):
        _refuse("weights of a batch", list(weights.shape), [2, x.shape[0]])
    _check_numbers("weights of a batch", weights, x.dtype, weights.is_contiguous())


def check_blocks(blocks: Sequence[slice], batch: int) -> None:
    """From the first example to the last, in order, each in one block."""
    end = 0
    for block in blocks:
        if block.start != end or block.stop <= end or block.step not in (None, 1):
            _refuse("block of examples", block, f"one that begins with {end}, and is not empty")
        end = block.stop
    if end != batch:
        _refuse("last block of examples ends with", end, f"{batch}, the batch")


def check_scratch(scratch: Tensor, parts: int, room: int, needed: int) -> None:
    """For as many parts of `room` numbers, of which the loops use `needed`."""
    if room < needed:
        _refuse("scratch memory of a thread", room, f"{needed} numbers")
    if scratch.numel() < parts * room:
        _refuse("scratch memory", scratch.numel(), f"{parts} × {room} numbers")


def check_on_grid(words: Tensor, sums: Tensor, out: Tensor) -> None:
    """Words int64 [2 · pairs]; sums and results [n] of one type. None overlaps another: C assumes so."""
    _check_numbers("results", out, out.dtype, out.is_contiguous())
    _check_numbers("sums", sums, out.dtype, sums.is_contiguous())
    _check_memory("random words", words, torch.int64, words.is_contiguous())
    numbers, count = out.numel(), words.numel()
    if sums.numel() != numbers:
        _refuse("sums", sums.numel(), f"{numbers}, as many as results")
    if count != numbers + numbers % 2:
        _refuse("random words", count, f"2 for each pair of {numbers} numbers")
    low, middle, high = sorted((words, sums, out), key=Tensor.data_ptr)
    if low.data_ptr() + low.nbytes > middle.data_ptr() or middle.data_ptr() + middle.nbytes > high.data_ptr():
        _refuse("random words, sums and results", "overlapping", "memory of its own for each")


def _check_numbers(name: str, tensor: Tensor, dtype: torch.dtype, dense: bool) -> None:
    if dtype not in KINDS:
        _refuse(f"type of {name}", dtype, " or ".join(map(str, KINDS)))
    _check_memory(name, tensor, dtype, dense)


def _check_memory(name: str, tensor: Tensor, dtype: torch.dtype, dense: bool) -> None:
    if not plain(tensor, dtype):
        _refuse(name, _described(tensor), f"a plain tensor of {dtype} on the CPU")
    if not dense:
        _refuse(f"strides of {name}", tensor.stride(), f"those of a dense tensor of {list(tensor.shape)}")
    held = tensor.untyped_storage().nbytes() // tensor.element_size()  # none, if somebody has freed it
    if held < tensor.storage_offset() + tensor.numel():
        _refuse(f"storage of {name}", held, f"{tensor.numel()} numbers from {tensor.storage_offset()} on")


def _check_span(name: str, begin: int, end: int, size: int) -> None:
    if begin < 0 or end > size:
        _refuse(f"{name} of a walk", f"numbers {begin} to {end}", f"0 to {size}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}, {type(tensor).__name__}"


def _refuse(thing: str, value: object, bound: object) -> None:
    raise ValueError(f"{thing}: {value}; the compiled loops need {bound}")
