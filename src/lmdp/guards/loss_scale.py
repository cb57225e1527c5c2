"""What does the loss divide by? Looked at in every step: something fixed, or the number of examples, and nothing else.

A loss is a sum of terms with a factor before each. A mean divides by B, the number of examples, and
`loss_reduction="mean"` undoes exactly that. If the factor is k / B (for a sum: k) with the same k in every step, a term
is its example's own. If k changes from batch to batch, something else than B is divided by: the tokens that a mask
leaves, the labels that count, the longest example. One example then scales the gradients of all others.

The factors are read off the graph of the loss, from its end down to the first node that is not linear. Multipliers may
follow a schedule, so k is looked at with and without them; a loss that holds without them only is not proved by its
graph. Where a node is not known, or the loss is taken apart by index, nothing is said. Losses whose graphs differ are
told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

MOST_NODES, MOST_FACTORS = 10_000, 16
SAME = 1e-4
"""Relative; a quotient in half precision is off by more and is not judged."""

LINEAR = {
    "Add",
    "Sub",
    "Neg",
    "Sum",
    "Div",
    "Mul",
    "Mean",
    "ToCopy",
    "Clone",
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Expand",
    "Squeeze",
    "Unsqueeze",
    "Permute",
    "Transpose",
    "T",
    "MaskedFill",
    "Where",
    "Index",
    "IndexSelect",
    "Stack",
    "Cat",
    "Alias",
    "Gather",
    "Select",
    "Slice",
    "Split",
    "SplitWithSizes",
    "Unbind",
    "MaskedSelect",
}
"""Nodes that pass a term on, once or many times, with a factor that is known (most often 1)."""

NOT_LINEAR = {
    "Pow",
    "Exp",
    "Expm1",
    "Log",
    "Log1P",
    "Log2",
    "Sqrt",
    "Rsqrt",
    "Abs",
    "Relu",
    "LeakyRelu",
    "Gelu",
    "Silu",
    "Sigmoid",
    "LogSigmoid",
    "LogSigmoidForward",
    "Softplus",
    "Softmax",
    "LogSoftmax",
    "Tanh",
    "Clamp",
    "ClampMin",
    "ClampMax",
    "Logsumexp",
    "Minimum",
    "Maximum",
    "Erf",
    "Sin",
    "Cos",
    "Xlogy",
}
"""Nodes at which a term begins."""

TAKES_APART = {"Select", "Slice", "Split", "SplitWithSizes", "Unbind"}


class LossScale:
    """Remembers the factors of the batches so far, for every shape of a loss's graph."""

    def __init__(self, *, mean_loss: bool) -> None:
        self._mean_loss = mean_loss
        self._before: dict[tuple[Any, bool], list[float]] = {}

    def hold(self, loss: Tensor, outputs: set[Any], size: int, shape: Any) -> tuple[bool, bool, bool]:
        """Whether this loss, of `size` examples, has factors like those of its shape before; and with multipliers too;
        and whether one of them is 0 or no number.

        `outputs`: the nodes at which the model begins.
        """
        zero = any(not math.isfinite(factor) or factor == 0 for factor in _factors(loss, outputs, True) or ())
        if size < 2:
            return True, True, zero  # whatever it divides by is the one example's own
        if loss.element_size() <= 2:
            return True, False, zero
        alike = [self._is_as_before(loss, outputs, size, shape, multipliers) for multipliers in (True, False)]
        return any(alike), alike[0] and not zero, zero

    def _is_as_before(self, loss: Tensor, outputs: set[Any], size: int, shape: Any, multipliers: bool) -> bool:
        factors = {f for f in _factors(loss, outputs, multipliers) or () if math.isfinite(f) and f != 0.0}
        if not factors:
            return True
        now = _distinct(factor * size if self._mean_loss else factor for factor in factors)
        return _alike(self._before.setdefault((shape, multipliers), now), now)


def kind(node: Any) -> str:
    """NllLossBackward0 → NllLoss."""
    name: str = node.name()
    return name.partition("Backward")[0]


def walk(first: Any, stop: Callable[[Any], bool]) -> Iterator[Any]:
    """A node and what it was computed from, each once, not beyond nodes that `stop`."""
    waiting = [first]
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if not stop(node):
                waiting += [above for above, _ in node.next_functions]


def is_of_many(node: Any, outputs: set[Any]) -> bool:
    """Whether it was computed of whole outputs, not only of rows that were picked out of them."""
    return any(at in outputs for at in walk(node, lambda at: at in outputs or takes_apart(at)))


def takes_apart(node: Any) -> bool:
    """Whether it picks some rows out: what follows may be one example's own."""
    if kind(node) not in TAKES_APART:
        return False
    sizes, dim = getattr(node, "_saved_self_sym_sizes", None), _signed(node._saved_dim)
    return bool(dim == 0 or (sizes is not None and dim + len(sizes) == 0))


def _signed(dim: int) -> int:
    """As Python counts, from a number that torch stores as unsigned."""
    return dim - 2**64 if dim >= 2**63 else dim


def _distinct(factors: Iterable[float]) -> list[float]:
    """In order, each once, whatever rounding made of it on its way through the graph."""
    kept: list[float] = []
    for factor in sorted(factors):
        if not kept or not math.isclose(kept[-1], factor, rel_tol=SAME):
            kept.append(factor)
    return kept


def _alike(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=SAME) for x, y in zip(a, b))


def _factors(loss: Tensor, outputs: set[Any], multipliers: bool) -> set[float] | None:
    """The factors of all terms; None if a node is not known, or if they are too many to follow."""
    arriving: dict[Any, set[float]] = {loss.grad_fn: {1.0}}
    ends: set[float] = set()
    for node in _in_order(loss.grad_fn, outputs):
        factors = arriving.pop(node, set())
        reduction = getattr(node, "_saved_reduction", None)
        if node in outputs or kind(node) in NOT_LINEAR or _is_product_of_outputs(node) or reduction is not None:
            mean = _mean_of(node) if reduction == 1 else 1.0
            if is_of_many(node, outputs):
                ends |= {factor * mean for factor in factors}
        elif kind(node) not in LINEAR:
            return None
        elif not takes_apart(node):
            for slot, (above, _) in enumerate(node.next_functions):
                if above is not None:
                    here = _factor_of(node, slot, multipliers)
                    arriving.setdefault(above, set()).update(float(f"{factor * here:.6g}") for factor in factors)
                    if len(arriving[above]) > MOST_FACTORS:
                        return None
    return ends


def _in_order(last: Any, outputs: set[Any]) -> list[Any]:
    """The nodes of the loss's linear part, and where it ends, each before those it was computed from."""
    waiting, order = [(last, False)], []
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node, left = waiting.pop()
        if left:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node not in outputs and kind(node) in LINEAR and not takes_apart(node):
                waiting += [(above, False) for above, _ in node.next_functions]
    return order[::-1]


def _is_product_of_outputs(node: Any) -> bool:
    """A product or quotient of two things that both come from the model."""
    return kind(node) in ("Mul", "Div") and sum(above is not None for above, _ in node.next_functions) > 1


def _factor_of(node: Any, slot: int, multipliers: bool) -> float:
    """What this linear node multiplies its input `slot` with, where that is one number."""
    name = kind(node)
    if name == "Div":
        return _over(_number(node._saved_other)) if slot == 0 else math.nan
    if name == "Mul":
        other = node._saved_other if slot == 0 else node._saved_self
        return _number(other) if multipliers else 1.0
    if name == "Mean":
        sizes = node._saved_self_sym_sizes
        dims = getattr(node, "_saved_dim", ()) or range(len(sizes))
        return _over(math.prod(sizes[_signed(d)] for d in dims))
    return 1.0


def _mean_of(node: Any) -> float:
    """One over what a loss of torch's own divides by."""
    labels = counted_labels(node)
    return _over(node._saved_self.numel() if labels is None else labels)


def counted_labels(node: Any) -> float | None:
    """What cross entropy divides by, where it says so. On a device nobody waits for the number: it passes for the
    number of labels, and whether it is that is looked at before anything of the step is released."""
    counted = getattr(node, "_saved_total_weight", None)
    if counted is None:
        return None
    return float(counted) if counted.is_cpu or node._saved_weight is not None else float(node._saved_target.numel())


def _number(value: Any) -> float:
    """A single number as it is; what differs between entries counts as 1."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else 1.0
    return float(value) if isinstance(value, int | float) else 1.0


def _over(value: float) -> float:
    return 1.0 / value if value else math.inf
