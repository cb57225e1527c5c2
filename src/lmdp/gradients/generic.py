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
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from lmdp.gradients.contract import Example, Piece, Rule, Use, float_tensors
from lmdp.gradients.rows import Rows, Stored, output_batch_dim

SHARED_ARGUMENTS = frozenset({"attn_mask", "src_mask", "tgt_mask", "mask"})
"""Keyword arguments that are shared by all examples even if their first dimension happens to be the batch size."""

_MIXES = (
    "a {kind} with parameters {names} gave other outputs when its examples were run one by one than in the batch. "
    "Either it mixes the examples of a batch, which cannot be private, or it contains dropout that cannot be replayed: "
    "set its dropout to 0."
)

OfOne = Callable[[list[Tensor], tuple[Tensor, ...]], tuple[dict[str, Tensor], tuple[Tensor, ...]]]


def piece(use: Use) -> Piece:
    """Example i alone is run through the module, and its output gradients are pulled back to the parameters."""
    leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
    dims = _input_batch_dims(use, leaves)
    out_dims = tuple(output_batch_dim(use.module, i) for i in range(len(use.output_grads)))
    parameters = {n: p.detach() for n, p in use.module.named_parameters() if n in use.trainable}

    def gradients(example: list[Tensor], output_grads: tuple[Tensor, ...]) -> Any:
        def forward(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            mine = list(leaves)
            for (i, dim), value in zip(dims.items(), example):
                mine[i] = value.unsqueeze(dim)
            args, kwargs = pytree.tree_unflatten(mine, spec)
            return float_tensors(functional_call(use.module, parameters, args, kwargs))

        outputs, pull = vjp(forward, parameters)[:2]
        if any(o.shape != g.unsqueeze(d).shape for o, g, d in zip(outputs, output_grads, out_dims)):
            raise RuntimeError(_MIXES.format(kind=type(use.module).__name__, names=sorted(use.trainable)))
        (pulled,) = pull(tuple(g.unsqueeze(dim) for g, dim in zip(output_grads, out_dims)))
        return pulled, tuple(output.squeeze(dim) for output, dim in zip(outputs, out_dims))

    inputs = [leaves[i].detach() for i in dims]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # a loop inside torch: nothing to do
        if use.rng_state is not None:
            torch.set_rng_state(use.rng_state)  # the same dropout as in the forward pass
        rows, again = _for_each(gradients, inputs, list(dims.values()), use.output_grads, out_dims)
    _check_replay(use, again, out_dims)
    return Stored({name: Rows.of(value.detach()) for name, value in rows.items()})


def _for_each(
    gradients: OfOne, inputs: list[Tensor], dims: list[int], grads: tuple[Tensor, ...], out_dims: tuple[int, ...]
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """All examples at once where torch can vectorise the module, one after the other where it cannot."""
    try:
        each = vmap(gradients, in_dims=(dims, out_dims), randomness="different")
        vectorised: tuple[dict[str, Tensor], tuple[Tensor, ...]] = each(inputs, grads)
        return vectorised
    except RuntimeError:
        with torch.enable_grad():  # some fused kernels keep what backward needs only then
            singles = [
                gradients(
                    [value.select(dim, i) for value, dim in zip(inputs, dims)],
                    tuple(g.select(dim, i) for g, dim in zip(grads, out_dims)),
                )
                for i in range(grads[0].shape[out_dims[0]])
            ]
    names = singles[0][0]
    outputs = tuple(torch.stack([one[1][k] for one in singles]) for k in range(len(grads)))
    return {name: torch.stack([one[0][name] for one in singles]) for name in names}, outputs


def _check_replay(use: Use, again: tuple[Tensor, ...], out_dims: tuple[int, ...]) -> None:
    """Raise unless the module, run on each example alone, gave what it gave in the batch."""
    tolerance = 1e-3 if use.output_grads[0].dtype == torch.float32 else 1e-6
    for before, after, dim in zip(use.outputs, again, out_dims):
        before = before.movedim(dim, 0).to(after.dtype)
        finite = torch.isfinite(before) & torch.isfinite(after)
        off = torch.where(finite, (before - after).abs(), torch.zeros_like(after))
        if before.shape != after.shape or (off > tolerance * (1 + before.abs())).any():
            raise RuntimeError(_MIXES.format(kind=type(use.module).__name__, names=sorted(use.trainable)))


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
        Example(lambda: nn.GRU(4, 5, batch_first=True), (3, 4)),
        Example(lambda: nn.ConvTranspose1d(3, 2, 2), (3, 5)),
    ),
    runs_again=True,
)
