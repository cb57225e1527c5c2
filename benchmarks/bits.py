"""What random bits cost on the host, for noise on a device in secure mode: `python benchmarks/bits.py`."""

from __future__ import annotations

import statistics
import time

import torch

from lmdp.private.keystream import KeyStream, fresh_key

NUMBERS = 22_713_216  # of all-MiniLM-L6-v2


def main() -> None:
    stream, room = KeyStream(fresh_key()), torch.empty(NUMBERS + 2, dtype=torch.int64)
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        stream.words(NUMBERS, room)
        seconds.append(time.perf_counter() - begin)
    middle = statistics.median(seconds)
    print(
        f"{NUMBERS:,} numbers: {8 * NUMBERS / 1e6:.0f} MB of bits in {middle:.3f} s "
        f"({min(seconds):.3f}–{max(seconds):.3f}), {8 * NUMBERS / middle / 1e9:.2f} GB/s, copied to the device"
    )


if __name__ == "__main__":
    main()
