"""Tensors that are the same for every example: a position table looked up once, and all that is computed from it.

Ordinary autograd would add the examples' gradients up where such a tensor meets a batch. Instead it is followed until
then: it keeps its shape and its value, and is computed once. Where it meets a tensor whose rows are examples, every
example is given a copy of its own, so that the gradient of each arrives apart; it is pulled back through what was
computed, for all of them at once, to the module that gave it out.

    index → module → value ─ permute, dropout, + mask … ─ Shared ┬ copies [B, …] + x [B, …] → an ordinary tensor
                       └──────── gradients [B, …] ←── pulled back ┘

Nothing is guessed. An operation that is not in the tables below is refused by name, and a gradient that comes another
way (through code that torch does not show us, or in a loss that no example took part in) is refused where it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lmdp.gradients.hosts import unfollowed
from lmdp.gradients.leading import ROWS, SHARED, Shape

BROADCASTING = frozenset(
    {
        *("add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply"),
        *("div", "rdiv", "truediv", "rtruediv", "divide", "true_divide"),
        *("where", "masked_fill", "maximum", "minimum", "lerp", "addcmul"),
    }
)
"""Operations that align dimensions from the last, each row with its like."""

PRODUCTS = frozenset({"matmul", "rmatmul", "bmm", "baddbmm", "scaled_dot_product_attention"})
"""The same of all dimensions but the last two, which must not be the examples."""

JOINING = frozenset({"cat", "concat", "concatenate"})
EXPANDING = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})
ONLY_LIKE = frozenset({"to", "type_as", "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like"})
"""Of another tensor they read the type at most."""


class Base:
    """What a module gave out, the same for every example. All that is computed from it starts at the leaf `value`.

    report  number of examples → the copies [B, *shape], made to report their gradients
    ask     operation, shape, and what it is taken for until that is established → whether its rows are the examples
    later   why its gradients cannot be told → whether that is refused at the end of the forward pass; otherwise now
    """

    def __init__(
        self,
        module: str,
        value: Tensor,
        report: Callable[[int], Tensor],
        ask: Callable[[str, Shape, str], str],
        later: Callable[[str], bool],
    ) -> None:
        self.module, self.report, self.ask, self.later = module, report, ask, later
        self.value = value.detach().requires_grad_(True)
        self.value.register_post_accumulate_grad_hook(self._refuse_unseen)
        self._copies: dict[int, Tensor] = {}

    def tensor(self) -> Shared:
        return _shared(self.value, (self,))

    def copies(self, size: int) -> Tensor:
        if size not in self._copies:
            self._copies[size] = self.report(size)
        return self._copies[size]

    def _refuse_unseen(self, leaf: Tensor) -> None:
        leaf.grad = None
        self.refuse("reaches the loss without meeting the examples, or in a way that cannot be followed")

    def refuse(self, what: str) -> NoReturn:
        raise RuntimeError(unfollowed(self.module, what, {}))


class Shared(Tensor):
    """Its values are those of a plain tensor; `bases` are what it was computed from."""

    bases: tuple[Base, ...]
    given: dict[tuple[int, bool], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        plain = name.strip("_") if name != "__get__" else name
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        bases = tuple({base: None for t in tensors if isinstance(t, Shared) for base in t.bases})
        batches = [t for t in tensors if not isinstance(t, Shared) and t.requires_grad]
        if _is_in_place(name) and isinstance(tensors[0], Shared):
            bases[0].refuse(f"is changed in place by '{name}'")
        if batches and plain not in ONLY_LIKE:
            return _meet(func, plain, args, kwargs, tensors, batches)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (plain in BROADCASTING or plain in EXPANDING):
            rows = _spread_out(func, plain, args, kwargs, tensors, result)
            if rows is not None:
                return rows
        return pytree.tree_map(lambda leaf: _shared(leaf, bases) if _is_computed(leaf) else leaf, result)

    def for_each(self, size: int, *, own_row: bool = False) -> Tensor:
        """A copy [B, *shape] for every example; with `own_row`, example i uses row i of this tensor and no other."""
        if (size, own_row) not in self.given:
            value = _plain(self)
            copies = [base.copies(size) for base in self.bases]
            # In a tuple, where autograd does not see the value: gradients go to the copies.
            self.given[size, own_row] = _ForEach.apply((value, self.bases), size, own_row, *copies)  # type: ignore[no-untyped-call]
        return self.given[size, own_row]


class _ForEach(torch.autograd.Function):
    """From the copies of bases to copies of what was computed from them: nothing but an expansion, until backward."""

    @staticmethod
    def forward(ctx: Any, of: tuple[Tensor, tuple[Base, ...]], size: int, own_row: bool, *copies: Tensor) -> Tensor:
        ctx.of, ctx.own_row = of, own_row
        value = of[0].detach()
        return value if own_row else value.expand(size, *value.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        value, bases = ctx.of
        return (None, None, None, *_pulled_back(value, [base.value for base in bases], grad, ctx.own_row))


def _pulled_back(value: Tensor, leaves: Sequence[Tensor], grad: Tensor, own_row: bool) -> list[Tensor | None]:
    """[B, *shape of each leaf], from each example's gradient at `value`."""

    def pull(one: Tensor, *, batched: bool = False) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(value, leaves, one, retain_graph=True, allow_unused=True, is_grads_batched=batched)

    if not own_row:
        try:
            return list(pull(grad, batched=True))
        except RuntimeError:  # an operation that torch cannot differentiate for all examples at once
            pass
    each = []
    for i in range(len(grad)):
        mine = grad[i]
        if own_row:
            mine = torch.zeros_like(grad)
            mine[i] = grad[i]
        each.append(pull(mine))
    return [None if column[0] is None else torch.stack(column) for column in zip(*each)]


def _meet(func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], batches: list[Tensor]) -> Any:
    """The operation with copies in the place of what is shared: its result is an ordinary tensor of examples."""
    shared = [t for t in tensors if isinstance(t, Shared)]
    base, dims, rows = shared[0].bases[0], max(t.dim() for t in tensors), batches[0].shape[:1]
    joined_rows = name in JOINING and _joined_dim(args, kwargs) in (0, -dims)
    aligned = name in BROADCASTING | EXPANDING | JOINING or (name in PRODUCTS and dims > 2)
    if not aligned or joined_rows or not rows or any(t.dim() != dims or t.shape[:1] != rows for t in batches):
        what = f"meets the examples in '{name}', of which it is not established what it does with them"
        return _unfollowed(base, what, func, args, kwargs)
    size = rows[0]
    if base.ask(f"{name} on {base.module}", tuple(batches[0].shape), ROWS) != ROWS:
        what = f"meets a tensor whose first dimension is not the example, in '{name}'"
        return _unfollowed(base, what, func, args, kwargs)
    if name == "expand_as":
        return _rows(shared[0], dims, size).expand(batches[0].shape)
    return _with_rows(func, args, kwargs, dims, size)


def _unfollowed(base: Base, what: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Refused: at the end of the forward pass if possible, because what to do is told from all of it."""
    if not base.later(what):
        base.refuse(what)
    args, kwargs = pytree.tree_map(plain_value, (args, kwargs))
    return func(*args, **kwargs)


def _spread_out(func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> Tensor | None:
    """The same where a mask of the examples, or their number, gave the result a row for each; None where it did not.

    To go on with a tensor of so many rows as shared would be exact too, but takes a batch of such tensors later on.
    """
    shared = [t for t in tensors if isinstance(t, Shared)]
    base = shared[0].bases[0]
    kind = base.ask(f"{name} on {base.module}", tuple(result.shape), SHARED)
    dims = result.dim()
    if kind != ROWS or any(t.dim() == dims and len(t) != 1 for t in shared):
        return None
    size = len(result)
    if name in BROADCASTING:
        ordinary: Tensor = _with_rows(func, args, kwargs, dims, size)
        return ordinary
    rows = _rows(shared[0], dims, size)
    if name == "repeat":
        return rows.repeat(1, *[whole // part for whole, part in zip(result.shape[1:], rows.shape[1:])])
    return rows.expand(result.shape)


def _with_rows(func: Any, args: Any, kwargs: Any, dims: int, size: int) -> Any:
    def replaced(leaf: Any) -> Any:
        return _rows(leaf, dims, size) if isinstance(leaf, Shared) else leaf

    args, kwargs = pytree.tree_map(replaced, (args, kwargs))
    return func(*args, **kwargs)


def _rows(shared: Shared, dims: int, size: int) -> Tensor:
    """The copies, aligned with a tensor of examples that has `dims` dimensions."""
    if shared.dim() < dims:
        copies = shared.for_each(size)
        return copies.view(size, *[1] * (dims - 1 - shared.dim()), *copies.shape[1:])
    if len(shared) == 1:
        return shared.for_each(size).squeeze(1)
    if len(shared) != size:
        shared.bases[0].refuse("has another number of rows than the examples that it meets")
    return shared.for_each(size, own_row=True)


def _joined_dim(args: Any, kwargs: Any) -> int:
    return int(kwargs.get("dim", args[1] if len(args) > 1 else 0))


def _is_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, Shared)


def _shared(value: Tensor, bases: tuple[Base, ...]) -> Shared:
    tensor = value.as_subclass(Shared)
    tensor.bases, tensor.given = bases, {}
    return tensor


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain: Tensor = tensor.as_subclass(Tensor)
        return plain


def plain_value(leaf: Any) -> Any:
    """Of a shared tensor its value, without where it came from; anything else as it is."""
    return _plain(leaf).detach() if isinstance(leaf, Shared) else leaf
