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


def digests_of(examples: Examples, key: bytes) -> list[str]:
    pairs = zip(examples.contents(), examples.labels.tolist(), strict=True)
    return [
        hashlib.blake2b(f"{label} ".encode() + content, digest_size=16, key=key).hexdigest() for content, label in pairs
    ]
