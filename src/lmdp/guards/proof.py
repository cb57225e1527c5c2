"""Can it be read off a loss's graph that each of its terms is one example's own? If so, no further look is needed.

A graph proves it where it is, from its end: sums, means and products with single numbers; then losses of torch's own
on targets that the data loader handed out, or functions of single entries or of the last dimension; then the outputs of
the model. Nothing else is tried: a loss that is not read is looked at beside others (`company.py`), which sees all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lmdp.guards.loss_scale import counted_labels, kind, walk

HEAD = frozenset({"Add", "Sub", "Neg", "Sum", "Mean", "ToCopy", "Clone", "Alias"})
SCALED = frozenset({"Mul", "Div"})
SHAPED = frozenset(
    {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"}
)
"""What passes rows on in their order."""

PASSED_OVER = SHAPED | {"Expand", "Permute", "Transpose", "T", "AsStrided"}

ENTRYWISE = frozenset(
    {"Exp", "Log", "Log1P", "Abs", "Relu", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Gelu", "Silu", "Pow"}
)
ALONG = frozenset({"LogSoftmax", "Softmax"})
LOSSES = frozenset(
    {
        *("NllLoss", "NllLossNd", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "KlDiv", "SoftMarginLoss"),
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MultiMarginLoss", "MultilabelMarginLoss"),
    }
)
"""Losses of torch's own: a term for each entry or row, of it and its target."""

Handed = Callable[[Tensor], bool]
"""Whether a tensor is one that the data loader handed out, unchanged."""


class Reading:
    """One graph, read from its end down to the `outputs` of the model: node → its last dimension, if it is sure."""

    def __init__(self, outputs: dict[Any, int | None], handed: Handed) -> None:
        self._outputs, self._handed = outputs, handed

    def proves(self, last: Any) -> bool:
        """Whether every term is one example's own. `last` is the node of the loss."""
        return self._is_head(last)

    def _is_head(self, node: Any) -> bool:
        """The linear part, in which terms are added up and scaled by single numbers."""
        if node is None or node in self._outputs:
            return True  # a constant, or entries of an output as they are
        name = kind(node)
        if name in HEAD or (name in SCALED and self._is_scaled(node)):
            return all(self._is_head(above) for above, _ in node.next_functions)
        return self._is_loss(node) or self._is_rows(node)

    def _is_scaled(self, node: Any) -> bool:
        """By single numbers, or by numbers of its rows that were handed out."""
        parts = [above for above, _ in node.next_functions]
        if sum(above is not None for above in parts) != 1:
            return False
        other = getattr(node, "_saved_other", None) if parts[0] is not None else getattr(node, "_saved_self", None)
        return not isinstance(other, Tensor) or other.numel() == 1 or self._handed(other)

    def _is_loss(self, node: Any) -> bool:
        if kind(node) not in LOSSES or getattr(node, "_saved_weight", None) is not None:
            return False
        if getattr(node, "_saved_pos_weight", None) is not None:
            return False
        counted, target = counted_labels(node), node._saved_target
        if counted is not None and node._saved_reduction == 1 and counted != target.numel():
            return False
        rows, of_target = [above for above, _ in (*node.next_functions, (None, 0))][:2]
        return self._is_rows(rows) and (self._handed(target) if of_target is None else self._is_rows(of_target))

    def _is_rows(self, node: Any) -> bool:
        """Functions of single entries, or along the last dimension of an output."""
        if node in self._outputs:
            return True
        if node is None:
            return False
        name, above = kind(node), [above for above, _ in node.next_functions]
        if name in SHAPED or name in ENTRYWISE:
            return len(above) == 1 and self._is_rows(above[0])
        if name in ALONG:
            result = node._saved_result
            return self._is_last(node, result) and self._is_rows(above[0])
        if name in SCALED:
            other = getattr(node, "_saved_other", None)
            single = not isinstance(other, Tensor) or other.numel() == 1
            return single and above[0] is not None and all(a is None for a in above[1:]) and self._is_rows(above[0])
        return False

    def _is_last(self, node: Any, result: Tensor) -> bool:
        """Whether a softmax runs along the last dimension, and that is the last one of an output."""
        dim = node._saved_dim
        dim = dim - 2**64 if dim >= 2**63 else dim
        widths = [self._outputs[at] for at in walk(node, self._outputs.__contains__) if at in self._outputs]
        last = result.dim() > 1 and dim in (-1, result.dim() - 1)
        return last and all(width == result.shape[-1] for width in widths)


def shape_of(last: Any, ends: Callable[[Any], str | None]) -> frozenset[tuple[str, str]]:
    """Which kinds of nodes a loss's graph has above which: alike for equal losses of batches of any size.

    `ends` names a node at which the loss ends and the model begins. Copies and other views of the same numbers are
    passed over: which of them a graph has may follow from sizes and strides.
    """
    edges = set()
    for node in walk(last, lambda node: ends(node) is not None):
        end = ends(node)
        if end is not None:
            edges.add((end, ""))
        elif kind(node) not in PASSED_OVER:
            edges |= {(kind(node), ends(above) or kind(above)) for above in _above(node, ends)}
    return frozenset(edges)


def _above(node: Any, ends: Callable[[Any], str | None]) -> Iterator[Any]:
    for above, _ in node.next_functions:
        if above is not None and kind(above) in PASSED_OVER and ends(above) is None:
            yield from _above(above, ends)
        elif above is not None:
            yield above
