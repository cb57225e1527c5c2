"""Several rows of a batch, one unit: views of one example, or rows of one user. Rows of a unit follow each other.

The gradient of a unit is the sum of its rows' gradients. A unit of K rows with T positions each is one example with
K · T positions, so rules that know positions stay as they are:

    more dimensions   [U · K, …, F] is read as [U, K, …, F]: nothing is copied
    joined            K uses of U examples each, joined as those of a module that is called K times
    added             the gradients of all rows are formed, and those of a unit added
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from lmdp.gradients.contract import Piece, Rule, Use
from lmdp.gradients.rows import Rows, Stored

Make = Callable[[], Piece]


def uses_of(rule: Rule, rows_each: int) -> int:
    """How many uses one call becomes."""
    return rows_each if rule.join is not None and not rule.takes_more_dims else 1


def folded(use: Use, rule: Rule, pulled: Make | None, rows_each: int) -> Iterator[tuple[Use, Make]]:
    """Of units, each with what makes its piece. `pulled`: what makes the piece of all rows, if a rule has made that."""
    if rows_each == 1:
        yield use, pulled or partial(rule.piece, use)
        return
    units = use.batch_size // rows_each
    if pulled is not None or not (rule.takes_more_dims or rule.join):
        make = pulled or partial(rule.piece, use)
        yield replace(use, batch_size=units), lambda: added_up(make(), rows_each)
        return
    bare = replace(use, batch_size=units, args=(), kwargs={}, outputs=(), output_grads=())
    if rule.takes_more_dims:
        shape = (units, rows_each)
        x, g = use.input.unflatten(0, shape), use.output_grad.unflatten(0, shape)
        sides = [(x, g)]
    else:
        sides = [(_every(use.input, rows_each, at), _every(use.output_grad, rows_each, at)) for at in range(rows_each)]
    for x, g in sides:
        part = replace(bare, input=x, output_grad=g)
        yield part, partial(rule.piece, part)


def added_up(piece: Piece, rows_each: int) -> Stored:
    """The gradients of every unit: those of its rows, added."""
    formed = piece.per_example()
    return Stored({name: Rows.of(each.unflatten(0, (-1, rows_each)).sum(1)) for name, each in formed.items()})


def _every(tensor: Tensor, rows_each: int, at: int) -> Tensor:
    """The row of each unit that is in this place."""
    return tensor[at::rows_each].contiguous()
