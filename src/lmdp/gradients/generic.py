"""Any module at all: per-example gradients by `torch.func`, one vector–Jacobian product per example, vectorised.

With f_i the module on example i alone and G_i its output gradient, J_i = (∂f_i/∂θ)ᵀ G_i is formed, and

    norm²  ||J_i||²
    sums   sum_i s_i J_i

Exact, and the slowest rule: the module's forward is repeated, and its per-example gradients are kept. The repetition
must give the outputs of the forward pass; where it does not (dropout whose mask cannot be replayed, examples that are
mixed) the rule refuses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from lmdp.gradients.contract import Example, Piece, Rule, Use, float_tensors
from lmdp.gradients.randomness import undrawn
from lmdp.gradients.rows import Rows, Stored, output_batch_dim

SHARED_ARGUMENTS = frozenset({"attn_mask", "src_mask", "tgt_mask", "mask"})
"""Keyword arguments that are shared by all examples even if their first dimension happens to be the batch size."""

_MIXES = (
    "a {kind} with parameters {names} gave other outputs when its examples were run one by one than in the batch. "
    "Either it mixes the examples of a batch, which cannot be private, or it contains masks or dropout that cannot be "
    "replayed: set its dropout to 0 and its masks off, or freeze these parameters (requires_grad_(False)) before "
    "make_private."
)
MOST_NAMES = 4
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""By how much an output may be off when it is computed again, relative to 1 + its size."""

SHORTENED = 0.1
"""The same of what autocast computed, in norm: rounding is a tenth of it, another mask of dropout several times it."""

OfOne = Callable[[list[Tensor], tuple[Tensor, ...]], tuple[dict[str, Tensor], tuple[Tensor, ...]]]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Alone:
    """The module on one example, as a function of its trained parameters. Without `dims`, on what all examples share.

    dims      of the arguments that have a row for each example: position among the flattened ones → dimension of it
    out_dims  the same of the outputs
    """

    use: Use
    leaves: list[Any]
    spec: Any
    dims: dict[int, int]
    out_dims: tuple[int, ...]

    @classmethod
    def of(cls, use: Use) -> Alone:
        leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
        leaves = [None if _is_cache(leaf) else leaf for leaf in leaves]
        dims = {} if use.shared else _input_batch_dims(use, leaves)
        out_dims = tuple(0 if use.shared else output_batch_dim(use.module, i) for i in range(len(use.output_grads)))
        return cls(use, leaves, spec, dims, out_dims)

    def whole(self) -> Outputs:
        """Of the batch, run once more."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return float_tensors(self.use.module(*args, **kwargs))

    def outputs(self, parameters: dict[str, Tensor], example: list[Tensor]) -> Outputs:
        mine = list(self.leaves)
        for (i, dim), value in zip(self.dims.items(), example):
            mine[i] = value.unsqueeze(dim)
        args, kwargs = pytree.tree_unflatten(mine, self.spec)
        return float_tensors(functional_call(self.use.module, parameters, args, kwargs))

    def aligned(self, outputs: Outputs, output_grads: Outputs) -> Outputs:
        """The gradients in the shapes of the outputs, which those must have."""
        grads = output_grads
        if not self.use.shared:
            grads = tuple(g.unsqueeze(dim) for g, dim in zip(output_grads, self.out_dims))
        if [o.shape for o in outputs] != [g.shape for g in grads]:
            raise _mixes(self.use)
        return grads

    def rows(self, outputs: Outputs) -> Outputs:
        """Without the dimension of the example."""
        return outputs if self.use.shared else tuple(o.squeeze(d) for o, d in zip(outputs, self.out_dims))

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.use.module.named_parameters() if n in self.use.trainable}

    def vectorisable(self, example: list[Tensor], output_grads: Outputs) -> tuple[dict[str, Tensor], Outputs]:
        outputs, pull = vjp(lambda parameters: self.outputs(parameters, example), self.parameters())[:2]
        (pulled,) = pull(self.aligned(outputs, output_grads))
        return pulled, self.rows(outputs)

    def plain(self, example: list[Tensor], output_grads: Outputs) -> tuple[dict[str, Tensor], Outputs]:
        """By ordinary autograd, which can differentiate what `torch.func` cannot."""
        with torch.enable_grad():
            parameters = {name: p.requires_grad_() for name, p in self.parameters().items()}
            outputs = self.outputs(parameters, example)
        grads = self.aligned(outputs, output_grads)
        reached = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads) if o.requires_grad]
        leaves = list(parameters.values())
        pulled: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if reached:
            given, at = [g for _, g in reached], [o for o, _ in reached]
            pulled = torch.autograd.grad(at, leaves, given, allow_unused=True)
        each = {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), pulled)}
        return each, tuple(output.detach() for output in self.rows(outputs))


def piece(use: Use) -> Piece:
    """Example i alone is run through the module, and its output gradients are pulled back to the parameters."""
    alone = Alone.of(use)
    with undrawn(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # a loop inside torch: nothing to do
        use.as_before()  # the same dropout as in the forward pass
        rows, again = _for_each(alone)
        _check_replay(alone, again)
    return Stored({name: Rows.of(value.detach()) for name, value in rows.items()})


def _for_each(alone: Alone) -> tuple[dict[str, Tensor], Outputs]:
    """All examples at once where torch can vectorise the module, one after the other where it cannot."""
    inputs, dims = [alone.leaves[i].detach() for i in alone.dims], list(alone.dims.values())
    grads, out_dims = alone.use.output_grads, alone.out_dims
    try:
        each = vmap(alone.vectorisable, in_dims=(dims, out_dims), randomness="different")
        vectorised: tuple[dict[str, Tensor], Outputs] = each(inputs, grads)
        return vectorised
    except RuntimeError:
        singles = [
            alone.plain(
                [value.select(dim, i) for value, dim in zip(inputs, dims)],
                tuple(g.select(dim, i) for g, dim in zip(grads, out_dims)),
            )
            for i in range(grads[0].shape[out_dims[0]])
        ]
    names = singles[0][0]
    outputs = tuple(torch.stack([one[1][k] for one in singles]) for k in range(len(grads)))
    return {name: torch.stack([one[0][name] for one in singles]) for name in names}, outputs


def _check_replay(alone: Alone, again: Outputs) -> None:
    """Refuse unless the module, run on each example alone, gave what it gave in the batch.

    What autocast computed is too coarse to compare with. So the batch is run once more in full precision: sharply
    compared it shows whether examples meet, and coarsely whether this was the computation of the forward pass.
    """
    use, before, off = alone.use, alone.use.outputs, list[Tensor]()
    if use.autocast:
        use.as_before()
        whole = alone.whole()
        whole = tuple(o.expand(g.shape) for o, g in zip(whole, use.output_grads))
        off += [_norm(b.to(w.dtype) - w) > SHORTENED * _norm(w) for b, w in zip(before, whole)]
        before = whole
    for b, after, dim in zip(before, again, alone.out_dims):
        b = b.movedim(dim, 0)
        if b.shape != after.shape:
            raise _mixes(use)
        finite = torch.isfinite(b) & torch.isfinite(after)
        by = torch.where(finite, (b.to(after.dtype) - after).abs(), torch.zeros_like(after))
        off.append((by > ROUNDING[after.dtype] * (1 + b.abs())).any())

    def refuse() -> None:
        raise _mixes(use)

    use.when(off, refuse)


def _is_cache(argument: Any) -> bool:
    """What a model of transformers remembers words in, for those that follow. Run again, it would hold them twice; left
    out, whatever it held before is missing, and the outputs differ, which is refused."""
    return any(kind.__name__.endswith("Cache") for kind in type(argument).__mro__)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.where(torch.isfinite(values), values, torch.zeros_like(values)))
    return norm


def _mixes(use: Use) -> RuntimeError:
    names = sorted(use.trainable)
    told = f"{names[:MOST_NAMES]} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else names
    return RuntimeError(_MIXES.format(kind=type(use.module).__name__, names=told))


def _input_batch_dims(use: Use, leaves: list[Any]) -> dict[int, int]:
    """Position among the flattened arguments → dimension of the example, for those that have one."""
    shared = _shared_leaves(use) | use.same_for_all
    dims = {}
    for i, leaf in enumerate(leaves):
        dim = 1 if isinstance(use.module, nn.RNNBase) and i > 0 else 0
        if i not in shared and isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == use.batch_size:
            dims[i] = dim
    return dims


def _shared_leaves(use: Use) -> set[int]:
    """Positions, among the flattened arguments, of tensors known to be the same for every example."""
    position = len(pytree.tree_leaves(use.args))
    shared: set[int] = set()
    for name, value in use.kwargs.items():
        count = len(pytree.tree_leaves(value))
        if name in SHARED_ARGUMENTS:
            shared.update(range(position, position + count))
        position += count
    return shared


RULE = Rule(
    "generic",
    (),
    piece,
    lambda trainable: ("generic", "no exact rule for this module: each example is run again by torch.func"),
    (
        Example(lambda: nn.PReLU(4), (4, 3)),
        Example(lambda: nn.ConvTranspose1d(3, 2, 2), (3, 5)),
    ),
    runs_again=True,
)
