"""No pointer reaches the compiled loops unless all that they would read and write is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmdp.gradients import compiled, conv
from lmdp.gradients.compiled import Walk
from lmdp.gradients.conv import Geometry
from tests.conftest import WIDTHS

pytestmark = pytest.mark.skipif(not WIDTHS, reason="lmdp was installed without a C compiler")


def walk_of(padding: int, batch: int = 4) -> tuple[Walk, Tensor, Tensor]:
    """Of a convolution whose last position reads the last number of its frame."""
    x, g = torch.randn(batch, 2, 5, 6), torch.randn(batch, 3, 3 + 2 * padding, 4 + 2 * padding)
    return Geometry.of(nn.Conv2d(2, 3, 3, padding=padding), frozenset({"weight", "bias"}))._walked(x, g)


offsets = st.lists(st.integers(-1, 8), min_size=1, max_size=3)
rows = st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 16)), max_size=3)


@given(offsets, offsets, st.integers(1, 3), st.integers(0, 4), st.integers(0, 12), st.integers(0, 24), rows)
@settings(max_examples=500, deadline=None)
def test_a_walk_is_accepted_if_and_only_if_every_number_that_it_touches_is_there(
    pixels: list[int],
    starts: list[int],
    length: int,
    step: int,
    image: int,
    frame: int,
    rows: list[tuple[int, int]],
) -> None:
    """Offset by offset, as C goes through them."""
    width, frame = 3, frame if rows else image
    read = [pixel + start + t * step for pixel in pixels for start in starts for t in range(length)]
    copied_from, copied_to = ([row[side] + at for row in rows for at in range(width)] for side in (0, 1))
    inside = all(0 <= at < image for at in copied_from) and all(0 <= at < frame for at in read + copied_to)
    rows_from, rows_to = (torch.tensor([row[side] for row in rows], dtype=torch.int64) for side in (0, 1))
    with nullcontext() if inside else pytest.raises(ValueError, match="; the compiled loops need"):
        Walk(torch.tensor(pixels), torch.tensor(starts), length, step, image, frame, rows_from, rows_to, width)


def moved(tensor: Tensor, by: int) -> Tensor:
    """Of the extreme offset in this direction, one further."""
    at = tensor.argmax() if by > 0 else tensor.argmin()
    return tensor.index_add(0, at.view(1), torch.tensor([by]))


BAD_WALKS: dict[str, Callable[[Walk], dict[str, Any]]] = {
    "a pixel one too far": lambda w: {"pixels": moved(w.pixels, 1)},
    "a pixel before the first": lambda w: {"pixels": moved(w.pixels, -1)},
    "a run that starts one too late": lambda w: {"starts": moved(w.starts, 1)},
    "a run that starts before the first": lambda w: {"starts": moved(w.starts, -1)},
    "a run of one more": lambda w: {"length": w.length + 1},
    "a longer step": lambda w: {"step": w.step + 1},
    "a step back": lambda w: {"step": -1},
    "an empty run": lambda w: {"length": 0},
    "no runs": lambda w: {"starts": w.starts[:0]},
    "no pixels": lambda w: {"pixels": w.pixels[:0]},
    "a smaller frame": lambda w: {"frame": w.frame - 1},
    "offsets of 32 bits": lambda w: {"pixels": w.pixels.int()},
    "offsets with gaps": lambda w: {"pixels": torch.stack([w.pixels, w.pixels], 1)[:, 0]},
    "offsets in two dimensions": lambda w: {"starts": w.starts.view(1, -1)},
    "offsets elsewhere": lambda w: {"pixels": w.pixels.to("meta")},
}
BAD_ROWS: dict[str, Callable[[Walk], dict[str, Any]]] = {
    "a row past the end of the image": lambda w: {"rows_from": moved(w.rows_from, 1)},
    "a row before the image": lambda w: {"rows_from": moved(w.rows_from, -1)},
    "a row past the end of the frame": lambda w: {"rows_to": w.rows_to + w.frame - int(w.rows_to.max()) - w.width + 1},
    "a row before the frame": lambda w: {"rows_to": w.rows_to - int(w.rows_to.min()) - 1},
    "wider rows": lambda w: {"width": w.width + 1},
    "rows of negative width": lambda w: {"width": -1},
    "a smaller image": lambda w: {"image": w.image - 1},
    "a row too few to copy to": lambda w: {"rows_to": w.rows_to[1:]},
}


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("bad", BAD_WALKS)
def test_a_walk_that_leaves_its_frame_by_one_number_is_refused(bad: str, padding: int) -> None:
    walk, *_ = walk_of(padding)
    with pytest.raises(ValueError, match=r"of a walk.*; the compiled loops need"):
        replace(walk, **BAD_WALKS[bad](walk))


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_walk_whose_rows_leave_image_or_frame_by_one_number_is_refused(bad: str) -> None:
    walk, *_ = walk_of(1)
    with pytest.raises(ValueError, match=r"of a walk.*; the compiled loops need"):
        replace(walk, **BAD_ROWS[bad](walk))


def test_offsets_are_checked_once_per_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Walk] = []
    check = Walk.__post_init__
    monkeypatch.setattr(Walk, "__post_init__", lambda walk: (check(walk), checked.append(walk)))
    conv._walk.cache_clear()
    for batch in (4, 4, 7):
        walk_of(1, batch)
    assert len(checked) == 1


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(4)
    return tensor


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


BAD_IMAGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "another batch": lambda x, g: (x, g[:3]),
    "an empty batch": lambda x, g: (x[:0], g[:0]),
    "a row of pixels less": lambda x, g: (x[:, :, 1:].contiguous(), g),
    "a row of positions less": lambda x, g: (x, g[:, :, 1:].contiguous()),
    "a row of positions more": lambda x, g: (x, torch.cat([g, g[:, :, :1]], 2)),
    "images with gaps": lambda x, g: (with_gaps(x), g),
    "output gradients with gaps": lambda x, g: (x, with_gaps(g)),
    "one image for all": lambda x, g: (x[:1].expand_as(x), g),
    "turned output gradients": lambda x, g: (x, g.transpose(0, 1).contiguous().transpose(0, 1)),
    "output gradients in double": lambda x, g: (x, g.double()),
    "half precision": lambda x, g: (x.half(), g.half()),
    "whole numbers": lambda x, g: (x.long(), g.long()),
    "images elsewhere": lambda x, g: (x.to("meta"), g),
    "negated images": lambda x, g: (torch._neg_view(x), g),
    "images without a channel": lambda x, g: (x.flatten(1), g),
    "images whose memory is gone": lambda x, g: (freed(x), g),
    "output gradients whose memory is gone": lambda x, g: (x, freed(g)),
}


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("bad", BAD_IMAGES)
def test_images_and_output_gradients_that_do_not_fit_are_refused(bad: str, padding: int) -> None:
    walk, *fitting = walk_of(padding)
    x, g = BAD_IMAGES[bad](*fitting)
    blocks = [slice(0, len(x))]
    for call in (lambda: compiled.patch_rows(walk, x, g, blocks, bias=True), lambda: sums(walk, x, g)):
        with pytest.raises(ValueError, match="; the compiled loops need"):
            call()


def sums(walk: Walk, x: Tensor, g: Tensor) -> Tensor:
    return compiled.patch_sums(walk, x, g, torch.ones(2, len(x), dtype=x.dtype))


BAD_WEIGHTS: dict[str, Tensor] = {
    "of one example less": torch.ones(2, 3),
    "for one sum": torch.ones(1, 4),
    "for three sums": torch.ones(3, 4),
    "in double": torch.ones(2, 4, dtype=torch.float64),
    "elsewhere": torch.ones(2, 4, device="meta"),
    "in one dimension": torch.ones(8),
    "whose memory is gone": freed(torch.ones(2, 4)),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_weights_that_do_not_fit_the_batch_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"weights of a batch.*; the compiled loops need"):
        compiled.patch_sums(*walk_of(1), BAD_WEIGHTS[bad])


BAD_LINEAR: dict[str, tuple[Tensor, Tensor]] = {
    "another batch": (torch.ones(4, 5, 6), torch.ones(3, 5, 7)),
    "an empty batch": (torch.ones(0, 5, 6), torch.ones(0, 5, 7)),
    "a position more": (torch.ones(4, 5, 6), torch.ones(4, 6, 7)),
    "no positions": (torch.ones(4, 6), torch.ones(4, 7)),
    "another type": (torch.ones(4, 5, 6), torch.ones(4, 5, 7, dtype=torch.float64)),
    "half precision": (torch.ones(4, 5, 6).half(), torch.ones(4, 5, 7).half()),
    "elsewhere": (torch.ones(4, 5, 6), torch.ones(4, 5, 7, device="meta")),
    "whose memory is gone": (torch.ones(4, 5, 6), freed(torch.ones(4, 5, 7))),
}


@pytest.mark.parametrize("bad", BAD_LINEAR)
def test_inputs_and_output_gradients_of_a_linear_layer_that_do_not_fit_are_refused(bad: str) -> None:
    x, g = BAD_LINEAR[bad]
    with pytest.raises(ValueError, match="; the compiled loops need"):
        compiled.linear_rows(x, g, [slice(0, len(x))], bias=True)


BAD_BLOCKS: dict[str, list[slice]] = {
    "a gap": [slice(0, 1), slice(2, 4)],
    "an overlap": [slice(0, 2), slice(1, 4)],
    "a late start": [slice(1, 4)],
    "an early end": [slice(0, 2), slice(2, 3)],
    "one example too many": [slice(0, 5)],
    "an empty block": [slice(0, 2), slice(2, 2), slice(2, 4)],
    "a block that runs back": [slice(0, 3), slice(3, 2), slice(2, 4)],
    "another order": [slice(2, 4), slice(0, 2)],
    "every other example": [slice(0, 4, 2)],
    "nothing": [],
}


@pytest.mark.parametrize("bad", BAD_BLOCKS)
def test_blocks_that_do_not_hold_every_example_once_and_in_order_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"block of examples.*; the compiled loops need"):
        compiled.patch_rows(*walk_of(1), BAD_BLOCKS[bad], bias=True)
    with pytest.raises(ValueError, match=r"block of examples.*; the compiled loops need"):
        compiled.linear_rows(torch.ones(4, 5, 6), torch.ones(4, 5, 7), BAD_BLOCKS[bad], bias=False)


@pytest.mark.parametrize("width", WIDTHS)
def test_scratch_memory_that_is_too_small_for_the_panels_of_the_loops_is_refused(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "vector_bytes", lambda: width)
    monkeypatch.setattr(compiled, "PANEL_BYTES", 4)
    walk, x, g = walk_of(1)
    for call in (
        lambda: compiled.patch_rows(walk, x, g, [slice(0, 4)], bias=True),
        lambda: sums(walk, x, g),
        lambda: compiled.linear_rows(torch.ones(4, 5, 7), torch.ones(4, 5, 7), [slice(0, 4)], bias=True),
    ):
        with pytest.raises(ValueError, match=r"scratch memory of a thread: \d+; the compiled loops need \d+ numbers"):
            call()


def test_scratch_memory_for_too_few_threads_is_refused() -> None:
    compiled.bounds.check_scratch(torch.empty(30), 3, 10, 10)
    with pytest.raises(ValueError, match="scratch memory: 29; the compiled loops need 3 × 10 numbers"):
        compiled.bounds.check_scratch(torch.empty(29), 3, 10, 10)


BAD_ON_GRID: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "a word too few": lambda words, a, b: (words[:-1], a, b),
    "a word too many": lambda words, a, b: (torch.cat([words, words[:1]]), a, b),
    "words of 32 bits": lambda words, a, b: (words.int(), a, b),
    "words with gaps": lambda words, a, b: (with_gaps(words), a, b),
    "a sum too few": lambda words, a, b: (words, a[:-1], b),
    "a result too few": lambda words, a, b: (words, a, b[:-1]),
    "sums of another type": lambda words, a, b: (words, a.double(), b),
    "half precision": lambda words, a, b: (words, a.half(), b.half()),
    "sums with gaps": lambda words, a, b: (words, with_gaps(a), b),
    "one sum for all": lambda words, a, b: (words, a[:1].expand(199), b),
    "results with gaps": lambda words, a, b: (words, a, with_gaps(b)),
    "sums and results in one place": lambda words, a, b: (words, a, a),
    "memory that overlaps": lambda words, a, b: (words, *halves(torch.empty(397))),
    "the memory of the words": lambda words, a, b: (words, words.view(torch.float32)[201:], b),
    "sums whose memory is gone": lambda words, a, b: (words, freed(a), b),
    "results whose memory is gone": lambda words, a, b: (words, a, freed(b)),
    "words elsewhere": lambda words, a, b: (words.to("meta"), a, b),
}


def halves(room: Tensor) -> tuple[Tensor, Tensor]:
    return room[:199], room[-199:]


@pytest.mark.parametrize("bad", BAD_ON_GRID)
def test_words_sums_and_results_that_do_not_fit_each_other_are_refused(bad: str) -> None:
    words, *fitting = torch.full((200,), 2**50), *halves(torch.zeros(398))
    assert not len(compiled.on_grid(words, *fitting, weight=1.0, deviation=2.0**18, step=1.0))
    words, *fitting = BAD_ON_GRID[bad](words, *fitting)
    with pytest.raises(ValueError, match="; the compiled loops need"):
        compiled.on_grid(words, *fitting, weight=1.0, deviation=2.0**18, step=1.0)


def test_a_library_that_was_compiled_for_other_structures_is_refused_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="Install lmdp again, or set LMDP_COMPILED=0"):
        compiled._agreeing(ctypes.CDLL(None))
