"""Any module at all: per-example gradients by `torch.func`, one vector–Jacobian product per example, vectorised.

Exact, and the slowest rule: the module's forward is repeated, and its per-example gradients are kept.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils import _pytree as pytree

from lmdp.private.rules.pieces import Piece, Rows, Stored, Use

SHARED_ARGUMENTS = frozenset({"attn_mask", "src_mask", "tgt_mask", "mask"})
"""Keyword arguments that are shared by all examples even if their first dimension happens to be the batch size."""


def piece(use: Use) -> Piece:
    """Example i alone is run through the module, and its output gradients are pulled back to the parameters."""
    leaves, spec = pytree.tree_flatten((use.args, use.kwargs))
    dims = _input_batch_dims(use, leaves)
    parameters = {n: p.detach() for n, p in use.module.named_parameters() if n in use.trainable}
    if use.batch_size == 0:
        return Stored({name: Rows.of(value.new_zeros(0, *value.shape)) for name, value in parameters.items()})
    out_dims = tuple(output_batch_dim(use.module, i) for i in range(len(use.output_grads)))

    def gradients(example: list[Tensor], output_grads: tuple[Tensor, ...]) -> Any:
        def forward(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            mine = list(leaves)
            for (i, dim), value in zip(dims.items(), example):
                mine[i] = value.unsqueeze(dim)
            args, kwargs = pytree.tree_unflatten(mine, spec)
            return float_tensors(functional_call(use.module, parameters, args, kwargs))

        pull = vjp(forward, parameters)[1]
        return pull(tuple(g.unsqueeze(dim) for g, dim in zip(output_grads, out_dims)))[0]

    inputs = [leaves[i].detach() for i in dims]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # a loop inside torch: nothing to do
        if use.rng_state is not None:
            torch.set_rng_state(use.rng_state)  # the same dropout as in the forward pass
        each = vmap(gradients, in_dims=(list(dims.values()), out_dims), randomness="different")
        found = each(inputs, use.output_grads)
    return Stored({name: Rows.of(value.detach()) for name, value in found.items()})


def float_tensors(output: Any) -> tuple[Tensor, ...]:
    """The differentiable tensors in a module's output, whatever it is wrapped in."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if is_float(leaf))


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def output_batch_dim(module: nn.Module, position: int) -> int:
    """Which dimension of a module's output is the example: the first, except for the states of a recurrent layer."""
    return 1 if isinstance(module, nn.RNNBase) and position > 0 else 0


def _input_batch_dims(use: Use, leaves: list[Any]) -> dict[int, int]:
    """Position among the flattened arguments → dimension of the example, for those that have one."""
    shared = _shared_leaves(use)
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
