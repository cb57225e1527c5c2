"""Do examples meet, in the model or in the loss? Looked at once, in the first steps of a run, and refused if so.

The guarantee needs a loss that is a sum or mean of terms which each depend on one example. Two looks:

    model   run on *made-up* examples of the batch's shape: if one is changed, the outputs of the others must not
    loss    where the user's backward() begins: the gradient at one example's output must not depend on another's
            output, and the mean must not divide by something that the examples' labels decide

Nothing of this leaks. The first look sees only shapes. The second sees private outputs, but for a loss whose terms each
depend on one example it finds nothing, whatever the data: the derivative is zero, not small. It can speak only where
the guarantee did not hold in the first place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

ROWS = 4
TRIES = 3
MOST_OUTPUTS, MOST_NODES = 8, 10_000
NO_INDEX = (-100, 2**64 - 100)
"""The ignore_index that torch takes for none, as its nodes store it."""

REMEDY = (
    "One example could then change what all others contribute, and no epsilon would hold. If you know better, pass "
    "check_mixing=False to make_private."
)


class MixingProbe:
    """Waits for the first forward and backward pass that can be judged; `done` after that."""

    def __init__(self, model: nn.Module, *, mean_loss: bool = True) -> None:
        self._model = weakref.ref(model)
        self._mean_loss = mean_loss
        self._tries_left = {"model": TRIES, "loss": TRIES}
        self._outputs: list[Tensor] = []
        _watch(self)

    @property
    def done(self) -> bool:
        return not any(self._tries_left.values())

    def close(self) -> None:
        self._tries_left = dict.fromkeys(self._tries_left, 0)
        self._outputs.clear()
        _unwatch(self)

    def after_forward(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Judge the model; give the same output back, so that the loss can be told from the model."""
        model, size = self._model(), _batch_size((args, kwargs))
        if model is None or not size:
            return output
        if self._tries_left["model"]:
            self._judge_model(model, args, kwargs, size)
        if not self._tries_left["loss"]:
            return output
        # Copies: derivatives with respect to them stay outside the model.
        output = pytree.tree_map(lambda leaf: leaf.clone() if _is_row_wise(leaf, size) else leaf, output)
        self._outputs += [leaf for leaf in pytree.tree_leaves(output) if _is_row_wise(leaf, size)]
        del self._outputs[:-MOST_OUTPUTS]
        return output

    def before_backward(self, loss: Any) -> None:
        """Judge the loss, if it was computed from the model's outputs."""
        outputs, self._outputs = self._outputs, []
        if not (outputs and isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            return
        _refuse_uneven_means(loss, outputs)
        _refuse_other_reduction(loss, self._mean_loss)
        verdict = _rows_meet(loss, outputs)
        if verdict:
            raise RuntimeError(
                "the loss lets the examples of a batch meet: the gradient at one example's output depends on another "
                f"example's output (a contrastive loss, a statistic of the batch). {REMEDY}"
            )
        self._judged("loss", sound=verdict is False)

    def _judge_model(self, model: nn.Module, args: Any, kwargs: Any, size: int) -> None:
        verdict = _outputs_meet(model, args, kwargs, size)
        if verdict:
            raise RuntimeError(
                "the model lets the examples of a batch meet: on made-up inputs, changing one example changed the "
                f"outputs of others (a statistic of the batch, attention or normalisation across it). {REMEDY}"
            )
        self._judged("model", sound=verdict is False)

    def _judged(self, what: str, *, sound: bool) -> None:
        """Sound: not to be looked at again. Not to be told from this batch: one try less."""
        self._tries_left[what] = 0 if sound else self._tries_left[what] - 1
        if self.done:
            self.close()


def _outputs_meet(model: nn.Module, args: Any, kwargs: Any, size: int) -> bool | None:
    """Whether one made-up example changes the others' outputs; None if the model cannot run on such inputs."""
    generator = torch.Generator().manual_seed(0)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    batches = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size]
    plain = [_made_up(leaf, generator) for leaf in batches]
    changed = [_changed(made, generator) for made in plain]

    def run(made: list[Tensor]) -> list[Tensor]:
        left = iter(made)
        mine = [next(left) if any(leaf is b for b in batches) else leaf for leaf in leaves]
        mine_args, mine_kwargs = pytree.tree_unflatten(mine, spec)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(_devices(model)):
            torch.manual_seed(0)  # the same dropout twice
            output = functional_call(model, buffers, mine_args, mine_kwargs)
        return [leaf for leaf in pytree.tree_leaves(output) if _is_row_wise(leaf, ROWS, graph=False)]

    try:
        before, after = run(plain), run(changed)
    except Exception:  # made-up inputs may be refused by any model, for any reason: then nothing is known
        return None
    pairs = [(a[1:], b[1:]) for a, b in zip(before, after) if a.shape == b.shape]
    known = any(torch.isfinite(a).any() for a, _ in pairs)
    return any(_differ(a, b) for a, b in pairs) if known else None


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (ROWS, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like)
    return (
        torch.zeros(shape, dtype=like.dtype, device=like.device) if like.dtype != torch.bool else like.new_ones(shape)
    )


def _changed(made: Tensor, generator: torch.Generator) -> Tensor:
    """The same but for the first example."""
    changed = made.clone()
    if made.is_floating_point():
        changed[0] = 1 + 2 * torch.randn(made.shape[1:], generator=generator).to(made)
    elif made.dtype != torch.bool:
        changed[0] = 1
    return changed


def _differ(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-6 if a.dtype == torch.float64 else 1e-3 if a.dtype == torch.float32 else 5e-2
    known = torch.isfinite(a) & torch.isfinite(b)
    off = torch.where(known, (a - b).abs(), torch.zeros_like(a))
    return bool((off > tolerance * (1 + a.abs())).any())


def _rows_meet(loss: Tensor, outputs: Sequence[Tensor]) -> bool | None:
    """Whether gradients at some rows depend on other rows; None if that cannot be told from this batch."""
    try:
        with torch.enable_grad():
            grads = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            used = [(o, g) for o, g in zip(outputs, grads) if g is not None]
            sizes = {len(output) for output, _ in used}
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
            found = torch.autograd.grad(total, [o for o, _ in used], retain_graph=True, allow_unused=True)
    except RuntimeError:  # a loss that cannot be differentiated twice
        return None
    known = [h for h in found if h is not None]
    if not known:
        return False
    inside = max(_largest(h[chosen]) for h in known)
    outside = max(_largest(h[rest]) for h in known)
    if outside > 1e-6 * inside:
        return True
    return False if inside > 0 else None


def _largest(values: Tensor) -> float:
    """Of the finite ones: 0 times infinity, in an example's own row, is no dependence on another."""
    return float(torch.where(torch.isfinite(values), values.abs(), torch.zeros_like(values)).max().nan_to_num())


def _refuse_uneven_means(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Cross entropy that divides by the class weights of the batch, or by how many of its labels count."""
    for node in _nodes(loss, {output.grad_fn for output in outputs}):
        if not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", 0) != 1:
            continue
        weighted = node._saved_weight is not None
        ignoring = node._saved_ignore_index not in NO_INDEX
        left_out = not weighted and float(node._saved_total_weight) != node._saved_target.numel()
        if weighted or ignoring or left_out:
            how = "class weights" if weighted else "ignore_index"
            raise RuntimeError(
                f"the loss is a mean with {how}: it divides by a number that the labels of all examples decide. Use "
                f"reduction='sum', and loss_reduction='sum' in make_private. {REMEDY}"
            )


def _refuse_other_reduction(loss: Tensor, mean_loss: bool) -> None:
    """A loss of torch's own that says how it combines examples, where make_private was told otherwise."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)
    if reduction == (2 if mean_loss else 1):
        found, told = ("sum", "mean") if mean_loss else ("mean", "sum")
        raise RuntimeError(
            f"the loss is a {found} over the examples of a batch, but loss_reduction is '{told}': every example would "
            f"be scaled by the size of the batch. Pass loss_reduction='{found}' to make_private."
        )


def _nodes(loss: Tensor, stop: set[Any]) -> Iterator[Any]:
    """The graph of the loss, down to the model's outputs."""
    waiting, seen = [loss.grad_fn], set(stop)
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [above for above, _ in node.next_functions]


def _batch_size(inputs: Any) -> int | None:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return len(tensors[0]) if tensors else None


def _is_row_wise(leaf: Any, size: int, graph: bool = True) -> bool:
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0 and len(leaf) == size):
        return False
    return leaf.requires_grad or not graph


def _devices(model: nn.Module) -> list[int]:
    found = {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    return sorted(found)


# -- where the user's backward() begins -------------------------------------------------------------------------------
# Torch has no hook for it. Between make_private and the first step, its entry point is wrapped; then it is put back.

_waiting: weakref.WeakSet[MixingProbe] = weakref.WeakSet()
_entry: Any = None


def _watch(probe: MixingProbe) -> None:
    global _entry
    _waiting.add(probe)
    weakref.finalize(probe, _put_back)
    if _entry is not None:
        return
    original = _entry = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for waiting in list(_waiting):
            waiting.before_backward(tensors)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _unwatch(probe: MixingProbe) -> None:
    _waiting.discard(probe)
    _put_back()


def _put_back() -> None:
    """Once nobody waits any more."""
    global _entry
    if not _waiting and _entry is not None:
        if getattr(torch.autograd.backward, "__wrapped__", None) is _entry:  # else somebody wrapped it after us
            torch.autograd.backward = cast(Any, _entry)
        _entry = None
