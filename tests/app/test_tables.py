"""One record in a table is all it takes: configuration, command line, report, bench and docs find it there."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from lmdp.accounting import ACCOUNTANTS, Accountant
from lmdp.app import reports
from lmdp.app.arguments import COMPARE_METHODS, DEMO_METHODS, methods_of, parser
from lmdp.app.bench.contenders import contenders
from lmdp.app.cli import COMMANDS
from lmdp.app.config import Config
from lmdp.app.runs import RunFolder, write_json
from lmdp.data.readers import READERS, Reader
from lmdp.methods import METHODS, SOURCES, Method, WeightSource
from lmdp.report import render

DOCS = Path(__file__).parents[2] / "docs"


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Method:
    method = Method("made-up", "A made-up method", METHODS["dpsgd"].scales)
    monkeypatch.setitem(METHODS, method.name, method)
    return method


def test_a_made_up_method_is_found_wherever_methods_are_named(
    made_up: Method, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Config(method=made_up.name).method == made_up.name
    assert methods_of(f"dpsgd,{made_up.name}") == ["dpsgd", made_up.name]
    assert f"{', '.join(METHODS)} (default: lm)" in help_of("train", capsys)
    assert f"lmdp {made_up.name}" in contenders()[0]
    folder = RunFolder(tmp_path)
    folder.begin(Config(method=made_up.name))
    write_json(folder / "privacy.json", {"epsilon": 1.0})
    story = reports.story([folder], "lmdp train", None)
    assert story.trained[0].privacy == {"epsilon": 1.0}
    assert made_up.label in render(story)


def test_a_made_up_method_that_promises_nothing_is_shown_without_privacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "open", Method("open", "Open", None))
    folder = RunFolder(tmp_path)
    folder.begin(Config(method="open"))
    write_json(folder / "privacy.json", {"epsilon": "inf"})
    assert reports.story([folder], "lmdp train", None).trained[0].privacy is None
    assert not any("open" in name for name in contenders()[0])


def test_a_made_up_weight_source_is_taken_by_the_methods_that_name_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SOURCES, "stars", WeightSource("stars", "from the stars"))
    monkeypatch.setitem(METHODS, "astral", Method("astral", "Astral", METHODS["lm"].scales, sources=("stars",)))
    assert Config(method="astral", weights="stars").weights == "stars"
    with pytest.raises(ValueError, match=r"weights is 'stars'; method lm needs private \(certified\)"):
        Config(method="lm", weights="stars")
    assert f"{', '.join(SOURCES)} (default: private)" in help_of("train", capsys)
    assert "lmdp astral (stars)" in contenders()[0]


def test_a_made_up_accountant_is_found_in_configuration_and_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ACCOUNTANTS, "abacus", Accountant("abacus", "with beads", object))
    assert Config(accountant="abacus").accountant == "abacus"
    assert f"{', '.join(ACCOUNTANTS)} (default: pld)" in help_of("train", capsys)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_tells_of_every_reader_with_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(READERS, "tape", Reader("tape", "from a tape", lambda _: 1 / 0, "REEL", ("speed",)))  # type: ignore[arg-type, return-value]
    told = help_of(command, capsys)
    for reader in READERS.values():
        assert f"{reader.spec} {reader.help}" in told
        assert all(f"{option}=" in told for option in reader.options)


def test_tables_and_help_need_no_torch() -> None:
    code = (
        "import sys\nfrom lmdp.app.arguments import parser\nfrom lmdp.data import READERS\nparser().format_help()\n"
        "assert READERS and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_command_is_parsed_run_and_documented() -> None:
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert list(commands.choices) == list(COMMANDS)
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert all(f"`lmdp {name}" in page for name in COMMANDS)


@pytest.mark.parametrize("methods", [DEMO_METHODS, COMPARE_METHODS])
def test_the_methods_that_are_compared_by_default_are_in_the_table(methods: str) -> None:
    assert set(methods_of(methods)) <= set(METHODS)
