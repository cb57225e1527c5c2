"""What torchrun has told this process, before it has joined any group."""

from __future__ import annotations

import os


def several() -> bool:
    """Whether torchrun has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process is the first, or the only one, that torchrun has started."""
    return not several() or os.environ.get("RANK") == "0"
