"""What every kind of data is once it is read: examples in memory, each an input with a label.

`Images` and `Texts` are examples. Whoever splits, plants, trains or audits asks for no more than this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from torch import Tensor

Inputs = Tensor | Mapping[str, Tensor]
"""Of many examples: one tensor, or several by name."""


class Examples(Protocol):
    """Inputs and their labels, which are whole numbers. No method changes them."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, int]: ...

    def tensors(self) -> tuple[Inputs, Tensor]:
        """All of them, as a model takes them: inputs, and labels."""

    def take(self, indices: Sequence[int] | Tensor) -> Self:
        """These examples, in this order."""

    def joined(self, others: Self) -> Self:
        """These examples, then the others."""

    def relabelled(self, labels: Sequence[int]) -> Self:
        """The same inputs with other labels."""

    def contents(self) -> Iterator[bytes]:
        """What each example is, without its label: copies have one content, whatever they are called."""

    def digests(self, key: bytes) -> list[str]:
        """Of each example with its label. Without the key nobody can tell whether an example is among them."""

    def take_random(self, n: int, seed: int = 0) -> Self:
        """`n` of the examples, which their contents choose; the same seed always finds the same ones."""


NOBODY = "\x00"
"""How a user begins that is made up for a row of nobody's, such as a canary."""


def users_of(examples: Any) -> tuple[str, ...]:
    """Whose each row is; () where every row stands for itself."""
    users: tuple[str, ...] = getattr(examples, "users", ())
    return users


def owners(examples: Examples) -> Iterator[bytes]:
    """What decides in which part of the data a row is: its user, or its own content where it has none."""
    return iter([name.encode() for name in users_of(examples)]) if users_of(examples) else examples.contents()


def units(examples: Any) -> int:
    """How many there are of those whose privacy is kept: users, or rows."""
    return len(set(users_of(examples))) or len(examples)


def names_of(examples: Any) -> tuple[str, ...]:
    """Where each example stands in its folder or table; () where the data does not say."""
    names: tuple[str, ...] = getattr(examples, "names", ())
    return names


def names_at(names: tuple[str, ...], indices: Tensor) -> tuple[str, ...]:
    return tuple(names[i] for i in indices.tolist()) if names else ()


def names_together(first: Any, second: Any) -> tuple[str, ...]:
    """Of examples that are joined; () unless both have them."""
    names = names_of(first) + names_of(second)
    return names if len(names) == len(first) + len(second) else ()


def check_names(names: tuple[str, ...], count: int) -> None:
    if names and len(names) != count:
        raise ValueError(f"names are {len(names)}; there are {count} examples, one name each")


def digests_of(examples: Examples, key: bytes) -> list[str]:
    users = ["" if user.startswith(NOBODY) else f" of {user}" for user in users_of(examples)] or [""] * len(examples)
    rows = zip(examples.contents(), examples.labels.tolist(), users, strict=True)
    whole = (f"{label} ".encode() + content + user.encode() for content, label, user in rows)
    return [hashlib.blake2b(row, digest_size=16, key=key).hexdigest() for row in whole]
