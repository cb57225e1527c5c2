"""Which room may import which. The trust boundary stays small, and the report computes nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lmdp

ROOT = Path(lmdp.__file__).parent
MAY_IMPORT = {
    "layers": set(),
    "fields": set(),
    "progress": set(),
    "config": set(),
    "recipes": set(),
    "runs": {"config", "fields"},
    "tensorboard": set(),
    "training": {"accounting", "config", "data", "private", "progress", "runs", "tensorboard"},
    "pipeline": {
        "audit",
        "config",
        "data",
        "fields",
        "layers",
        "models",
        "progress",
        "report",
        "risk",
        "runs",
        "training",
        "spent",
    },
    "spent": {"audit", "config", "data", "fields", "pipeline", "private", "progress", "risk", "runs", "training"},
    "cli": {"accounting", "bench", "config", "pipeline", "progress", "report"},
    "__main__": {"cli"},
    "accounting": set(),
    "data": set(),
    "models": set(),
    "private": {"layers", "data", "accounting"},
    "audit": {"accounting", "data", "layers", "private", "report", "fields"},
    "risk": {"layers", "audit", "fields"},
    "report": {"audit", "risk"},
    "bench": {"models"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        rooms |= {name.split(".")[1] for name in names if name.startswith("lmdp.")}
    return rooms


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_what_its_door_allows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert imported_rooms(path) - {room} <= MAY_IMPORT[room]


def test_accounting_knows_no_tensors() -> None:
    assert "torch" not in (ROOT / "accounting.py").read_text()
