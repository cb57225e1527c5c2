"""Documentation is true: links lead somewhere, code compiles and the first example runs, commands are understood."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmdp
from lmdp.app import cli
from lmdp.app.arguments import parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    prose = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head)).strip().lower().replace(" ", "-") for head in heads}


def commands(page: Path) -> Iterator[list[str]]:
    for text in blocks(page, ""):
        joined = text.replace("\\\n", " ")
        for line in joined.splitlines():
            if line.startswith("lmdp "):
                words = shlex.split(line, comments=True)
                if not any(set(word) & set("[…") or word in ("...", "WHAT") for word in words):
                    yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")  # what is left out can be written **options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one(page: Path) -> None:
    for words in commands(page):
        assert parser().parse_args(words).command == words[0]


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = blocks(ROOT / "docs" / "index.md", "python")
    exec(compile(text, "index.md", "exec"), {})
    assert "certified" in capsys.readouterr().out


def test_the_site_has_every_page_and_the_reference_every_public_name() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert all(page.name in nav for page in (ROOT / "docs").glob("*.md"))
    reference = (ROOT / "docs" / "api.md").read_text()
    objects = {name: getattr(lmdp, name) for name in lmdp.__all__}
    for name, thing in objects.items():
        module = getattr(thing, "__module__", "")
        assert re.search(rf"::: lmdp[\w.]*\.{name}$", reference, re.M) or f"::: {module}" in reference, name


def told(page: Path) -> Iterator[str]:
    """Dotted names of the library that a page tells people to import, or writes out."""
    text = page.read_text()
    for module, names in re.findall(r"^ *from (lmdp[\w.]*) import ([\w, ]+)$", text, re.M):
        yield from (f"{module}.{name.strip()}" for name in names.split(","))
    yield from re.findall(r"(?<![\w/.])lmdp(?:\.[A-Za-z_]\w*)+", FENCE.sub(lambda block: block[2], text))


def meant(dotted: str) -> object:
    """The longest part of a dotted name that is a module, and from there by attributes; None where there is none."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            thing: object = importlib.import_module(".".join(parts[:end]))
            for name in parts[end:]:
                thing = getattr(thing, name, None)
            return thing
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_reference_has_every_class_and_function_that_a_page_names(page: Path) -> None:
    reference = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    listed = [meant(name) for name in reference]
    assert None not in listed
    for module in filter(inspect.ismodule, list(listed)):
        listed += [getattr(module, name) for name in getattr(module, "__all__", vars(module))]
    for name in told(page):
        thing = meant(name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert any(thing is each for each in listed), name


def test_figures_of_methods_are_those_of_the_reproduction() -> None:
    """Test accuracy and AUC of canaries in one table, beside the label of each method in the other."""
    labels = {
        "dpsgd": "DP-SGD",
        "autos": "Auto-S",
        "psac": "DP-PSAC",
        "lm": "LM-DP-SGD (private)",
        "lm-optimal": "LM-DP-SGD, bias-optimal (public)",
    }
    measured = (ROOT / "docs" / "reproduction.md").read_text()
    given = re.findall(
        r"^\| `([\w-]+)` \|.*?\| (0[\d.]+ ± [\d.]+), ([\d.]+ ± [\d.]+)",
        (ROOT / "docs" / "methods.md").read_text(),
        re.M,
    )
    assert {name for name, *_ in given} == set(labels)
    for name, accuracy, auc in given:
        (row,) = re.findall(
            rf"^\| {re.escape(labels[name])} \|(?:[^|]*\|){{4}} ([^|]*) \| ([^|]*) \|.*\|$", measured, re.M
        )[:1]
        assert row == (auc, accuracy)


def test_aligned_arguments_of_docstrings_become_lists_of_the_reference() -> None:
    pytest.importorskip("griffe")  # of the extra docs
    listed = runpy.run_path(str(ROOT / "docs" / "argument_lists.py"))["listed"]
    told = listed(inspect.getdoc(lmdp.PrivacyEngine.make_private))
    items = re.findall(r"^- `(\w+)`: ", told, re.M)
    assert set(items) <= set(inspect.signature(lmdp.PrivacyEngine.make_private).parameters)
    assert {"method", "risk", "sharded"} <= set(items)
    assert listed("Say.\n\na    one\n     more\nb, c  two\nEnd.") == "Say.\n\n\n- `a`: one more\n- `b, c`: two\n\nEnd."


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tutorial-photos.md", "tutorial-text.md", "reading-a-report.md"])
def test_a_tutorial_can_be_followed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in the order of the page: Python is run, commands are run; settings as they stand there."""
    monkeypatch.chdir(tmp_path)
    for kind, text in FENCE.findall((ROOT / "docs" / page).read_text()):
        if kind == "python":
            exec(compile(text, page, "exec"), {})
        elif kind == "" and text.startswith("lmdp "):
            for line in text.replace("\\\n", " ").splitlines():
                assert cli.main([*shlex.split(line)[1:], "--quiet"]) == 0, line
