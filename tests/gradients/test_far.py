"""On a device, noise is the same function of the same bits as on the host: exact, decided once, at the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmdp.gradients.compiled import far
from lmdp.gradients.compiled.far import OnDevice, Piece
from lmdp.gradients.compiled.grid import on_grid
from lmdp.private.keystream import KeyStream

KEY = bytes(range(32))


def on_host(sums: list[Tensor], deviation: float, step: float) -> list[Tensor]:
    stream, results = KeyStream(KEY), []
    for each in sums:
        start, count = stream.drawn, len(each) + len(each) % 2
        out = torch.empty_like(each)
        on_grid(
            stream.words(count),
            each,
            out,
            weight=1.0,
            deviation=deviation,
            step=step,
            more=lambda place, n, at=start: stream.more(at, place, n),
        )
        results.append(out)
    return results


def on_device(sums: list[Tensor], deviation: float, step: float) -> list[Tensor]:
    """The code that devices take, on tensors of the host: in two rounds."""
    stream, work, results = KeyStream(KEY), OnDevice(), []
    for part in (sums[:2], sums[2:]):
        pieces, start = [], stream.drawn
        for each in part:
            pieces.append(Piece(each, 1.0, start, each.dtype))
            start += len(each) + len(each) % 2
        words = stream.words(start - stream.drawn)
        results += work.add(pieces, lambda words=words: words, deviation, step)
    work.finish(stream.more)
    return results


def pieces(size: float, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, generator=generator) * size).to(dtype) for n in (1, 4097, 30_000, 2, 77)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e3, 1e7])
def test_a_device_writes_the_bits_that_the_host_writes(size: float, dtype: torch.dtype) -> None:
    sums = pieces(size, dtype)
    for a, b in zip(on_host(sums, 2.0**18.3, 2.0**-20), on_device(sums, 2.0**18.3, 2.0**-20)):
        assert torch.equal(a, b)


def test_places_that_double_precision_cannot_decide_are_decided_as_on_the_host() -> None:
    """With a deviation of 2^34 steps, a number in a hundred is not sure: more than a round keeps."""
    sums = [each[:300] for each in pieces(1e9, torch.float64)]
    assert all(torch.equal(a, b) for a, b in zip(on_host(sums, 2.0**34, 1.0), on_device(sums, 2.0**34, 1.0)))
    few = [each[:20] for each in sums]
    assert all(torch.equal(a, b) for a, b in zip(on_host(few, 2.0**34, 1.0), on_device(few, 2.0**34, 1.0)))


def test_unsure_places_that_are_kept_are_decided_without_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "_every_unsure", lambda each: pytest.fail("the words were asked for again"))
    monkeypatch.setattr(far, "SPARE", 2 * far.OF_ROUND)
    sums = [each[:300] for each in pieces(1e9, torch.float64)]
    deviation = 2.0**33  # a number in 128 is not sure
    device = on_device(sums, deviation, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(on_host(sums, deviation, 1.0), device))
    unsure = torch.cat(device) != torch.cat(on_device_unfinished(sums, deviation))
    assert unsure.any()  # some were decided


def on_device_unfinished(sums: list[Tensor], deviation: float) -> list[Tensor]:
    """What is there before anything is decided, moved by one step wherever it is not sure."""
    stream, results = KeyStream(KEY), []
    for each in sums:
        words, out = stream.words(len(each) + len(each) % 2), torch.empty_like(each)
        unsure = far.by_torch(words, each, out, 1.0, deviation, 1.0)
        results.append(out + unsure)
    return results


def test_far_fewer_places_are_unsure_than_are_kept() -> None:
    """On the finest grid that there is, over two million numbers, and sums as long as the noise."""
    stream = KeyStream(KEY)
    sums = torch.randn(2**21, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2.0**19
    unsure = far.by_torch(stream.words(2**21), sums, torch.empty_like(sums), 1.0, 2.0**19, 1.0)
    assert int(unsure.sum()) <= far.OF_ROUND / 2
    assert 2**21 * far.EXPECTED <= far.OF_ROUND / 4
