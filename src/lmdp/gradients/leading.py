"""Whose rows are the examples: found out by a run on other rows, never guessed from numbers that happen to be equal.

A position table that is looked up once for all examples has as many rows as a sequence has positions, and some day a
batch has as many examples. So the model is run on a few rows of its first batch, and what follows their number counts
examples; what does not is the same for every example. Real batches of different sizes show the first, too.

    rows    the first dimension is the example
    shared  no dimension follows the number of examples
    astray  another one does, or the first counts something else as well: the gradients cannot be told apart
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lmdp.gradients.randomness import PutBack, remember
from lmdp.gradients.shards import keep_unsharding
from lmdp.layers import Attributes

ROWS, SHARED, ASTRAY = "rows", "shared", "astray"
TRIES = 3

Key = tuple[str, int, int]
"""A module, or an operation on what is shared; which of its calls within one call of the model; how many dimensions."""

Shape = tuple[int, ...]
Elsewhere = Callable[[bool], "RootCall"]
"""Whether all rows of the batch and one more are to be taken, or only a few → the call on these."""


@dataclass
class RootCall:
    """One call of the whole model, on `batch_size` examples, and the shapes that its modules took in.

    `asked`: where the answer has consequences. What is only cheaper if it is known is in `asides`. `astray`: modules
    whose rows are established not to be examples; `unfollowed`: modules whose output all examples share → why it
    cannot be followed. `remedy`: of a rule that tells examples by something else than rows, if there was one.
    `put_back` lets torch draw as at the beginning of the call.
    """

    batch_size: int | None = None
    asked: dict[Key, Shape] = field(default_factory=dict)
    asides: dict[Key, Shape] = field(default_factory=dict)
    taken_as: dict[Key, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    before: AsItWas | None = None
    put_back: PutBack = lambda: None
    astray: set[str] = field(default_factory=set)
    unfollowed: dict[str, str] = field(default_factory=dict)
    remedy: str = ""


class Leading:
    """What is established of every call so far, and what is in doubt.

    not_rows  calls whose rows are not examples
    outside   modules whose gradient came from a call that was not part of a call of the model
    """

    def __init__(self) -> None:
        self.not_rows: set[Key] = set()
        self.kinds: dict[Key, str] = {}
        self._real: dict[Key, tuple[int, Shape]] = {}
        self._ways: set[str] = set()
        self._open: set[Key] = set()
        self.outside: set[str] = set()
        self._tries = TRIES
        self._failure = "all batches had the same size"

    @property
    def settled(self) -> bool:
        """Whether no call is likely to be made again."""
        return (bool(self.kinds) and not self._open) or not self._tries

    @property
    def established(self) -> str | None:
        """How it was established what the rows of every call are; None while that is in doubt."""
        if self.doubt is not None:
            return None
        return f"{' and '.join(sorted(self._ways))} showed which rows follow the number of examples"

    @property
    def doubt(self) -> str | None:
        """Why it is not established, without a word of the batches."""
        if self.outside:
            return (
                f"modules {sorted(self.outside)} were called outside a call of the whole model, so that it is not "
                "established that their rows are the examples. Call the model that was given to make_private, or give "
                "make_private the part of it that is called."
            )
        if self._open:
            return (
                f"it is not established that the rows of {sorted({name for name, *_ in self._open})} are the examples: "
                f"{self._failure}"
            )
        return None if self._ways else "the model has not been called on examples yet"

    def ask(self, root: RootCall | None, what: str, shape: Shape, *, default: str = ROWS) -> tuple[Key, str]:
        """What the next call of this is, as far as it is established; the default until then."""
        if root is None:  # gradient checkpointing runs a part again; or the user calls a part
            kinds = {kind for (name, _, rank), kind in self.kinds.items() if (name, rank) == (what, len(shape))}
            return (what, 0, len(shape)), kinds.pop() if len(kinds) == 1 else default
        key = self.note(root, what, shape)
        root.asked[key] = root.asides.pop(key)
        kind = root.taken_as[key] = self.kinds.get(key, default)
        return key, kind

    def note(self, root: RootCall | None, what: str, shape: Shape) -> Key:
        """Remember the shape of something of which `kinds` is to tell later what it is."""
        if root is None:
            return (what, 0, len(shape))
        root.counts[what] += 1
        key = (what, root.counts[what], len(shape))
        root.asides[key] = shape
        return key

    def close(self, root: RootCall, elsewhere: Elsewhere) -> bool:
        """At the end of a call. Whether it took something for what it is not, so that it must be made again.

        `elsewhere` runs the model on other rows of the same batch; it may raise whatever the model raises.
        """
        fresh = root.asked.keys() - self.kinds.keys()
        if not fresh or root.batch_size == 0:
            return False
        if root.batch_size is None:
            self._failure = "no argument of the model is a tensor with a length."
        else:
            self._compare_real(root, root.batch_size)
            tries, self._tries = self._tries, self._tries - bool(self._tries and fresh - self.kinds.keys())
            for all_of_them in (False, True):  # a few may lack what the model does for others, such as masking padding
                if tries and fresh - self.kinds.keys():
                    self._run_elsewhere(root, root.batch_size, functools.partial(elsewhere, all_of_them))
        self._open = (self._open | fresh) - self.kinds.keys()
        return any(self.kinds.get(key, taken) != taken for key, taken in root.taken_as.items())

    def _run_elsewhere(self, root: RootCall, size: int, elsewhere: Callable[[], RootCall]) -> None:
        try:
            other = elsewhere()
        except Exception as error:  # any model may refuse to run on other rows, for any reason
            self._failure = (
                f"the model could not be run on other rows of a batch ({type(error).__name__}), and no two batches "
                "were of different sizes. Let it take any number of rows, in tensors with the batch first."
            )
            return
        assert other.batch_size is not None
        there = other.asked | other.asides
        for key, shape in (root.asked | root.asides).items():
            if key in there and key not in self.kinds:
                self._settle(key, kind_of(shape, size, there[key], other.batch_size), "a run on a few rows")

    def _compare_real(self, root: RootCall, size: int) -> None:
        """Lengths differ between real batches too: only rows can be told from them."""
        for key in root.asked.keys() - self.kinds.keys():
            shape = root.asked[key]
            size_before, before = self._real.setdefault(key, (size, shape))
            if size_before != size and before[:1] == (size_before,) and shape[:1] == (size,):
                self._settle(key, ROWS, "batches of different sizes")

    def _settle(self, key: Key, kind: str, way: str) -> None:
        self.kinds[key] = kind
        self._ways.add(way)
        if kind != ROWS:
            self.not_rows.add(key)


def kind_of(shape: Shape, size: int, shape_there: Shape, size_there: int) -> str:
    """From the shapes of one call in two runs of the model, on different numbers of examples."""
    if len(shape) != len(shape_there):
        return ASTRAY
    follow = [d for d, (a, b) in enumerate(zip(shape, shape_there)) if a != b and a * size_there == b * size]
    if not follow:
        return SHARED
    return ROWS if follow[0] == 0 and shape[0] == size else ASTRAY


def other_rows(args: Any, kwargs: Any, size: int, *, all_of_them: bool = False) -> tuple[int, Any, Any]:
    """The same arguments with two rows of the batch, or with one more than it has: if it has no more than two, or for
    `all_of_them`."""
    rows = [0, 1] if size > 2 and not all_of_them else [*range(size), 0]

    def cut(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size):
            return leaf
        return leaf.detach()[rows].requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(cut, (args, kwargs))
    return len(rows), args, kwargs


# -- nothing is disturbed ---------------------------------------------------------------------------------------------


class AsItWas:
    """The state of all that a forward pass may change: the modules' attributes, and randomness."""

    def __init__(self, model: nn.Module) -> None:
        self._put_back = remember()
        self._attributes = Attributes(model)

    def restore(self) -> None:
        self._put_back()
        self._attributes.restore()


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever is run inside leaves the model and all randomness as they were, warns nobody, and calls nobody's hooks.

    Hooks that keep activations would else keep those of rows that the user never saw.
    """
    before = AsItWas(model)
    for module in model.modules():
        keep_unsharding(module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        before.restore()
