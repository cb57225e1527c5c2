"""`secure_mode=True`: coins and noise from a stream cipher, and noise whose last bits do not give it away.

    bits       AES-256 in counter mode (`cryptography`), under a key of 256 bits from the operating system
    uniform    53 bits each
    normal     Box–Muller in float64
    noise      (g1 + g2 + g3 + g4) / 2, rounded to the parameter's type     (arXiv 2107.10138)

The sum of four is the floating-point countermeasure: a single normal number in floating point has few enough
pre-images that the values it cannot take reveal what it was added to; a sum of four has too many to search.

One key per engine; the counter only runs forward, and every stream has a region of it to itself, so no bit is used
twice. Neither key nor counter is ever written down: a resumed run has a new key, and so has a forked process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmdp.private.noise import STREAMS, normal_pairs, shaped, uniform

KEY_BYTES = 32


class Secure:
    """Chance from a cryptographic generator."""

    source = "AES-256-CTR keyed by the operating system, sum of four Gaussians"

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is for tests only: a run whose key is known is not private."""
        self._aes()
        self._begin(secrets.token_bytes(KEY_BYTES) if key is None else key)

    def coins(self, draw: int, size: int) -> Tensor:
        self._after_fork()
        return torch.from_numpy(self._coins.uniform(size))

    def noise(self, step: int) -> Secure:
        return self

    def like(self, tensors: Sequence[Tensor], std: float) -> list[Tensor]:
        self._after_fork()
        return shaped(tensors, std, self._fill)

    def _fill(self, part: Tensor, std: float) -> None:
        """Box–Muller gives normal numbers in pairs; both of a pair go into different sums."""
        count = max(2, part.numel())
        first, second, *turns = uniform(4 * count, [stream.fill for stream in self._noise]).split(count)
        total = torch.zeros(count, dtype=torch.float64)
        for numbers, turn in zip((first, second), turns):
            cosine, sine = normal_pairs(numbers.neg_().add_(1), turn, std / 2)
            total.add_(cosine).add_(sine.roll(1))
        part.copy_(total[: part.numel()])

    def _begin(self, key: bytes) -> None:
        self._process = os.getpid()
        self._coins, *self._noise = [KeyStream(self._aes(), key, number) for number in range(1 + STREAMS)]

    def _after_fork(self) -> None:
        """Two processes with the same key and counter would draw the same noise."""
        if os.getpid() != self._process:
            self._begin(secrets.token_bytes(KEY_BYTES))

    @staticmethod
    def _aes() -> Any:
        try:
            from cryptography.hazmat.primitives import ciphers
        except ImportError as error:
            raise ImportError(
                "secure_mode=True needs the package cryptography, which is missing: pip install 'lmdp[secure]'"
            ) from error
        return ciphers

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cryptographic generator cannot be copied or saved: its stream would be used twice")


class KeyStream:
    """Numbers from one region of the counter: `number` is its first byte, so that regions never meet."""

    def __init__(self, ciphers: Any, key: bytes, number: int) -> None:
        counter = bytes([number]) + bytes(15)
        self._cipher = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.CTR(counter)).encryptor()

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Multiples of 2^-53 in [0, 1), all equally likely."""
        bits = np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def fill(self, out: NDArray[np.float64]) -> None:
        out[:] = self.uniform(len(out))
