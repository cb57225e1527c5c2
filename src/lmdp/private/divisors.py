"""What does the loss divide by? Looked at in every step: something fixed, or the number of examples, and nothing else.

A mean divides by B, the number of examples, and `loss_reduction="mean"` undoes exactly that. If the factor that stands
before the examples' terms is k / B (for a sum: k) with the same k in every step, the terms are each example's own. If k
changes from batch to batch, something else than B is divided by: the tokens that a mask leaves, the labels that count,
the longest example. One example then scales the gradients of all others.

The factor is read off the graph of the loss, from its end to the model's outputs. Numbers that Python multiplies with
are left out, since they may follow a schedule; so is what is divided for one example alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

MOST_NODES, MOST_FACTORS = 10_000, 16
SAME = 1e-4
"""Relative; a half-precision quotient is off by more and is not judged."""


class Divisors:
    """Remembers the factors of the batches so far; `hold` is False once they differ."""

    def __init__(self, *, mean_loss: bool) -> None:
        self._mean_loss = mean_loss
        self._before: list[float] | None = None

    def hold(self, loss: Tensor, outputs: Iterable[Any], size: int) -> bool:
        """Whether this loss, of `size` examples, has the same factors as the ones before. `outputs`: their nodes."""
        found = _factors(loss, set(outputs)) if size > 1 and loss.element_size() > 2 else None
        if not found:
            return True
        now = sorted(factor * size if self._mean_loss else factor for factor in found)
        before, self._before = self._before, now
        if before is None or len(before) != len(now):  # another number of terms: another loss
            return True
        return all(math.isclose(a, b, rel_tol=SAME) for a, b in zip(before, now))


def _factors(loss: Tensor, outputs: set[Any]) -> set[float] | None:
    """The factors of all paths from the loss to the outputs, None if they are too many to follow."""
    arriving: dict[Any, set[float]] = {loss.grad_fn: {1.0}}
    found: set[float] = set()
    for node in _in_order(loss.grad_fn, outputs):
        factors = arriving.pop(node, set())
        if node in outputs:
            found |= factors
            continue
        for slot, (above, _) in enumerate(node.next_functions):
            own = _own_factor(node, slot)
            if above is not None and own is not None:
                arriving.setdefault(above, set()).update(float(f"{factor * own:.6g}") for factor in factors)
                if len(arriving[above]) > MOST_FACTORS:
                    return None
    return {factor for factor in found if math.isfinite(factor) and factor != 0.0}


def _in_order(last: Any, stop: set[Any]) -> list[Any]:
    """The nodes of the loss's graph, each before those it was computed from."""
    waiting, order = [(last, False)], []
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node, left = waiting.pop()
        if left:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(above, False) for above, _ in node.next_functions if node not in stop]
    return order[::-1]


def _own_factor(node: Any, slot: int) -> float | None:
    """What this node multiplies its input `slot` with, where that is one number; None if it picks one example out."""
    name = node.name()
    if _is_of_one_example(node, name):
        return None
    if name.startswith("DivBackward") and slot == 0:
        return _quotient(1.0, _number(node._saved_other))
    if name == "MulBackward0":
        other = node._saved_other if slot == 0 else node._saved_self
        return 1.0 if _is_of_python(other) else _number(other)
    if name == "MeanBackward0":
        return _quotient(1.0, node._saved_self_sym_numel)
    if name == "MeanBackward1":
        sizes = node._saved_self_sym_sizes
        return _quotient(1.0, math.prod(sizes[_signed(d, len(sizes))] for d in node._saved_dim or range(len(sizes))))
    if getattr(node, "_saved_reduction", None) == 1:
        counted = getattr(node, "_saved_total_weight", None)
        return _quotient(1.0, node._saved_self.numel() if counted is None else float(counted))
    return 1.0


def _is_of_one_example(node: Any, name: str) -> bool:
    if name.partition("Backward")[0] not in ("Select", "Slice", "Split", "Unbind"):
        return False
    sizes = getattr(node, "_saved_self_sym_sizes", (0,))
    if _signed(node._saved_dim, len(sizes)) != 0:
        return False
    if name.startswith("SliceBackward"):
        return bool(min(node._saved_end, sizes[0]) - _signed(node._saved_start, sizes[0]) == 1)
    return bool(name.startswith(("SelectBackward", "UnbindBackward")) or node._saved_split_size == 1)


def _signed(index: int, length: int) -> int:
    """As Python counts, from a number that torch may have stored as unsigned."""
    index = index - 2**64 if index >= 2**63 else index
    return index + length if index < 0 else index


def _number(value: Any) -> float:
    """A single number as it is; what differs between entries, or is not known, counts as 1."""
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else 1.0


def _is_of_python(value: Any) -> bool:
    """Torch stores Python's numbers as single entries in its widest types."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.element_size() == 8


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.inf
