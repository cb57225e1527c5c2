"""What is saved with a model and carries no noise: known by its content, and looked at in every step.

    noised      the parameters of the private step: nothing but the optimizer may change them
    the rest    frozen parameters, buffers and extra state: nothing may change them at all

A change of one of these would publish private data without noise, or data that no account knows of. Between steps,
tensors are compared by their bits, large ones by a sum of them; a statement compares digests. Of a sharded parameter
each process compares what it holds. All this begins when the
first private batch is handed out: what comes before is set up, not trained.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from lmdp.gradients.fetching import Fetching, Flag
from lmdp.gradients.leaving import only_looked_at
from lmdp.guards.verdicts import HOLDS, Judgement, Verdict

COLUMNS = 1021
SMALL = 2**13
"""Numbers of tensors that are compared one by one."""


T = TypeVar("T")


def local(tensor: T) -> T:
    """What this process holds of a tensor: the tensor itself, unless it is sharded."""
    return cast(T, getattr(tensor, "_local_tensor", tensor))


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def unnoised(module: nn.Module, noised: Mapping[str, Tensor] | None = None) -> dict[str, str]:
    """Name → fingerprint, of everything that training should leave as it is.

    That is all in `state_dict()`, and buffers that are not in it, except what `noised` names: the trainable parameters
    unless given.
    """
    if noised is None:
        noised = {name: p for name, p in module.named_parameters() if p.requires_grad}
    ours = {id(p) for p in noised.values()}
    held: dict[str, Any] = dict(module.named_buffers(remove_duplicate=False))
    held |= {name: p for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in ours}
    return {name: _digest(value) for name, value in held.items()} | extra_state(module)


def extra_state(module: nn.Module) -> dict[str, str]:
    """Name → fingerprint, of what is saved besides parameters and buffers as they are."""
    held = [local(tensor) for tensor in (*module.parameters(), *module.buffers())]
    ours = {t.data_ptr() for t in held if t.numel()}

    def is_ours(value: Any) -> bool:
        value = local(value)
        return isinstance(value, Tensor) and (not value.numel() or value.data_ptr() in ours)

    with only_looked_at():
        saved = module.state_dict()
    return {name: _digest(value) for name, value in saved.items() if not is_ours(value)}


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Equal exactly where bits are."""
    return {name: _digest(tensor) for name, tensor in tensors}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """One for all of them."""
    return _digest(sorted(fingerprints(tensors.items()).items()))


def _digest(value: Any) -> str:
    value = local(value)
    if not isinstance(value, Tensor):
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    if not value.numel() or value.is_meta:
        return ""
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=16).hexdigest()


class Glance:
    """The bits of some tensors at one moment, cheap enough for every step."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        present = [local(t).detach() for t in tensors if t is not None]
        small = [t for t in present if t.numel() <= SMALL]
        kinds = dict.fromkeys((t.dtype, t.device) for t in small)
        self._bits = [torch.cat([t.reshape(-1) for t in small if (t.dtype, t.device) == kind]) for kind in kinds]
        sums = [sum_of_bits(t) for t in present if t.numel() > SMALL]
        self._sums = [torch.cat([t for t in sums if t.device == at]) for at in dict.fromkeys(t.device for t in sums)]

    @property
    def digest(self) -> int:
        """The same where the bits are; in 63 of them."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (*self._bits, *self._sums):
            digest.update(tensor.cpu().view(torch.uint8).numpy().data)
        return int.from_bytes(digest.digest(), "big") >> 1

    def differs(self, other: Glance) -> list[Flag]:
        """Whether one of these is set. On a device nobody waits for the answer."""
        mine, theirs = ([*glance._bits, *glance._sums] for glance in (self, other))
        if [(t.shape, t.device) for t in mine] != [(t.shape, t.device) for t in theirs]:
            return [True]
        return [_other_bits(a, b) for a, b in zip(mine, theirs)]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Of a tensor's numbers, however they were written: int64 [n]."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
    per_word = 8 // flat.element_size()
    words = flat[: flat.numel() // per_word * per_word]
    words = words.clone() if words.storage_offset() % per_word else words
    rest = flat[len(words) :].clone().view(torch.uint8)
    words = words.view(torch.int64)
    whole = len(words) // COLUMNS * COLUMNS
    columns = words[:whole].view(-1, COLUMNS).sum(dim=0)  # so that another order of the numbers is seen
    return torch.cat([columns, words[whole:].sum()[None], rest.to(torch.int64)])


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill their storage, in whatever order."""
    order = sorted(zip(tensor.stride(), tensor.shape))
    expected = 1
    for stride, length in order:
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _other_bits(a: Tensor, b: Tensor) -> Flag:
    a, b = a.view(torch.uint8), b.view(torch.uint8)
    return not torch.equal(a, b) if a.is_cpu else (a != b).any()


class Content:
    """Compares, and says what it sees to the judgement. `begin` once, then `check` and `settle` around every step."""

    def __init__(
        self, model: nn.Module, noised: Mapping[str, nn.Parameter], judgement: Judgement, fetching: Fetching
    ) -> None:
        self._model, self._noised, self._judgement, self._fetching = model, noised, judgement, fetching
        ours = {id(p) for p in noised.values()}
        places = [(m._parameters, name) for m in model.modules() for name in m._parameters]
        self._places = [(held, name, held[name]) for held, name in places if id(held[name]) in ours]
        self._frozen = [(held, name) for held, name in places if id(held[name]) not in ours]
        self._buffers = [(m._buffers, name) for m in model.modules() for name in m._buffers]
        self._names = _names(model)
        self._unnoised: dict[str, str] | None = None
        self._glances: tuple[Glance, Glance] | None = None
        self._left: dict[str, str] | None = None

    def begin(self) -> bool:
        """Private data is about to be seen. Only the first call counts, and says so."""
        if self._glances is not None:
            return False
        self._refuse_replaced()
        self._unnoised = unnoised(self._model, self._noised)
        self._glances = Glance(self._noised.values()), self._glance_at_rest()
        return True

    @property
    def digest(self) -> int:
        """Of the parameters as the last step has left them, to compare them over processes."""
        return 0 if self._glances is None else self._glances[0].digest

    def restart(self) -> None:
        """What was loaded counts as the beginning."""
        self._glances = self._unnoised = None

    def check(self) -> None:
        """Before a release: only the optimizer may have changed anything since the last one, and only parameters."""
        self._refuse_replaced()
        if any(p is not None and p.requires_grad for p in (held.get(name) for held, name in self._frozen)):
            unfrozen = [n for n, p in self._model.named_parameters() if p.requires_grad and n not in self._noised]
            raise RuntimeError(
                f"parameters {unfrozen} were unfrozen after make_private: they would be trained without noise. Call "
                "engine.detach() and make_private again."
            )
        if self._glances is not None:
            self._compare_rest(self._glances[1])

    def check_parameters(self) -> None:
        """Right before the optimizer changes them."""
        if self._glances is not None:
            self._compare_parameters(self._glances[0], "between two steps")

    def _refuse_replaced(self) -> None:
        if any(held.get(name) is not p for held, name, p in self._places):
            self._judgement.violated("content", "parameters of the model were replaced by others after make_private")
            raise RuntimeError(
                "parameters of the model were replaced by others after make_private (sharded, parametrised, assigned "
                "anew): the model would not be trained, or not with noise. Do that first, then call make_private."
            )

    def settle(self) -> None:
        """After the optimizer's step: so the next one has to find it."""
        if self._glances is not None:
            self._glances = (Glance(self._noised.values()), self._glances[1])

    def leave(self) -> None:
        """The model goes its own way; a change of its parameters from here on is not of this run."""
        if self._left is None:  # a second time would hide what was changed after the first
            if self._glances is not None:
                self._compare(self._glances, "after the last step")
            self._left = fingerprints(self._noised.items())

    def verdict(self) -> Verdict:
        if self._left is not None and self._left != fingerprints(self._noised.items()):
            self._judgement.violated("content", "the parameters were changed after detach(), outside of this account")
        if self._left is None and self._glances is not None:
            self._compare(self._glances, "after the last step")
        self._fetching.read()
        self._name_changes(unnoised(self._model, self._noised))  # by digests: sums of bits may agree by design
        extra = extra_state(self._model)
        self._name_changes(extra)
        if self._unnoised is not None and (added := [name for name in extra if name not in self._unnoised]):
            self._judgement.violated("content", f"{added} are saved with the model since training began, without noise")
        now = _names(self._model)
        if changed := [name for name in {**now, **self._names} if now.get(name) != self._names.get(name)]:
            self._judgement.violated(
                "content", f"{changed[:5]} were added to the model, replaced or taken out of it after make_private"
            )
        return Verdict(
            HOLDS,
            "in every step parameters were as the optimizer had left them; frozen parameters, buffers and extra state "
            "are as training began",
        )

    def _glance_at_rest(self) -> Glance:
        places: list[tuple[Any, str]] = [*self._frozen, *self._buffers]
        return Glance(held.get(name) for held, name in places)

    def _compare(self, before: tuple[Glance, Glance], when: str) -> None:
        self._compare_parameters(before[0], when)
        self._compare_rest(before[1])

    def _compare_parameters(self, before: Glance, when: str) -> None:
        changed = (
            f"trained parameters were changed {when} by something else than the optimizer, and nobody knows from "
            "what. What may be done to them without private data, do in optimizer.register_step_post_hook"
        )
        differs = Glance(self._noised.values()).differs(before)
        self._fetching.when(differs, lambda: self._judgement.doubted("content", changed))

    def _compare_rest(self, before: Glance) -> None:
        def name() -> None:
            if not self._name_changes(unnoised(self._model, self._noised)):  # changed back before anybody could look
                self._judgement.violated("content", "what carries no noise was changed during training")

        self._fetching.when(self._glance_at_rest().differs(before), name)

    def _name_changes(self, now: Mapping[str, str]) -> bool:
        before = self._unnoised or {}
        changed = [name for name in now if name in before and now[name] != before[name]]
        if changed:
            self._judgement.violated(
                "content", f"{changed} changed during training; they are saved with the model and carry no noise"
            )
        return bool(changed)


def _names(model: nn.Module) -> dict[str, int]:
    """Of all that is saved → which parameter it is; a buffer may be assigned anew."""
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return parameters | {name: 0 for name, _ in model.named_buffers(remove_duplicate=False)}
