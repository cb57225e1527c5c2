"""What is said of an error, and with which code the command line ends."""

from __future__ import annotations

import sys

TOLD = (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError)
"""Errors whose words are for the user."""


def words_for(error: Exception) -> tuple[str, int] | None:
    """One line and a code: 1 of code of the user's own, else 2. None of an error that is a fault of this library."""
    if yours := _yours(error):
        return f"error: {yours}", 1
    return (f"error: {_one_line(error)}", 2) if isinstance(error, TOLD) else None


def _yours(error: Exception) -> str:
    """Of an error in code of the user's own, such as a model's forward: where it arose, and what it is."""
    if isinstance(error, MemoryError) or "torch" not in sys.modules:  # nothing of the user's is run without it
        return ""
    from lmdp.models.yours import place, told

    where = place(error)
    return f"your code failed at {where}: {told(error)}. LMDP_DEBUG=1 shows how it was called" if where else ""


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "out of memory. Use a smaller max_physical_batch_size, or less data."
    return " ".join(str(error).split()) or type(error).__name__
