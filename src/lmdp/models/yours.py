"""Whose an error is: where in code of the user's own it arose, if it did."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

OURS = f"{Path(__file__).parents[1]}{os.sep}"
_PLACES = (str(Path(torch.__file__).parent), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")))
LIBRARIES = ("<", *(f"{place}{os.sep}" for place in _PLACES))
"""How the files of Python and of installed packages begin."""


def told(error: BaseException) -> str:
    """Type and message, in one line."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())[:300])))


def place(error: BaseException) -> str:
    """file:line of the user's code that an error came from, directly or through a library; "" where it is not theirs.

    An error that this library raises, also inside a call by the user's code, is none of theirs.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(OURS):
            return ""
        if not frame.filename.startswith(LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return ""
