"""Random bits: the key stream of AES-256 in counter mode.

Guarantee. No bit is used twice: the counter only runs forward, regions of one key never meet, places of a region have
2^48 blocks each, and a stream refuses to be used in a process that was forked from its own. To anybody without the
key, no bit tells of another.

Assumes that AES-256 is a good cipher and that keys are secret: they come from the operating system (`fresh_key`),
and neither keys nor counters are ever written down. Processors compute it faster than the usual generators of
simulations.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

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
        self._cipher = Cipher(self._key, modes.CTR(bytes([number]) + bytes(15))).encryptor()
        self._process = REGISTRY.process
        self.drawn = 0

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that the stream belongs to."""
        return self._process != REGISTRY.process

    def words(self, count: int, room: Tensor | None = None) -> Tensor:
        """int64 [count]: 64 bits each. In `room`, if there is one, of `count` + SPARE."""
        if self.forked:
            raise RuntimeError("this stream of random bits belongs to the process that forked: draw from a new one")
        words = torch.empty(count + SPARE, dtype=torch.int64, device="cpu") if room is None else room
        out = words.view(torch.uint8).numpy().data
        for start in range(0, 8 * count, len(_ZEROS)):
            self._cipher.update_into(_ZEROS[: 8 * count - start], out[start:])
        self.drawn += count
        return words[:count]

    def more(self, start: int, place: int, count: int) -> int:
        """64 · count bits for a place after `start` words, the first in front: the same whenever they are asked for.

        They come from a region of their own, and leave the stream where it is.
        """
        region = bytes([128 + self._number]) + (2 * start + place).to_bytes(9, "big") + bytes(6)
        return int.from_bytes(Cipher(self._key, modes.CTR(region)).encryptor().update(bytes(8 * count)), "big")

    def uniform(self, count: int) -> Tensor:
        """float64 [count]: multiples of 2^-53 in [0, 1), all equally likely."""
        return (self.words(count) >> 11).add_(2**52).double().mul_(2.0**-53)


class FarStream:
    """Bits that a device other than the host makes itself, by torch's generator there, seeded with 64 secret bits.

    That generator (Philox, on GPUs) is made for simulations: it is fast and independent of data, and nobody without the
    seed is known to tell its bits, but it is no cipher. With `secure_mode=True` bits come from the host's instead.
    """

    description = "noise from bits of the device's own generator, seeded with 64 bits of that stream"

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, torch.Generator(device=device).manual_seed(seed)

    def words(self, count: int) -> Callable[[], Tensor]:
        """int64 [count], of the next bits: the same at each call of what is returned."""
        before, ready = self._generator.get_state(), [self._drawn(count)]

        def words() -> Tensor:
            if ready:  # a second call is rare, so nothing is kept for it
                return ready.pop()
            now = self._generator.get_state()  # others have drawn since: no bit may be drawn twice
            self._generator.set_state(before)
            once_more = self._drawn(count)
            self._generator.set_state(now)
            return once_more

        return words

    def _drawn(self, count: int) -> Tensor:
        words = torch.empty(count, dtype=torch.int64, device=self._device)
        return words.random_(-(2**63), None, generator=self._generator)  # of all 64 bits
