"""Images in memory, and what a loaded source is.

Standardised by public constants only, never by statistics of the data: those would leak it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lmdp.data.examples import Examples, check_names, digests_of, names_at, names_together, owners
from lmdp.data.splits import non_member_chance, non_members, places, smallest
from lmdp.data.tokens import Tokenizer

MAX_CLASSES = 100_000  # where only labels say how many there are


@dataclass(frozen=True, eq=False, repr=False)
class Images(Dataset[tuple[Tensor, int]]):
    """Examples and their labels. Bytes [N, C, H, W] are handed out as (x / 255 − 0.5) / 0.5; floats as they are.

    `names` are those of the files of a folder; no model and no digest knows of them.
    """

    pixels: Tensor
    labels: Tensor
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind, shape = self.pixels.dtype, tuple(self.pixels.shape)
        if kind == torch.uint8 and (len(shape) != 4 or shape[1] not in (1, 3)):
            raise ValueError(f"images of bytes have shape {shape}; it must be [N, C, H, W] with 1 or 3 channels")
        if kind not in (torch.uint8, torch.float32):
            raise ValueError(f"images are {kind}; they must be torch.uint8 or torch.float32")
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1:
            raise ValueError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}; they must be int64 [N]"
            )
        if not shape or len(self.pixels) != len(self.labels):
            raise ValueError(f"there are {shape[0] if shape else 0} images and {len(self.labels)} labels; one each")
        check_names(self.names, len(self.labels))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.pixels.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Images({len(self)} of shape {self.shape})"

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return _standardised(self.pixels[index]), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """What a data loader asks for: a whole batch of pairs at once."""
        inputs, labels = self.take(indices).tensors()
        return list(zip(inputs.unbind(), labels.tolist()))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All of them: standardised float inputs, and labels."""
        return _standardised(self.pixels), self.labels

    def take(self, indices: Sequence[int] | Tensor) -> Images:
        """These examples, in this order."""
        at = torch.as_tensor(indices, dtype=torch.long)
        return Images(self.pixels[at], self.labels[at], names_at(self.names, at))

    def __lmdp_examples_at__(self, indices: Tensor) -> list[Tensor]:
        """What a data loader would collate of these examples."""
        return list(self.take(indices).tensors())

    def cut(self, n: int) -> tuple[Images, Images]:
        """The first `n` and the others, without copying."""
        first = Images(self.pixels[:n], self.labels[:n], self.names[:n])
        return first, Images(self.pixels[n:], self.labels[n:], self.names[n:])

    def joined(self, others: Images) -> Images:
        """These examples, then the others."""
        pixels, labels = torch.cat([self.pixels, others.pixels]), torch.cat([self.labels, others.labels])
        return Images(pixels, labels, names_together(self, others))

    def contents(self) -> Iterator[bytes]:
        """The values of each example, without its label: copies of an image are one content, whatever it is called."""
        return (row.numpy().tobytes() for row in self.pixels.contiguous())

    def relabelled(self, labels: Sequence[int]) -> Images:
        """The same images with other labels."""
        return replace(self, labels=self.labels.new_tensor(labels))

    def digests(self, key: bytes) -> list[str]:
        """Of each example with its label. Without the key nobody can tell whether an example is among them."""
        return digests_of(self, key)

    def take_random(self, n: int, seed: int = 0) -> Images:
        """`n` of the examples, which their contents choose; the same seed always finds the same ones."""
        if not 0 < n <= len(self):
            raise ValueError(f"{n} images were asked for; there are {len(self)}, so ask for 1 to {len(self)}")
        return self.take(smallest(n, places(self.contents(), f"{seed}")))


def _standardised(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8:
        return pixels
    return pixels.to(torch.float32).div_(255).sub_(0.5).div_(0.5)


@dataclass(frozen=True)
class Inferred:
    """Something of a model's shape that was read off the examples, so that one of them can change it.

    fact    as the error says it: "there are 3 classes"
    remedy  what declares it: "add classes = 3 (--classes 3)"
    """

    fact: str
    remedy: str

    def __str__(self) -> str:
        return f"if it is public that {self.fact}, {self.remedy}"


@dataclass(frozen=True)
class Source:
    """What a SPEC stands for: training examples, test examples where the source has them, and the names of the labels.

    `held_out` are examples of the same pool as the training examples that are kept out of training, for audits.
    `inferred` are those public facts that nobody has declared; `by_position` says of a split that one example moves
    half of it. `tokenizer` is how texts became numbers.
    """

    spec: str
    train: Examples
    test: Examples | None
    classes: tuple[str, ...]
    inferred: tuple[Inferred, ...] = ()
    by_position: bool = False
    held_out: Examples | None = None
    tokenizer: Tokenizer | None = None

    @property
    def pool(self) -> Examples:
        """All private examples, whichever part they are in."""
        return self.train if self.held_out is None else self.train.joined(self.held_out)

    def keeping_out(self, share: float) -> Source:
        """The same, with about this share of the training examples kept out, or fewer (`splits.non_member_chance`)."""
        chance = non_member_chance(share, len(self.train))
        keep, hold = non_members(owners(self.train), chance) if chance else ([], [])
        if not hold:
            return self
        if not keep:
            raise ValueError(
                f"{self.spec}: holdout is {share:g}, which leaves nobody to train on; choose a smaller one"
            )
        return replace(self, train=self.train.take(keep), held_out=self.train.take(hold))

    def __post_init__(self) -> None:
        if not len(self.train):
            raise ValueError(f"{self.spec} has no training examples; it needs at least 1")
        if self.test is not None and self.test.shape != self.train.shape:
            raise ValueError(
                f"{self.spec} has training examples of shape {self.train.shape} and test examples of shape "
                f"{self.test.shape}; they must be equal. Add ?size= and ?channels= to make them so."
            )
        for part in (self.train, self.test):
            if part is not None and len(part):
                low, high = int(part.labels.min()), int(part.labels.max())
                if low < 0 or high >= len(self.classes):
                    raise ValueError(
                        f"{self.spec} has label {low if low < 0 else high}; with {len(self.classes)} classes labels "
                        f"must be 0 to {len(self.classes) - 1}"
                    )
