"""Do examples meet, in the model or in the loss? Looked for where a run can show it, and refused if so.

The guarantee needs a loss that is a sum or mean of terms which each depend on one example. Three looks:

    model     in the first step, run on *made-up* examples of the batch's shape: if one is changed, the outputs of the
              others must not change
    loss      in the first step, where the user's backward() begins: the gradient at one example's output must not
              depend on another's output, and the mean must not divide by something that labels decide
    divisors  in every step: what the loss divides by is fixed, or the number of examples (loss_scale.py)

Nothing of this leaks. The first look sees only shapes. The others see private outputs, but for a loss whose terms each
depend on one example they find nothing, whatever the data: the derivative is zero, not small, and the divisor is what
it was before. They can speak only where the guarantee did not hold in the first place.
"""

from __future__ import annotations

import contextlib
import copy
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients.attach import look
from lmdp.gradients.capture import leading_dimension
from lmdp.guards.loss_scale import LossScale, is_of_many, walk

ROWS = 4
TRIES = 3
MOST_OUTPUTS = 8
NO_INDEX = (-100, 2**64 - 100)
"""The ignore_index that torch takes for none, as its nodes store it."""

REMEDY = (
    "One example could then change what all others contribute, and no epsilon would hold. If you know better, pass "
    "check_mixing=False to make_private."
)


@dataclass
class Outputs:
    """An output of the model, its node in the graph, and which of its dimensions counts the examples."""

    output: Tensor
    node: Any
    dim: int

    def of(self, like: Tensor) -> Tensor:
        """A tensor of the output's shape, examples first."""
        return like.movedim(self.dim, 0)


class Independence:
    """Judges the model and the loss in the first step that allows it, what it divides by in each, until `close`."""

    def __init__(self, model: nn.Module, *, mean_loss: bool = True) -> None:
        self._model = weakref.ref(model)
        self._mean_loss = mean_loss
        self._tries_left = {"model": TRIES, "loss": TRIES}
        self._loss_scale = LossScale(mean_loss=mean_loss)
        self._dims: list[int | None] | None = None
        self.refused = False
        self._rows: list[Outputs] = []

    @property
    def done(self) -> bool:
        """Whether only what the loss divides by is left to look at."""
        return not any(self._tries_left.values())

    def close(self) -> None:
        self._tries_left = dict.fromkeys(self._tries_left, 0)
        self._rows.clear()

    def after_forward(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Judge the model; give the same output back, so that the loss can be told from the model."""
        model, size = self._model(), leading_dimension((args, kwargs))
        if model is None or not size:
            return output
        if self._tries_left["model"]:
            self._judge_model(model, args, kwargs, size)
        leaves, spec = pytree.tree_flatten(output)
        for i, dim in enumerate(self._counting(leaves, size)):
            if dim is not None:
                # A copy while the loss is still to be judged: derivatives with respect to it stay outside the model.
                leaves[i] = leaves[i].clone() if self._tries_left["loss"] else leaves[i]
                self._rows.append(Outputs(leaves[i], leaves[i].grad_fn, dim))
        del self._rows[:-MOST_OUTPUTS]
        return pytree.tree_unflatten(leaves, spec)

    def before_backward(self, loss: Tensor) -> None:
        """Judge the loss, if it was computed from the model's outputs."""
        try:
            self._judge(loss)
        except RuntimeError:
            self.refused = True
            raise

    def _judge(self, loss: Tensor) -> None:
        reached = _reached(loss, self._rows)
        if not reached:
            return
        self._rows = []
        outputs = {row.node for row in reached}
        _refuse_uneven_means(loss, outputs)
        if self._tries_left["loss"]:
            self._judge_loss(loss, reached)
        sizes = {row.output.shape[row.dim] for row in reached}
        if len(sizes) == 1 and not self._loss_scale.hold(loss, outputs, sizes.pop()):
            told, ought = ("mean", "the number of examples") if self._mean_loss else ("sum", "a constant")
            raise RuntimeError(
                f"the loss divides by something else than in the steps before, and not by {ought} (a mask, labels that "
                f"do not count, the longest example of the batch; or loss_reduction is not '{told}'). Divide by the "
                f"same number in every step, with loss_reduction='sum', or take the mean of each example's own. "
                f"{REMEDY}"
            )

    def _counting(self, leaves: list[Any], size: int) -> list[int | None]:
        """Which dimension of each output counts the examples: as the made-up ones showed, else the first."""
        if self._dims is None or len(self._dims) != len(leaves):
            dims: list[int | None] = [0] * len(leaves)
        else:
            dims = self._dims
        return [
            dim if dim is not None and _is_float(leaf, dim) and leaf.requires_grad and leaf.shape[dim] == size else None
            for leaf, dim in zip(leaves, dims)
        ]

    def _judge_model(self, model: nn.Module, args: Any, kwargs: Any, size: int) -> None:
        outputs = _made_up_outputs(model, args, kwargs, size)
        verdict = None
        if outputs is not None:
            self._dims = [_counting_dim(plain, longer) for plain, _, longer in outputs]
            pairs = [(a, b, dim) for (a, b, _), dim in zip(outputs, self._dims) if dim is not None]
            verdict = _outputs_meet(pairs)
        if verdict:
            raise RuntimeError(
                "the model lets the examples of a batch meet: on made-up inputs, changing one example changed the "
                f"outputs of others (a statistic of the batch, attention or normalisation across it). {REMEDY}"
            )
        self._judged("model", sound=verdict is False)

    def _judge_loss(self, loss: Tensor, rows: Sequence[Outputs]) -> None:
        _refuse_other_reduction(loss, self._mean_loss)
        verdict = _rows_meet(loss, rows)
        if verdict:
            raise RuntimeError(
                "the loss lets the examples of a batch meet: the gradient at one example's output depends on another "
                f"example's output (a contrastive loss, a statistic of the batch). {REMEDY}"
            )
        self._judged("loss", sound=verdict is False)

    def _judged(self, what: str, *, sound: bool) -> None:
        """Sound: not to be looked at again. Not to be told from this batch: one try less."""
        self._tries_left[what] = 0 if sound else self._tries_left[what] - 1


def _made_up_outputs(model: nn.Module, args: Any, kwargs: Any, size: int) -> list[tuple[Any, Any, Any]] | None:
    """Each output for made-up examples, with the first of them changed, and with one more; None if it cannot run."""
    generator = torch.Generator().manual_seed(0)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    batches = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size]
    longer = [_made_up(leaf, generator) for leaf in batches]
    plain = [rows[:ROWS] for rows in longer]
    # Of several tensors of this length only the first is sure to count examples.
    changed = [_changed(rows, generator) if i == 0 else rows for i, rows in enumerate(plain)]

    def run(inputs: list[Tensor]) -> list[Any]:
        left = iter(inputs)
        mine = [next(left) if any(leaf is b for b in batches) else leaf for leaf in leaves]
        mine_args, mine_kwargs = pytree.tree_unflatten(mine, spec)
        with torch.no_grad(), same_randomness(0, _devices(model)):
            return pytree.tree_leaves(copy.deepcopy(model)(*mine_args, **mine_kwargs))  # a copy: it may keep count

    try:
        first, again, other, more = run(plain), run(plain), run(changed), run(longer)
    except Exception:  # made-up inputs may be refused by any model, for any reason: then nothing is known
        return None
    if any(isinstance(a, Tensor) and a.is_floating_point() and _differ(a, b) for a, b in zip(first, again)):
        return None  # chance that is not shared
    return list(zip(first, other, more))


@contextlib.contextmanager
def same_randomness(seed: int, devices: Sequence[int] = ()) -> Iterator[None]:
    """Every run inside draws the same (initial weights, dropout, shuffles), and nobody else's draws change."""
    python, numeric = random.getstate(), np.random.get_state()  # noqa: NPY002  users' code may draw from it
    with torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numeric)  # noqa: NPY002


def _counting_dim(plain: Any, longer: Any) -> int | None:
    """The dimension that grew with the number of examples."""
    if not (isinstance(plain, Tensor) and plain.is_floating_point() and plain.dim() == longer.dim()):
        return None
    grown = [d for d, (a, b) in enumerate(zip(plain.shape, longer.shape)) if a != b]
    return grown[0] if len(grown) == 1 and plain.shape[grown[0]] == ROWS else None


def _outputs_meet(outputs: Sequence[tuple[Tensor, Tensor, int]]) -> bool | None:
    """Whether the outputs of unchanged examples changed; None if that cannot be told from these."""
    others = [(a.movedim(d, 0)[1:], b.movedim(d, 0)[1:]) for a, b, d in outputs if a.shape == b.shape]
    finite = any(torch.isfinite(a).any() for a, _ in others)
    return any(_differ(a, b) for a, b in others) if finite else None


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (ROWS + 1, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like)
    return (
        torch.zeros(shape, dtype=like.dtype, device=like.device) if like.dtype != torch.bool else like.new_ones(shape)
    )


def _changed(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The same but for the first example."""
    changed = rows.clone()
    if rows.is_floating_point():
        changed[0] = 1 + 2 * torch.randn(rows.shape[1:], generator=generator).to(rows)
    elif rows.dtype != torch.bool:
        changed[0] = 1
    return changed


def _differ(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-6 if a.dtype == torch.float64 else 1e-3 if a.dtype == torch.float32 else 5e-2
    finite = torch.isfinite(a) & torch.isfinite(b)
    off = torch.where(finite, (a - b).abs(), torch.zeros_like(a))
    return bool((off > tolerance * (1 + a.abs())).any())


def _rows_meet(loss: Tensor, rows: Sequence[Outputs]) -> bool | None:
    """Whether gradients at some rows depend on other rows; None if that cannot be told from this batch."""
    try:
        with torch.enable_grad():
            outputs = [row.output for row in rows]
            with look(loss):
                grads = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            used = [(row, row.of(g)) for row, g in zip(rows, grads) if g is not None]
            sizes = {len(g) for _, g in used}
            if len(sizes) != 1 or min(sizes) < 2:
                return None
            generator = torch.Generator().manual_seed(0)
            first = torch.randperm(sizes.pop(), generator=generator)
            chosen, rest = first[: len(first) // 2], first[len(first) // 2 :]
            dependent = [
                (g[chosen] * torch.randn(g[chosen].shape, generator=generator).to(g)).sum()
                for _, g in used
                if g.requires_grad
            ]
            if not dependent:
                return False  # the gradient at the outputs is a constant
            total = torch.stack(dependent).sum()
            with look(total):
                seconds = torch.autograd.grad(
                    total, [row.output for row, _ in used], retain_graph=True, allow_unused=True
                )
    except RuntimeError:  # a loss that cannot be differentiated twice
        return None
    reached = [row.of(h) for (row, _), h in zip(used, seconds) if h is not None]
    if not reached:
        return False
    inside = max(_largest(h[chosen]) for h in reached)
    outside = max(_largest(h[rest]) for h in reached)
    if outside > 1e-6 * inside:
        return True
    return False if inside > 0 else None


def _largest(values: Tensor) -> float:
    """Of the finite ones: 0 times infinity, in an example's own row, is no dependence on another."""
    return float(torch.where(torch.isfinite(values), values.abs(), torch.zeros_like(values)).max().nan_to_num())


def _refuse_uneven_means(loss: Tensor, outputs: set[Any]) -> None:
    """Cross entropy that divides by the class weights of the batch, or by how many of its labels count."""
    for node in walk(loss.grad_fn, outputs.__contains__):
        if not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", 0) != 1:
            continue
        weighted = node._saved_weight is not None
        ignoring = node._saved_ignore_index not in NO_INDEX
        left_out = not weighted and float(node._saved_total_weight) != node._saved_target.numel()
        if (weighted or ignoring or left_out) and is_of_many(node, outputs):
            how = "class weights" if weighted else "ignore_index"
            raise RuntimeError(
                f"the loss is a mean with {how}: it divides by a number that the labels of all examples decide. Use "
                f"reduction='sum', and loss_reduction='sum' in make_private. {REMEDY}"
            )


def _refuse_other_reduction(loss: Tensor, mean_loss: bool) -> None:
    """A loss of torch's own that says how it combines examples, where make_private was told otherwise."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)
    if reduction == (2 if mean_loss else 1):
        seen, told = ("sum", "mean") if mean_loss else ("mean", "sum")
        raise RuntimeError(
            f"the loss is a {seen} over the examples of a batch, but loss_reduction is '{told}': every example would "
            f"be scaled by the size of the batch. Pass loss_reduction='{seen}' to make_private."
        )


def _reached(loss: Tensor, rows: Sequence[Outputs]) -> list[Outputs]:
    """Outputs that the loss was computed from, other than through the model again."""
    if not rows:  # a loss of another model: its graph may be long
        return []
    nodes = {row.node for row in rows}
    below = set(walk(loss.grad_fn, nodes.__contains__))
    return [row for row in rows if row.node in below]


def _is_float(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > dim


def _devices(model: nn.Module) -> list[int]:
    return sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
