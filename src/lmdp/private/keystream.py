"""Random bits: the key stream of AES-256 in counter mode.

Guarantee. No bit is used twice: the counter only runs forward, regions of one key never meet, places of a region have
2^48 blocks each, and a stream refuses to be used in a process that was forked from its own. Processes that share a
stream read other places of it (`read`), and then go on together (`skip`). To anybody without the key, no bit tells of
another.

Assumes that AES-256 is a good cipher and that keys are secret: they come from the operating system (`fresh_key`),
and neither keys nor counters are ever written down. Processors compute it faster than the usual generators of
simulations.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from lmdp.gradients.attach import REGISTRY
from lmdp.gradients.compiled.rounds import SPARE

KEY_BYTES = 32
_ZEROS = memoryview(bytes(2**22))


def fresh_key() -> bytes:
    """From the operating system."""
    return secrets.token_bytes(KEY_BYTES)


class KeyStream:
    """Bits from one region of the counter: `number` is its first byte, so that regions of one key never meet."""

    def __init__(self, key: bytes, number: int = 0) -> None:
        self._key, self._number = algorithms.AES(key), number
        self._process = REGISTRY.process
        self.drawn = 0
        self._cipher = self._from(0)

    def _from(self, block: int) -> Any:
        """The stream from this block of two words on."""
        return Cipher(self._key, modes.CTR(bytes([self._number]) + block.to_bytes(15, "big"))).encryptor()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that the stream belongs to."""
        return self._process != REGISTRY.process

    def words(self, count: int, room: Tensor | None = None) -> Tensor:
        """int64 [count]: 64 bits each. In `room`, if there is one, of `count` + SPARE."""
        words = self._filled(self._cipher, count, room)
        self.drawn += count
        return words

    def _filled(self, cipher: Any, count: int, room: Tensor | None = None) -> Tensor:
        if self.forked:
            raise RuntimeError("this stream of random bits belongs to the process that forked: draw from a new one")
        words = torch.empty(count + SPARE, dtype=torch.int64, device="cpu") if room is None else room
        out = words.view(torch.uint8).numpy().data
        for start in range(0, 8 * count, len(_ZEROS)):
            cipher.update_into(_ZEROS[: 8 * count - start], out[start:])
        return words[:count]

    def read(self, start: int, count: int) -> Tensor:
        """The words after the first `start` of the stream, which stays where it is."""
        block, rest = divmod(start, 2)
        return self._filled(self._from(block), rest + count)[rest:]

    def skip(self, count: int) -> None:
        """Go on as if so many words, an even number, had been drawn."""
        self.drawn += count
        self._cipher = self._from(self.drawn // 2)

    def more(self, start: int, place: int, count: int) -> int:
        """64 · count bits for a place after `start` words, the first in front: the same whenever they are asked for.

        They come from a region of their own, and leave the stream where it is.
        """
        region = bytes([128 + self._number]) + (2 * start + place).to_bytes(9, "big") + bytes(6)
        return int.from_bytes(Cipher(self._key, modes.CTR(region)).encryptor().update(bytes(8 * count)), "big")

    def uniform(self, count: int) -> Tensor:
        """float64 [count]: multiples of 2^-53 in [0, 1), all equally likely."""
        return (self.words(count) >> 11).add_(2**52).double().mul_(2.0**-53)
