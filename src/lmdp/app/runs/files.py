"""Files that appear whole or not at all.

They are written beside their place under a name that says so, flushed to the disk, and then renamed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_UNFINISHED = re.compile(r"\.(.+)\.\d+\.part")


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    raw = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:  # x: never through a link that somebody has put there
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{path} could not be written ({error.strerror}); nothing was overwritten"
        ) from error
    _sync(path)


def _sync(path: Path) -> None:
    """Make the renaming last."""
    if os.name != "posix":
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        raise OSError(error.errno, f"{path} was written, but the disk did not confirm it ({error.strerror})") from error
    finally:
        os.close(folder)


def unfinished(folder: Path) -> dict[Path, str]:
    """Files that a process was writing when it was killed → the names they were to get."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path: match[1] for path in paths if (match := _UNFINISHED.fullmatch(path.name))}


def write_private(path: Path, lines: Iterable[str]) -> None:
    """In a folder that is its owner's only. The first line says that the file must not leave it."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    write(path, "\n".join(lines) + "\n")
    path.chmod(0o600)


def read_private(path: Path, form: re.Pattern[str], damaged: str) -> re.Match[str] | None:
    """What stands below the first line, which must have this form; None where there is no such file."""
    if not path.exists():
        return None
    _, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    match = form.fullmatch(rest)
    if match is None:
        raise ValueError(f"{path} is damaged: {damaged}")
    return match


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
