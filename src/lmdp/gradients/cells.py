"""One direction of one recurrent layer: the gradients at its gates, backward in time.

T times, B examples, the longest first, of which [:sizes[t]] have something at time t; G numbers at the gates of one
example at one time. h, which a module gives out, is the state after a time, and c what an LSTM keeps beside it:

    LSTM  i, f, o = σ(·), n = tanh(·);  c ← f c + i n;  h = o tanh(c), or that projected by weight_hr
    GRU   r, z = σ(·), n = tanh(x's + r (h's));  h ← (1 - z) n + z h
    RNN   h = tanh(·), or what of it is positive

All h are known, so the gates of all times are one product, and so is what the gradient at h is multiplied with on its
way to each gate. Only the gradients themselves must wait for each other: a few small operations for each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

At = tuple[int, slice]
"""A time, and examples."""

_tanh_back: Callable[..., Tensor] = torch.ops.aten.tanh_backward.grad_input
_sigmoid_back: Callable[..., Tensor] = torch.ops.aten.sigmoid_backward.grad_input


@dataclass(frozen=True)
class Order:
    """In which times follow each other, and how many examples have something at each."""

    sizes: Sequence[int]
    reverse: bool

    @property
    def forward(self) -> list[At]:
        at = [(t, slice(size)) for t, size in enumerate(self.sizes)]
        return at[::-1] if self.reverse else at

    def before(self, after: Tensor, first: Tensor | None, out: Tensor) -> None:
        """From a state after every time [T, B, ·], to that before it; `first`: before an example's first time."""
        out[:] = 0 if first is None else first
        if not self.reverse:
            out[1:] = after[:-1]
        elif self.sizes[-1] == self.sizes[0]:
            out[:-1] = after[1:]
        else:  # an example's last time is its first one here
            for t, size in enumerate(self.sizes[1:]):
                out[t, :size] = after[t + 1, :size]


class Cell(Protocol):
    """Its gates [T, B, G] are made of what x and h bring to them: what the gradient at h is to be multiplied with."""

    def back(self, at: At, at_h: Tensor) -> Tensor:
        """One time back: gradients at the gates, and at what h brought to them. `at_h` keeps what h itself gets."""
        ...


class Lstm:
    """at_c: the gradient at c; projected: (u, gradient at its projection) [T, B, ·], with weight_hr."""

    def __init__(self, taken_in: Tensor, weight: Tensor, order: Order, first: Tensor, weight_hr: Tensor | None) -> None:
        """taken_in [T, B, K], weight [4 · width, K], the first c [B, width]"""
        self._hr, self.at_c = weight_hr, torch.zeros_like(first)
        kinds = zip(weight.chunk(4), ("sigmoid", "sigmoid", "tanh", "sigmoid"))
        i, f, n, o = (product(taken_in, rows, then=then) for rows, then in kinds)
        new = i * n
        c = first.expand(len(new) + 1, -1, -1).contiguous()  # between times
        before, after = (c[1:], c[:-1]) if order.reverse else (c[:-1], c[1:])
        for at in order.forward:
            torch.addcmul(new[at], f[at], before[at], out=after[at])
        tanh = torch.tanh(after, out=new)
        self.projected = None
        if weight_hr is not None:
            self.projected = o * tanh, tanh.new_zeros(*tanh.shape[:2], len(weight_hr))
        # h = o tanh(c), c = f (c before) + i n: what the gradients at h and c are multiplied with on their way
        self.gates = new.new_empty(*new.shape[:2], len(weight))
        at_i, at_f, at_n, at_o = self.gates.chunk(4, 2)
        _sigmoid_back(n, i, grad_input=at_i)
        _sigmoid_back(before, f, grad_input=at_f)
        _tanh_back(i, n, grad_input=at_n)
        _sigmoid_back(tanh, o, grad_input=at_o)
        shares = (at_i, at_f, at_n, at_o, _tanh_back(o, tanh, grad_input=tanh), f)
        self._shares = list(zip(*(share.unbind() for share in shares)))

    def back(self, at: At, at_h: Tensor) -> Tensor:
        gates, at_c, at_u = self.gates[at], self.at_c[at[1]], at_h
        if self._hr is not None and self.projected is not None:
            self.projected[1][at] = at_h
            at_u = product(at_h, self._hr.T)
        at_i, at_f, at_n, at_o, from_h, from_c = (share[at[1]] for share in self._shares[at[0]])
        at_c.addcmul_(at_u, from_h)
        for gate in (at_i, at_f, at_n):
            gate.mul_(at_c)
        at_o.mul_(at_u)
        at_c.mul_(from_c)
        at_h.zero_()
        return gates


class Gru:
    """by_state [T, B, G]: the gradients at what h brings to the gates."""

    def __init__(self, gates: Tensor, by_state: Tensor, before: Tensor) -> None:
        self.gates, self.by_state = gates, by_state
        (r, z, n), (by_r, by_z, by_n) = (each.unflatten(2, (3, -1)).unbind(2) for each in (gates, by_state))
        r.add_(by_r).sigmoid_()
        z.add_(by_z).sigmoid_()
        n.addcmul_(r, by_n).tanh_()
        self._from_h = z.clone()
        _sigmoid_back(before - n, z, grad_input=by_z)
        _tanh_back(1 - z, n, grad_input=n)
        _sigmoid_back(n * by_n, r, grad_input=by_r)
        torch.mul(n, r, out=by_n)

    def back(self, at: At, at_h: Tensor) -> Tensor:
        by_state = self.by_state[at]
        for share in (*by_state.chunk(3, 1), self.gates[at].chunk(3, 1)[2]):
            share.mul_(at_h)
        at_h.mul_(self._from_h[at])
        return by_state

    def finish(self) -> None:
        """Of r and z, what x brings gets what h's does."""
        width = self.gates.shape[2] // 3 * 2
        self.gates[:, :, :width] = self.by_state[:, :, :width]


class Rnn:
    def __init__(self, h: Tensor, *, relu: bool) -> None:
        self.gates = (h > 0).to(h.dtype) if relu else 1 - h.square()

    def back(self, at: At, at_h: Tensor) -> Tensor:
        gates = self.gates[at].mul_(at_h)
        at_h.zero_()
        return gates


@dataclass(frozen=True)
class Linear:
    """A linear layer over times: what it takes in [T, B, K], the gradients at what it gives out [T, B, G].

    `widths`: of the parameters that its columns belong to, in their order; a bias has one column, of ones.
    """

    x: Tensor
    g: Tensor
    widths: dict[str, int]


class Direction:
    """One direction of one layer, of which all that it gave out is known.

    states  by `back`, the gradients at the first h, and in an LSTM c
    layers  by `back`, the linear layers that it is made of
    """

    layers: list[Linear]

    def __init__(
        self,
        mode: str,
        weights: Mapping[str, Tensor],
        x: Tensor,
        h: Tensor,
        start: Sequence[Tensor],
        order: Order,
    ) -> None:
        """x [T, B, inputs], h [T, B, states]; `start`: the first h [B, states], and in an LSTM c; none if zero."""
        self._weights, self._order = weights, order
        inputs, states, ones = x.shape[2], h.shape[2], "bias_ih" in weights
        self._by_input, self._by_state = inputs + ones, states + ones  # columns
        self._taken_in = x.new_empty(*x.shape[:2], self._by_input + self._by_state)
        taken = dict(zip(("x", "1", "h", "1'"), self._taken_in.split([inputs, ones, states, ones], 2)))
        taken["x"][:] = x
        taken["1"][:] = taken["1'"][:] = 1
        order.before(h, start[0] if start else None, taken["h"])
        self.states = [torch.zeros_like(h[0])]
        self._cell: Lstm | Gru | Rnn
        if mode == "LSTM":
            first = x.new_zeros(x.shape[1], len(weights["weight_hh"]) // 4) if not start else start[1]
            self._cell = Lstm(self._taken_in, self._columns(), order, first, weights.get("weight_hr"))
            self.states.append(self._cell.at_c)
        elif mode == "GRU":
            by_input = product(x, weights["weight_ih"], weights.get("bias_ih"))
            by_state = product(taken["h"].contiguous(), weights["weight_hh"], weights.get("bias_hh"))
            self._cell = Gru(by_input, by_state, taken["h"])
        else:
            self._cell = Rnn(h, relu=mode == "RNN_RELU")

    def _columns(self) -> Tensor:
        """What is taken in is multiplied with."""
        kinds = [kind for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh") if kind in self._weights]
        return torch.cat([self._weights[kind].view(len(self._weights["weight_hh"]), -1) for kind in kinds], 1)

    def back(self, at_output: Tensor, at_last: Sequence[Tensor]) -> Tensor:
        """From the gradients at the output [T, B, states] and at the last states: that at x."""
        w_hh, cell, sizes = self._weights["weight_hh"], self._cell, self._order.sizes
        for state, gradient in zip(self.states, at_last):
            state.copy_(gradient)
        for at in reversed(self._order.forward):
            at_h = self.states[0][at[1]]
            at_h += at_output[at]
            at_h += product(cell.back(at, at_h), w_hh.T)
        if isinstance(cell, Gru):
            cell.finish()
        for t, size in enumerate(sizes if sizes[-1] < sizes[0] else ()):
            for gates in (cell.gates, cell.by_state) if isinstance(cell, Gru) else (cell.gates,):
                gates[t, size:] = 0
        self.layers = self._linear_layers()
        del self._cell, self._taken_in  # what is not in these is not needed any more
        return product(cell.gates, self._weights["weight_ih"].T)

    def _linear_layers(self) -> list[Linear]:
        cell, taken_in = self._cell, self._taken_in
        by_input, by_state = {"weight_ih": self._by_input}, {"weight_hh": self._by_state}
        if "bias_ih" in self._weights:
            by_input = {"weight_ih": self._by_input - 1, "bias_ih": 1}
            by_state = {"weight_hh": self._by_state - 1, "bias_hh": 1}
        if isinstance(cell, Gru):
            x, h = (part.contiguous() for part in taken_in.split([self._by_input, self._by_state], 2))
            return [Linear(x, cell.gates, by_input), Linear(h, cell.by_state, by_state)]
        both = Linear(taken_in, cell.gates, by_input | by_state)  # they bring their share to the same gates
        if isinstance(cell, Rnn) or cell.projected is None:
            return [both]
        return [both, Linear(*cell.projected, {"weight_hr": cell.projected[0].shape[2]})]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, then: str = "none") -> Tensor:
    """x weightᵀ + bias, or its "sigmoid" or "tanh", by oneDNN where torch has it: it is what torch runs an LSTM with,
    and on processors that are not Intel's twice as fast as the library that other products are made with."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and _has_onednn():
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
        return result
    plain = F.linear(x, weight, bias)
    return plain if then == "none" else getattr(plain, then)()


@functools.cache
def _has_onednn() -> bool:
    """Tried, not read off a version: the operation is not part of torch's interface."""
    x, weight, bias = torch.eye(3), torch.arange(6.0).view(2, 3), torch.ones(2)
    try:
        tried, *curved = (
            torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "") for then in ("none", "sigmoid", "tanh")
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = torch.sigmoid(weight.T + 1), torch.tanh(weight.T + 1)
    return torch.equal(tried, weight.T + 1) and all(map(functools.partial(torch.allclose, atol=1e-5), curved, expected))
