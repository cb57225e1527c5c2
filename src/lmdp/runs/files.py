"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    raw = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{path} could not be written ({error.strerror}); nothing was overwritten"
        ) from error
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
