"""Texts → whole numbers for words, by rules that know no text of the private data.

    bytes     every byte of UTF-8 is a word: 258 of them
    words     lower-case words and signs, hashed to 8,192 numbers; two words may share one
    FOLDER    a tokenizer of transformers that was saved there, with its own words

A tokenizer that was made from the private texts would give some of them away: its list of words is published with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BYTES, WORDS = "bytes", "words"
BUILT_IN = (BYTES, WORDS)
PADDING, BEGIN, SPECIAL = 0, 1, 2  # words of the built-in ones begin at SPECIAL
HASHED = 8192
LENGTH, MOST = 128, 8192
"""Words of a text, unless said otherwise, and at most."""
_WORD = re.compile(r"\w+|[^\w\s]")
_PARTS = 1000

Encode = Callable[[Sequence[str], int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tokenizer:
    """How texts become numbers.

    name        bytes, words, or the folder it was read from
    vocabulary  how many words there are
    encode      texts and their length → ids and mask, int64 [N, length]
    begin, end  what every text begins and ends with; None where there is no such word
    special     numbers that stand for no word of a text
    """

    name: str
    vocabulary: int
    encode: Encode = field(repr=False, compare=False)
    begin: int | None = None
    end: int | None = None
    special: frozenset[int] = frozenset()
    theirs: Any = field(default=None, repr=False, compare=False)

    def noise(self, number: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random words, all alike likely, as many as there is room for, between what texts begin and end with."""
        words = torch.tensor([i for i in range(self.vocabulary) if i not in self.special])
        ids = words[torch.randint(0, len(words), (number, length), generator=generator)]
        for place, marker in ((0, self.begin), (-1, self.end)):
            if marker is not None:
                ids[:, place] = marker
        return ids, torch.ones_like(ids)

    def save(self, folder: Path) -> None:
        """Of one that was read from a folder; the others are known by name."""
        if self.theirs is not None:
            self.theirs.save_pretrained(str(folder))


def tokenizer_for(name: str) -> Tokenizer:
    """By name, or from a folder; nothing is downloaded, and no code of the folder is run."""
    if name == BYTES:
        return Tokenizer(name, SPECIAL + 256, _built_in(_bytes), BEGIN, special=frozenset([PADDING, BEGIN]))
    if name == WORDS:
        return Tokenizer(name, SPECIAL + HASHED, _built_in(_words), BEGIN, special=frozenset([PADDING, BEGIN]))
    return _from_folder(name)


def check_length(length: int | None) -> int:
    if length is not None and not 2 <= length <= MOST:
        raise ValueError(f"max_length is {length}; it must be 2 to {MOST} words")
    return length or LENGTH


def _built_in(split: Callable[[str, int], list[int]]) -> Encode:
    def encode(texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        for row, text in zip(ids, texts):
            numbers = [BEGIN, *split(text, length - 1)]
            row[: len(numbers)] = torch.tensor(numbers)
        return ids, (ids != PADDING).long()

    return encode


def _bytes(text: str, most: int) -> list[int]:
    return [SPECIAL + byte for byte in text.encode("utf-8", "replace")[:most]]


def _words(text: str, most: int) -> list[int]:
    return [SPECIAL + _hashed(word) for _, word in zip(range(most), _WORD.findall(text.lower()))]


@lru_cache(maxsize=2**16)
def _hashed(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HASHED


def _from_folder(name: str) -> Tokenizer:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"tokenizer is {name!r}; it must be {' or '.join(BUILT_IN)}, or a folder with a tokenizer of transformers"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"tokenizer {name} needs the package transformers, which is missing: pip install 'lmdp[hf]'"
        ) from error
    try:
        theirs: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        begin, end, padding = theirs.cls_token_id, theirs.sep_token_id, theirs.pad_token_id
    except Exception as error:  # whatever a broken folder makes the library stumble over
        raise ValueError(f"{folder} holds no tokenizer that can be read: {' '.join(str(error).split())}") from error
    if padding is None:
        theirs.pad_token = theirs.eos_token or theirs.unk_token
    if theirs.pad_token_id is None:
        raise ValueError(f"the tokenizer in {folder} has no word for padding; save it with a pad_token")
    special = frozenset(int(number) for number in theirs.all_special_ids)
    return Tokenizer(name, len(theirs), _theirs(theirs), begin, end, special, theirs)


def _theirs(theirs: Any) -> Encode:
    def encode(texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, len(texts), _PARTS):
            part = theirs(list(texts[start : start + _PARTS]), padding="max_length", truncation=True, max_length=length)
            parts.append([torch.tensor(part[name], dtype=torch.int64) for name in ("input_ids", "attention_mask")])
        empty = torch.zeros(0, length, dtype=torch.int64)
        ids, mask = (torch.cat(column) for column in zip(*parts)) if parts else (empty, empty)
        return ids, mask

    return encode
