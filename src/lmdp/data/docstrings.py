"""`scipy-docs` and `sklearn-docs`: paragraphs of the documentation that installs with two packages.

Each is labelled with the part of the package that it documents. They are read off the source files; nothing of these
is run. Other versions of a package have other paragraphs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lmdp.data.images import Source
from lmdp.data.request import Request
from lmdp.data.tables import text_source

PARTS = {
    "scipy-docs": ("scipy", ("optimize", "signal", "sparse", "stats")),
    "sklearn-docs": ("sklearn", ("cluster", "ensemble", "linear_model", "metrics", "model_selection")),
}
PRIVATE = "scipy-docs"
FEWEST_WORDS = 8
NO_PROSE = (">>>", "---", "===", "***")
_LETTERS, _GAP = re.compile(r"[A-Za-z]{2,}"), re.compile(r"\n\s*\n")


def read_docs(request: Request) -> Source:
    labels = _labelled(request.kind, request)
    if request.kind != PRIVATE:  # the two may play private and public data: no paragraph is in both
        private = {_opening(text) for text in _labelled(PRIVATE, request)}
        labels = {text: part for text, part in labels.items() if _opening(text) not in private}
    return text_source(replace(request, classes=PARTS[request.kind][1]), list(labels.items()), None)


def _labelled(kind: str, request: Request) -> dict[str, str]:
    """Paragraph → part of the package. One that begins as an earlier one does is left out: cut, they are alike."""
    package, parts = PARTS[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{request.spec} needs the package {package}, which is missing: install it")
    labels: dict[str, str] = {}
    openings: set[str] = set()
    for part in parts:
        for file in sorted((Path(spec.submodule_search_locations[0]) / part).rglob("*.py")):
            for text in _paragraphs(file) if "tests" not in file.parts else ():
                if _opening(text) not in openings:
                    openings.add(_opening(text))
                    labels[text] = part
    return labels


def _opening(text: str) -> str:
    return " ".join(_LETTERS.findall(text.lower())[:FEWEST_WORDS])


def _paragraphs(file: Path) -> Iterator[str]:
    """Of prose: no examples, no headings, at least eight words."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_bytes())):
        for paragraph in _GAP.split(ast.get_docstring(node) or "") if isinstance(node, holders) else ():
            text = " ".join(paragraph.split())
            if not any(sign in text for sign in NO_PROSE) and len(_LETTERS.findall(text)) >= FEWEST_WORDS:
                yield text
