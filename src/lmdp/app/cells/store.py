"""The cells of a folder: one JSON file each, whole or not there. A file that is damaged is measured again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmdp.app.cells.cell import Cell, Measured
from lmdp.app.runs.files import write

FOLDER = "cells"


class Store:
    """Results by the name of their cell."""

    def __init__(self, out: Path) -> None:
        self.path = out / FOLDER

    def __contains__(self, cell: Cell) -> bool:
        return self.get(cell) is not None

    def get(self, cell: Cell) -> Measured | None:
        path = self.path / f"{cell.name}.json"
        try:
            content = json.loads(path.read_text())
            same = content["cell"] == json.loads(json.dumps(cell.to_dict()))
            return Measured(cell, content["result"]) if same and isinstance(content["result"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, cell: Cell, result: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"cell": cell.to_dict(), "result": _rounded(result)}
        write(self.path / f"{cell.name}.json", json.dumps(content, allow_nan=False) + "\n")

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in dict.fromkeys(cells) if cell not in self]

    def measured(self, cells: Iterable[Cell]) -> list[Measured]:
        return [there for cell in dict.fromkeys(cells) if (there := self.get(cell)) is not None]


def _rounded(value: Any) -> Any:
    """Five digits: results are no more certain than that, and files stay small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value
