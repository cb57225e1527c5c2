"""What torchrun has told this process, before it has joined any group."""

from __future__ import annotations

import os


def several() -> bool:
    """Whether torchrun has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process is the first, or the only one, that torchrun has started."""
    return not several() or os.environ.get("RANK") == "0"


def again() -> list[str]:
    """How this command was started, up to its own words: by torchrun with as many processes, or alone."""
    if not several():
        return ["lmdp"]
    here, machines = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    nodes = ["--nnodes", machines] if machines and machines != "1" else []
    return ["torchrun", *nodes, "--nproc-per-node", here or os.environ["WORLD_SIZE"], "-m", "lmdp"]
