"""Do examples meet in the loss? What one backward pass can tell: refused before anything of it is released.

means      a mean that divides by something which labels decide, or a sum where a mean was announced; a function of it
gradients  the gradient at one example's output must not depend on another's output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmdp.gradients.attach import look
from lmdp.gradients.fetching import Fetching
from lmdp.guards.loss_scale import NOT_LINEAR, is_of_many, kind, walk

NO_INDEX = (-100, 2**64 - 100)
"""The ignore_index that torch takes for none, as its nodes store it."""

REMEDY = (
    "One example could then change what all others contribute, and no epsilon would hold. If you know better, pass "
    "check_mixing=False to make_private; the run is then not certified."
)


Refused = Callable[[RuntimeError], None]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Output:
    """An output of the model, and its node in the graph. `rows`: whether its first dimension counts the examples."""

    tensor: Tensor
    node: Any
    rows: bool


class Alias(torch.autograd.Function):
    """Has the name of torch's own alias, which is one kind of node for all who read graphs, and is no view: a loss may
    change an output in place, and its node stays."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def same(tensor: Tensor) -> Tensor:
    """The same numbers in the same memory, with a node of their own: outputs over a vocabulary are not copied."""
    alias: Tensor = Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


def rows_meet(loss: Tensor, rows: Sequence[Output]) -> bool | None:
    """Whether gradients at some rows depend on other rows; None if that cannot be told from this batch."""
    try:
        with torch.enable_grad():
            with look(loss):
                grads = torch.autograd.grad(loss, [row.tensor for row in rows], create_graph=True, allow_unused=True)
            used = [(row.tensor, g) for row, g in zip(rows, grads) if g is not None]
            sizes = {len(g) for _, g in used}
            if len(sizes) != 1 or min(sizes) < 2:
                return None
            dependent = [(output, g) for output, g in used if g.requires_grad]
            if not dependent:
                return False  # the gradient at the outputs is a constant
            verdicts = [_sides_meet(used, dependent, first) for first in _sides(sizes.pop())]
    except RuntimeError:  # a loss that cannot be differentiated twice
        return None
    return True if True in verdicts else False if False in verdicts else None


def _sides(size: int) -> list[Tensor]:
    """Halves of a batch, by row. In a small one they part every row from every other: by each bit of its place."""
    if size <= 32:
        return [(torch.arange(size) >> bit) % 2 == 0 for bit in range((size - 1).bit_length())]
    return [torch.randperm(size, generator=torch.Generator().manual_seed(0)) < size // 2]


def _sides_meet(used: Sequence[Pair], dependent: Sequence[Pair], first: Tensor) -> bool | None:
    """Whether gradients at the rows of one side depend on outputs at the rows of the other."""
    generator = torch.Generator().manual_seed(0)
    parts = [(g[first] * torch.randn(g[first].shape, generator=generator).to(g)).sum() for _, g in dependent]
    total = torch.stack(parts).sum()
    with look(total):
        seconds = torch.autograd.grad(total, [output for output, _ in used], retain_graph=True, allow_unused=True)
    reached = [h for h in seconds if h is not None]
    if not reached:
        return False
    inside = max(_largest(h[first]) for h in reached)
    outside = max(_largest(h[~first]) for h in reached)
    if outside > 1e-6 * inside:
        return True
    return False if inside > 0 else None


def _largest(values: Tensor) -> float:
    """Of the finite ones: 0 times infinity, in an example's own row, is no dependence on another."""
    return float(torch.where(torch.isfinite(values), values.abs(), torch.zeros_like(values)).max().nan_to_num())


def refuse_uneven_means(loss: Tensor, outputs: set[Any], fetching: Fetching, refused: Refused) -> None:
    """Cross entropy that divides by the class weights of the batch, or by how many of its labels count.

    On a device labels are counted when the step is made; what is then refused is said to `refused` first.
    """
    for node in walk(loss.grad_fn, outputs.__contains__):
        if not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", 0) != 1:
            continue
        if not is_of_many(node, outputs):
            continue
        weighted = node._saved_weight is not None
        if weighted or node._saved_ignore_index not in NO_INDEX:
            raise _uneven("class weights" if weighted else "ignore_index")
        left_out = node._saved_total_weight != node._saved_target.numel()

        def refuse() -> None:
            error = _uneven("ignore_index")
            refused(error)
            raise error

        fetching.when([left_out], refuse)


def _uneven(how: str) -> RuntimeError:
    return RuntimeError(
        f"the loss is a mean with {how}: it divides by a number that the labels of all examples decide. Use "
        f"reduction='sum', and loss_reduction='sum' in make_private. {REMEDY}"
    )


def refuse_functions_of_totals(loss: Tensor, outputs: set[Any]) -> None:
    """A clamp, a root, nan_to_num of what all examples add up to: what each contributes then depends on the others."""
    for node in walk(loss.grad_fn, outputs.__contains__):
        if kind(node) not in NOT_LINEAR | {"NanToNum", "Where"}:
            continue
        of = [getattr(node, name, None) for name in ("_saved_self", "_saved_result", "_saved_condition")]
        if any(isinstance(each, Tensor) and each.numel() == 1 for each in of) and is_of_many(node, outputs):
            raise RuntimeError(
                f"the loss is a function ({kind(node)}) of what the examples of a batch add up to. Apply it to each "
                f"example's loss, before their sum or mean. {REMEDY}"
            )


def refuse_other_reduction(loss: Tensor, mean_loss: bool) -> None:
    """A loss of torch's own that says how it combines examples, where make_private was told otherwise."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)
    if reduction == (2 if mean_loss else 1):
        seen, told = ("sum", "mean") if mean_loss else ("mean", "sum")
        raise RuntimeError(
            f"the loss is a {seen} over the examples of a batch, but loss_reduction is '{told}': every example would "
            f"be scaled by the size of the batch. Pass loss_reduction='{seen}' to make_private."
        )


def other_divisor(mean_loss: bool) -> str:
    """Why a loss is refused that divides by something which follows from the batch."""
    told, ought = ("mean", "the number of examples") if mean_loss else ("sum", "a constant")
    return (
        f"the loss divides by something else than in the steps before, and not by {ought} (a mask, labels that do not "
        f"count, the longest example of the batch; or loss_reduction is not '{told}'). Divide by the same number in "
        f"every step, with loss_reduction='sum', or take the mean of each example's own. {REMEDY}"
    )
