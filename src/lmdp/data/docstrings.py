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
FEWEST_WORDS = 8
_LETTERS, _GAP = re.compile(r"[A-Za-z]{2,}"), re.compile(r"\n\s*\n")


def read_docs(request: Request) -> Source:
    package, parts = PARTS[request.kind]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{request.spec} needs the package {package}, which is missing: install it")
    labels: dict[str, str] = {}  # a paragraph that occurs again counts where it came first
    for part in parts:
        for file in sorted((Path(spec.submodule_search_locations[0]) / part).rglob("*.py")):
            if "tests" not in file.parts:
                labels |= {text: part for text in _paragraphs(file) if text not in labels}
    return text_source(replace(request, classes=parts), list(labels.items()), None)


def _paragraphs(file: Path) -> Iterator[str]:
    """Of prose: no examples, no headings, at least eight words."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_bytes())):
        for paragraph in _GAP.split(ast.get_docstring(node) or "") if isinstance(node, holders) else ():
            text = " ".join(paragraph.split())
            if ">>>" not in text and "---" not in text and len(_LETTERS.findall(text)) >= FEWEST_WORDS:
                yield text
