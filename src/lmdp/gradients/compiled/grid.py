"""Sums with normal noise, rounded to a grid: exactly, as if there were real numbers.

    on_grid   by compiled loops or PyTorch, in double precision; by `nearest` where that cannot tell
    nearest   by intervals, in as many digits and random bits as it takes

Guarantee. What is written is `step` times the whole number nearest to  sum · weight + Z · deviation,  with no rounding
before that one. The product is held within ±MOST, so that whole numbers are exact in double precision. Z is a function
of two real numbers, U and T, uniform in (0, 1), of whose infinitely many bits only those are read that matter:

    √(-2 ln U) · cos 2πT,   √(-2 ln U) · sin 2πT        (Box and Muller: both normal, and independent)

So compiled loops of any width, PyTorch and intervals write the same bits.

Double precision is believed only where its error cannot matter: if LEAST ≤ U ≤ 1 - LEAST, and there is no half within
ERROR · deviation + |result| · 2^-47. For Z is then off by less than half of ERROR: by 2^-64 / (U √(-2 ln U)) < 2^-44
for the bits of U beyond its 64th, by 2^-54 / √(-2 ln U) < 2^-43 as U is rounded, and by less than 2^-46 for series,
root and products. Product and addition are rounded to 2^-53 of themselves; 2^-47 is more than that asks for, so that
nothing beyond 2^46 is believed: `nearest` alone holds products within MOST.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from mpmath.ctx_iv import MPIntervalContext
from mpmath.libmp import round_floor, to_int
from torch import Tensor

from lmdp.gradients import compiled

More = Callable[[int, int], int]
"""(place, count): the next 64 · count bits of the radius (place 2 · pair) or the angle (2 · pair + 1) of a pair."""

MOST = 2.0**47
ERROR, LEAST = 2.0**-41, 2.0**-22
_INTERVALS = MPIntervalContext()
"""Whatever its precision, the ends of an interval are rounded outwards."""


def on_grid(
    words: Tensor, sums: Tensor, out: Tensor, *, weight: float, deviation: float, step: float, more: More
) -> None:
    """Fills `out` [n] from sums [n] and words int64 [2, pairs]: the first 64 bits of radii, then those of angles.

    The first half of `out`, with one more where n is odd, has the cosines, the second the sines.
    """
    if compiled.applies(out, sums):
        unsure = compiled.on_grid(words, sums, out, weight=weight, deviation=deviation, step=step)
    else:
        unsure = by_torch(words, sums, out, weight, deviation, step).nonzero().squeeze(1)
    radii, angles = words.chunk(2)
    for at in unsure.tolist():
        pair = at % len(radii)
        bits, given = (int(radii[pair]), int(angles[pair])), (float(sums[at]), weight, deviation)
        out[at] = torch.tensor(step * of_place(at, len(radii), bits, *given, more), dtype=torch.float64)


def of_place(
    at: int, pairs: int, bits: tuple[int, int], total: float, weight: float, deviation: float, more: More
) -> int:
    """The whole number of one place among those that `pairs` give, by intervals."""
    pair, sine = at % pairs, at >= pairs
    return nearest(total, weight, deviation, bits, sine, lambda which, count: more(2 * pair + which, count))


def by_torch(words: Tensor, sums: Tensor, out: Tensor, weight: float | Tensor, deviation: float, step: float) -> Tensor:
    """As the compiled loops do, on any device. Returns whether each place [n] is not sure, unread."""
    radii, angles = words.double().chunk(2)  # [pairs] each
    u = radii.add_(0.5).abs_().mul_(2.0**-63)
    enough_bits = (u - 0.5).abs() <= 0.5 - LEAST
    radius, angle = u.log_().mul_(-2).sqrt_().mul_(deviation), angles.mul_(math.pi * 2.0**-63)
    normal = torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)])[: out.numel()]
    t = normal.add_(sums.double() * weight)
    whole = t.round()
    sure = (t - whole).abs() + t.abs() * 2.0**-47 < 0.5 - deviation * ERROR
    out.copy_(whole * step)
    return ~(sure & enough_bits.repeat(2)[: out.numel()])


def nearest(total: float, weight: float, deviation: float, bits: tuple[int, int], sine: bool, more: More) -> int:
    """The whole number nearest to total · weight + Z · deviation, where `bits` are the first 64 of U and T.

    `more` has the bits after them, of U (place 0) and T (place 1).
    """
    iv, (radius, angle) = _INTERVALS, bits
    for count in itertools.count(1):
        iv.prec = 64 * count + 192
        first = radius if radius >= 0 else ~radius  # words of both signs are folded: 63 bits of U
        u, turn = (
            iv.mpf([number, number + 1]) * iv.mpf(2) ** -(length + 64 * count)
            for number, length in (
                ((first << 64 * count) + more(0, count), 63),
                ((angle << 64 * count) + more(1, count), 64),
            )
        )
        if u.a == 0:
            continue
        wave = iv.sin(2 * iv.pi * turn) if sine else iv.cos(2 * iv.pi * turn)
        between = _held(total, weight) + iv.sqrt(-2 * iv.log(u)) * wave * iv.mpf(deviation) + iv.mpf(0.5)
        low, high = (int(to_int(end, round_floor)) for end in between._mpi_)
        if low == high:
            return low
    raise AssertionError("unreachable")


def _held(total: float, weight: float) -> Any:
    iv, product = _INTERVALS, total * weight
    if not product < MOST:
        return iv.mpf(MOST)
    return iv.mpf(total) * iv.mpf(weight) if product > -MOST else iv.mpf(-MOST)
