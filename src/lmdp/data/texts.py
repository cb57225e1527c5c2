"""Texts in memory, as whole numbers for words, all of one length: what is longer is cut, what is shorter is padded.

The length is a public setting, never that of the longest text. Numbers stay whole numbers everywhere, and the mask
that tells words from padding goes wherever they go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lmdp.data.examples import NOBODY, check_names, digests_of, names_at, names_together
from lmdp.data.splits import places, smallest

IDS, MASK = "input_ids", "attention_mask"
"""The names that models of transformers give them."""


@dataclass(frozen=True, eq=False, repr=False)
class Texts(Dataset[tuple[dict[str, Tensor], int]]):
    """Texts and their labels: `ids` and `mask` are int64 [N, T], the mask is 1 for words and 0 for padding.

    `users` names the person of every text; without it every text stands for itself. `names` are the lines of a table.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    users: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, tensor in (("ids", self.ids), ("mask", self.mask)):
            if tensor.dtype != torch.int64 or tensor.dim() != 2 or len(tensor) != len(self.labels):
                raise ValueError(
                    f"{name} of texts are {tensor.dtype} of shape {tuple(tensor.shape)}; they must be int64 "
                    f"[{len(self.labels)}, T], one row for each label"
                )
        if self.users and len(self.users) != len(self.labels):
            raise ValueError(f"users names {len(self.users)} rows; there are {len(self.labels)}")
        check_names(self.names, len(self.labels))
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1 or self.ids.shape != self.mask.shape:
            raise ValueError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}; they must be int64 [N], and ids "
                f"{tuple(self.ids.shape)} and mask {tuple(self.mask.shape)} must be alike"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example: how many words it has room for."""
        return tuple(self.ids.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Texts({len(self)} of {self.ids.shape[1]} words at most)"

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        return {IDS: self.ids[index], MASK: self.mask[index]}, int(self.labels[index])

    def tensors(self) -> tuple[dict[str, Tensor], Tensor]:
        return {IDS: self.ids, MASK: self.mask}, self.labels

    def take(self, indices: Sequence[int] | Tensor) -> Texts:
        at = torch.as_tensor(indices, dtype=torch.long)
        users = tuple(self.users[i] for i in at.tolist()) if self.users else ()
        return Texts(self.ids[at], self.mask[at], self.labels[at], users, names_at(self.names, at))

    def __lmdp_examples_at__(self, indices: Tensor) -> list[dict[str, Tensor] | Tensor]:
        """What a data loader would collate of these examples."""
        return list(self.take(indices).tensors())

    def joined(self, others: Texts) -> Texts:
        pairs = ((self.ids, others.ids), (self.mask, others.mask), (self.labels, others.labels))
        ids, mask, labels = (torch.cat(pair) for pair in pairs)
        return Texts(ids, mask, labels, self._users_with(others), names_together(self, others))

    def _users_with(self, others: Texts) -> tuple[str, ...]:
        """Of both together; a text of nobody is a user of its own."""
        if not self.users:
            return ()
        return self.users + (others.users or tuple(f"{NOBODY}{content.hex()}" for content in others.contents()))

    def relabelled(self, labels: Sequence[int]) -> Texts:
        return replace(self, labels=self.labels.new_tensor(labels))

    def contents(self) -> Iterator[bytes]:
        """The words of each text as the model sees them, without padding."""
        return (row[real.bool()].numpy().tobytes() for row, real in zip(self.ids, self.mask))

    def digests(self, key: bytes) -> list[str]:
        return digests_of(self, key)

    def take_random(self, n: int, seed: int = 0) -> Texts:
        if not 0 < n <= len(self):
            raise ValueError(f"{n} texts were asked for; there are {len(self)}, so ask for 1 to {len(self)}")
        return self.take(smallest(n, places(self.contents(), f"{seed}")))
