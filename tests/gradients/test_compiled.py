"""The compiled loops: what PyTorch computes, to rounding, for every width of vectors; no memory beyond theirs."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lmdp.gradients import compiled, conv
from lmdp.gradients.compiled import Formed, linear_rows
from lmdp.gradients.conv import Geometry
from lmdp.gradients.rows import Rows, Stored, dot_product, kept_blocks
from lmdp.private.keystream import KeyStream
from lmdp.private.noise import Seeded
from tests.conftest import WIDTHS
from tests.private.probe import draw

pytestmark = pytest.mark.skipif(not WIDTHS, reason="lmdp was installed without a C compiler")
widths = pytest.mark.parametrize("width", WIDTHS)
SINGLE = 2.0**-24


@pytest.fixture(autouse=True)
def _width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "width" in request.fixturenames:
        chosen = request.getfixturevalue("width")
        monkeypatch.setattr(compiled, "vector_bytes", lambda: chosen)


def exact(x: Tensor, g: Tensor) -> Tensor:
    return torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_where_there_is_a_compiler_the_loops_are_compiled() -> None:
    assert compiled.vector_bytes() in (16, 32, 64)


def test_the_environment_can_switch_them_off() -> None:
    code = "from lmdp.gradients import compiled; print(compiled.vector_bytes())"
    run, env = [sys.executable, "-c", code], os.environ | {"LMDP_COMPILED": "0"}
    assert subprocess.run(run, env=env, capture_output=True, text=True).stdout == "None\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    batch=st.integers(1, 5),
    positions=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 192])),
    outputs=st.integers(1, 40),
    width=st.sampled_from(WIDTHS or [0]),
    past_cache=st.booleans(),
    block=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_linear_rows_of_any_size(
    batch: int, positions: int, inputs: int, outputs: int, width: int, past_cache: bool, block: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(batch, positions, inputs, dtype=dtype), torch.randn(batch, positions, outputs, dtype=dtype)
    blocks = [slice(start, min(start + block, batch)) for start in range(0, batch, block)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "vector_bytes", lambda: width)
        patch.setattr(compiled, "IN_CACHE", 0 if past_cache else 2**40)
        formed = linear_rows(x, g, blocks, bias=True)
    assert [len(rows) for rows in formed.blocks] == [block.stop - block.start for block in blocks]
    rows, wanted, bound = torch.cat(formed.blocks), exact(x, g), (positions + 1) * torch.finfo(dtype).eps
    assert formed.bias is not None
    assert ((rows - wanted).abs() <= bound * exact(x.abs(), g.abs())).all()
    assert ((formed.bias - g.double().sum(1)).abs() <= bound * g.double().abs().sum(1)).all()
    norms = rows.double().square().sum(1)
    # Squares of a block are added in vectors; the sums of all blocks, one after the other in double precision.
    in_turn = math.ceil(outputs / 8) * math.ceil(inputs * x.element_size() / width)
    rounding = 8 * torch.finfo(dtype).eps + in_turn * torch.finfo(torch.float64).eps
    assert ((formed.squared_norms - norms).abs() <= rounding * norms).all()


SHAPES = {
    "full panels": (nn.Conv2d(3, 128, 3, padding=1), (5, 4)),
    "3x3": (nn.Conv2d(5, 33, 3, padding=1), (7, 9)),
    "strided": (nn.Conv2d(3, 16, 5, stride=2, padding=2), (11, 12)),
    "1x1": (nn.Conv2d(9, 40, 1), (6, 5)),
    "grouped": (nn.Conv2d(8, 12, 3, groups=4, padding=1), (6, 6)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6, padding=1), (8, 8)),
    "reflected": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (6, 6)),
    "dilated": (nn.Conv2d(2, 3, 3, dilation=2, padding=(2, 0)), (8, 9)),
    "1d": (nn.Conv1d(3, 20, 4, stride=3, padding=1), (23,)),
    "3d": (nn.Conv3d(2, 5, (2, 3, 2), padding=(1, 0, 1)), (4, 5, 6)),
    "same": (nn.Conv1d(3, 4, 3, padding="same"), (9,)),
}


def formed_and_unfolded(module: nn.Module, x: Tensor, last: bool) -> tuple[Stored, Stored]:
    """By the compiled loop, and by PyTorch in double precision."""
    with torch.no_grad():
        g = torch.randn_like(module(x.float())).to(x.dtype)
    if last:
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    geometry = Geometry.of(module, frozenset({"weight", "bias"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "vector_bytes", lambda: None)
        reference = geometry.form(x.double(), g.double())
    return geometry.form(x, g), reference


@widths
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_convolutions_of_every_kind(
    kind: str, past_cache: bool, dtype: torch.dtype, last: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(compiled, "IN_CACHE", 0 if past_cache else 2**40)
    module, size = SHAPES[kind]
    x = torch.randn(7, module.in_channels, *size, dtype=dtype)
    formed, reference = formed_and_unfolded(module, x, last)
    eps = torch.finfo(dtype).eps
    for name, wanted in reference.per_example().items():
        gradients = formed.per_example()[name]
        assert gradients.shape == wanted.shape == (7, *module.get_parameter(name).shape)
        assert (gradients - wanted).abs().max() <= 50 * eps * wanted.abs().max()
        assert ((formed.squared_norms[name] / reference.squared_norms[name]) - 1).abs().max() <= 50 * eps


def rows(x: Tensor, g: Tensor) -> Formed:
    return linear_rows(x, g, kept_blocks(len(x), x.shape[2] * g.shape[2]), bias=True)


def flat(formed: Formed) -> Tensor:
    assert formed.bias is not None
    return torch.cat([torch.cat(formed.blocks), formed.bias, formed.squared_norms.unsqueeze(1)], dim=1)


@widths
def test_an_example_has_the_same_gradient_to_the_bit_in_any_batch_and_on_any_number_of_threads(width: int) -> None:
    torch.manual_seed(2)
    x, g = torch.randn(37, 11, 50), torch.randn(37, 11, 21)
    alone = torch.cat([flat(rows(x[i : i + 1], g[i : i + 1])) for i in range(37)])
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(flat(rows(x, g)), alone)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@widths
@pytest.mark.parametrize("kind", SHAPES)
def test_rows_and_sums_of_convolutions_are_the_same_on_any_number_of_threads(kind: str, width: int) -> None:
    """Threads share no memory that they write to."""
    torch.manual_seed(6)
    module, size = SHAPES[kind]
    x = torch.randn(64, module.in_channels, *size)
    with torch.no_grad():
        g = torch.randn_like(module(x))
    geometry = Geometry.of(module, frozenset({"weight", "bias"}))
    scales = torch.rand(2, 64)

    def everything() -> Tensor:
        formed = geometry.form(x, g)
        results = [*formed.per_example().values(), *formed.squared_norms.values()]
        if module.groups == 1:  # sums of the others are PyTorch's
            results += [value for sums in geometry.contract(x, g, scales) for value in sums.values()]
        return torch.cat([t.double().flatten() for t in results])

    alone = everything()
    for count in (2, 5):
        with threads(count):
            for _ in range(3):
                assert torch.equal(everything(), alone)


@widths
@pytest.mark.parametrize("size", [(2048,), (40, 50)])
def test_two_sums_over_many_positions_do_not_exceed_the_norm_that_clipped_them(
    size: tuple[int, ...], width: int
) -> None:
    """All terms are alike, so that every rounding goes the same way."""
    module = (nn.Conv1d if len(size) == 1 else nn.Conv2d)(1, 16, 1)
    geometry = Geometry.of(module, frozenset({"weight"}))
    for value in torch.rand(8, generator=torch.Generator().manual_seed(7)).add(1).tolist():
        x, g = torch.ones(1, 1, *size), torch.full((1, 16, *size), value)
        norm = geometry.gram_norms([(x, g)]).sqrt()
        for sums in geometry.contract(x, g, torch.ones(2, 1)):
            assert float(sums["weight"].double().norm()) <= float(norm) * (1 + 2e-6)


@widths
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "g"])
def test_what_is_not_finite_stays_with_its_example(bad: float, where: str, width: int) -> None:
    torch.manual_seed(3)
    x, g = torch.randn(6, 9, 10), torch.randn(6, 9, 7)
    clean = flat(rows(x, g))
    {"x": x, "g": g}[where][2, 4, 3] = bad
    formed = rows(x, g)
    others = torch.arange(6) != 2
    assert torch.equal(flat(formed)[others], clean[others])
    assert not torch.isfinite(formed.squared_norms[2])


@widths
def test_rows_in_many_blocks_are_summed_like_rows_in_one(width: int) -> None:
    torch.manual_seed(4)
    x, g = torch.randn(23, 6, 12), torch.randn(23, 6, 5)
    weights = torch.rand(2, 23, dtype=torch.float64)
    wanted = weights @ exact(x, g)
    for size in (1, 4, 23):
        blocks = [slice(start, min(start + size, 23)) for start in range(0, 23, size)]
        formed = linear_rows(x, g, blocks, bias=False)
        sums = Rows(formed.blocks, formed.squared_norms, lambda flat: flat).weighted_sums(weights)
        assert (torch.stack(sums) - wanted).abs().max() <= 40 * SINGLE * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dot_products_are_of_all_entries_in_double_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    a, b = torch.rand(2, 7, 3 * 2**13, dtype=torch.float64).to(dtype)
    product = dot_product(a, b.flip(0).flip(0))
    assert product.dtype == torch.float64
    assert float(product) == pytest.approx(float((a.double() * b.double()).sum()), rel=1e-6)
    assert float(dot_product(a[:0], b[:0])) == 0


@pytest.mark.parametrize(("batch", "weights"), [(1, 10), (3, 2**22), (64, 2**17), (600, 1024), (257, 9)])
def test_blocks_cover_the_batch_once(batch: int, weights: int) -> None:
    blocks = kept_blocks(batch, weights)
    assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(batch))


@widths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 15, 2047, 2048, 2049, 10_001])
def test_nothing_is_written_beyond_the_numbers_asked_for(count: int, dtype: torch.dtype, width: int) -> None:
    room, sums = torch.full((count + 64,), 77.0, dtype=dtype), torch.zeros(count, dtype=dtype)
    words = KeyStream(bytes(32)).words(count + count % 2)
    compiled.on_grid(words, sums, room[32:-32], weight=1.0, deviation=2.0**18, step=2.0**-18)
    assert (room[:32] == 77).all()
    assert (room[-32:] == 77).all()
    assert (room[32:-32] != 77).all()


@widths
@pytest.mark.parametrize("unsure", [0, 3, 256, 257, 5000])
def test_all_places_are_named_where_double_precision_does_not_tell(unsure: int, width: int) -> None:
    words, sums, out = torch.full((10_000,), 2**50), torch.zeros(10_000), torch.empty(10_000)
    at = torch.randperm(5000)[:unsure]
    words[at] = 2**40  # a radius that asks for more bits: both numbers of its pair do
    named = compiled.on_grid(words, sums, out, weight=1.0, deviation=2.0**18, step=2.0**-18)
    assert sorted(named.tolist()) == sorted([*at.tolist(), *(at + 5000).tolist()])
    assert torch.equal(out.isnan().nonzero().squeeze(1), named.sort().values)


def test_other_devices_and_types_are_left_to_pytorch() -> None:
    single = torch.ones(2)
    assert compiled.applies(single, single)
    assert not compiled.applies(single, single.double())
    assert not compiled.applies(single.half())
    assert not compiled.applies(single.bfloat16())
    assert not compiled.applies(single.to("meta"))
    assert not compiled.applies(single.to_sparse())
    assert not compiled.applies(torch._neg_view(single))
    assert not compiled.applies(single.as_subclass(Subclass))
    with FakeTensorMode():
        assert not compiled.applies(torch.ones(2))


class Subclass(Tensor):
    pass


def test_another_default_device_changes_nothing() -> None:
    torch.manual_seed(8)
    x, g = torch.randn(3, 2, 5, 5), torch.randn(3, 4, 3, 3)
    geometry = Geometry.of(nn.Conv2d(2, 4, 3), frozenset({"weight", "bias"}))
    wanted = geometry.form(x, g).per_example()
    conv._walk.cache_clear()
    with torch.device("meta"):
        formed = geometry.form(x, g).per_example()
        noise = draw(Seeded(1).noise(1), [x], 1.0)[0]
    assert torch.equal(formed["weight"], wanted["weight"])
    assert torch.equal(noise, draw(Seeded(1).noise(1), [x], 1.0)[0])
