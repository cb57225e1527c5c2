"""The house: which room may import which, that no rooms import each other in a circle, and that each can be read."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import lmdp

ROOT = Path(lmdp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAY_IMPORT: dict[str, set[str]] = {
    "methods": set(),
    "layers": set(),
    "bias": set(),
    "diagnostics": set(),
    "averages": {"lineage"},
    "public_data": set(),
    "standardised": set(),
    "accounting": {"methods"},
    "rescaling": {"methods"},
    "lineage": {"accounting", "data"},  # data: the decoder of its index
    "gradients": {"layers", "standardised"},
    "guards": {"gradients", "layers"},
    "opacus": {"accounting", "guards"},
    "extending": {"data", "gradients", "layers", "membership", "methods"},
    "statement": {"accounting", "data", "guards", "methods"},  # data: its decoder
    "units": {"guards"},
    "private": {
        "accounting",
        "bias",
        "diagnostics",
        "gradients",
        "guards",
        "layers",
        "lineage",
        "methods",
        "opacus",
        "processes",
        "public_data",
        "rescaling",
        "statement",
        "units",
    },
    "processes": {"accounting", "gradients", "guards", "units"},
    "data": set(),
    "models": {"standardised"},
    "membership": {"data", "gradients", "layers", "models"},  # gradients: an adversary in a white box has them
    "risk": {"data", "layers", "membership", "models"},
    "report": {"membership", "methods", "risk"},
    "audit": {"accounting", "data", "gradients", "guards", "membership", "models", "private", "report", "statement"},
    "integrations": {"accounting", "guards", "private", "processes"},
    "app": {
        *(
            "accounting",
            "audit",
            "averages",
            "data",
            "gradients",
            "guards",
            "layers",
            "lineage",
            "membership",
            "methods",
        ),
        *("models", "private", "processes", "report", "risk", "statement", "units"),
    },
    "__main__": {"app"},
    "__init__": {
        "app",
        "audit",
        "averages",
        "guards",
        "integrations",
        "layers",
        "private",
        "risk",
        "units",
    },  # the public names, opened when asked for
}
PROOF = ("sampling", "clipping", "weights", "keystream", "noise", "step")
NOT_NAMES = {"found", "known", "made", "some", "own"}
"""Words that say nothing of the value they are given to."""


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of everything imported from lmdp: inside functions and under TYPE_CHECKING too."""
    pairs = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "lmdp"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lmdp":
            pairs += [(str(node.module), alias.name) for alias in node.names]
    return pairs


def rooms_of(path: Path) -> set[str]:
    """Rooms that a file imports, also as `from lmdp import audit`."""
    rooms = set()
    for module, name in imports(path):
        parts = f"{module}.{name}".split(".")
        rooms |= {parts[1]} & set(MAY_IMPORT)
    return rooms - {room(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_what_its_door_allows(path: Path) -> None:
    assert rooms_of(path) <= MAY_IMPORT[room(path)]


def test_no_rooms_import_each_other_in_a_circle() -> None:
    graph = {name: set().union(*(rooms_of(p) for p in FILES if room(p) == name)) for name in MAY_IMPORT}
    del graph["__init__"]  # the door to the street: it opens rooms, and no room goes through it (below)
    order: list[str] = []
    while graph:
        free = sorted(name for name, needs in graph.items() if needs <= set(order))
        assert free, f"a circle among {sorted(graph)}"
        order += free
        graph = {name: needs for name, needs in graph.items() if name not in free}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) not in ("app", "__init__")], ids=str)
def test_no_room_goes_through_the_front_door(path: Path) -> None:
    """Public names are opened lazily, so an import of `lmdp` itself could hide a circle. The app is a user of it."""
    assert not [name for module, name in imports(path) if module == "lmdp" and name not in MAY_IMPORT]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_room_reaches_for_underscore_names_of_another(path: Path) -> None:
    mine = f"lmdp.{room(path)}"
    foreign = [(module, name) for module, name in imports(path) if not f"{module}.".startswith(f"{mine}.")]
    private = [
        (m, n) for m, n in foreign if any(part.startswith("_") for part in [*m.split("."), n] if part != "__version__")
    ]
    assert private == []


@pytest.mark.parametrize("init", sorted(ROOT.glob("*/**/__init__.py")), ids=lambda p: str(p.parent.relative_to(ROOT)))
def test_every_room_lists_all_its_files_in_its_docstring(init: Path) -> None:
    told = ast.get_docstring(parsed(init)) or ""
    first_words = {line.split()[0].rstrip("/") for line in told.splitlines() if line.split()}
    files = {p.stem for p in init.parent.glob("*.py")} | {p.parent.name for p in init.parent.glob("*/__init__.py")}
    if init.parent.name == "recipes":
        return  # a folder of data
    assert files - {"__init__"} <= first_words


def test_the_mechanism_can_be_read_in_one_sitting() -> None:
    lines = {p.stem: len(p.read_text().splitlines()) for p in (ROOT / "private").glob("*.py")}
    assert sum(lines.values()) <= 1900
    assert sum(lines[name] for name in PROOF) <= 1200
    assert max(len(p.read_text().splitlines()) for p in FILES) <= 400


@pytest.mark.parametrize("name", PROOF)
def test_each_file_of_the_proof_opens_with_its_guarantee_and_what_it_assumes(name: str) -> None:
    told = ast.get_docstring(parsed(ROOT / "private" / f"{name}.py")) or ""
    assert "Guarantee. " in told
    assert "Assumes " in told


def test_make_private_is_under_forty_lines_and_a_step_asks_nobody_what_it_is() -> None:
    engine = parsed(ROOT / "private" / "engine.py")
    (made,) = [n for n in ast.walk(engine) if isinstance(n, ast.FunctionDef) and n.name == "make_private"]
    body = [statement for statement in made.body if not isinstance(statement, ast.Expr) or not _is_text(statement)]
    assert body[-1].end_lineno - body[0].lineno + 1 < 40  # type: ignore[operator]
    assert "isinstance" not in (ROOT / "private" / "step.py").read_text()


def _is_text(statement: ast.Expr) -> bool:
    return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_a_value_is(path: Path) -> None:
    tree = parsed(path)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    assert names & NOT_NAMES == set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_function_changes_a_global(path: Path) -> None:
    """What the process knows is in one registry (`gradients/attach.py`); besides there are tables and caches."""
    assert not [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", sorted((ROOT / "gradients").rglob("*.py")), ids=lambda p: p.stem)
def test_gradients_know_nothing_of_privacy(path: Path) -> None:
    names = {n.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Name)}
    assert not {name for name in names if any(word in name.lower() for word in ("epsilon", "noise", "clip", "privacy"))}


@pytest.mark.parametrize("module", ["methods", "accounting", "lineage", "data.readers", "app.cli", "app.config"])
def test_tables_and_command_line_are_read_without_torch(module: str) -> None:
    code = f"import sys, lmdp.{module}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
