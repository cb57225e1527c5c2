"""A SPEC says what is wrong with it before any file is touched."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import lmdp.data
from lmdp.data import READERS, Images, Source, load
from lmdp.data.readers import GENERAL, Reader
from lmdp.data.request import Request, parse

HEAVY = {"PIL", "scipy", "sklearn", "mlxtend", "datasets", "urllib", "http", "platformdirs"}


@pytest.mark.parametrize(
    "spec, reason",
    [
        ("mnsit", "unknown data 'mnsit'; did you mean 'mnist'"),
        ("MNIST", "did you mean 'mnist'"),
        ("cifar-10", "did you mean 'cifar10'"),
        ("", "unknown data ''"),
        ("images.npz", "did you mean 'npz:images.npz'"),
        (".", r"did you mean 'folder:\.'"),
        ("npz", "write npz:PATH"),
        ("hf:", "write hf:NAME"),
        ("mnist:here", "takes no path but has 'here'"),
        ("digits?colour=3", "unknown option 'colour' for digits; allowed are half, limit, size, channels"),
        ("digits?attribute=Smiling", "unknown option 'attribute' for digits"),
        ("digits?limit", "option 'limit' for digits has no value"),
        ("digits?limit=", "option 'limit' for digits has no value"),
        ("digits?limit=3&limit=4", "given twice"),
        ("digits?limit=0", "limit is '0'; it must be a whole number from 1"),
        ("digits?limit=-1", "limit is '-1'"),
        ("digits?limit=1e3", "limit is '1e3'"),
        ("digits?limit=" + "9" * 5000, "must be a whole number"),
        ("digits?size=5000", "size is '5000'; it must be a whole number from 1 to 4096"),
        ("digits?channels=2", r"channels is 2; it must be 1 \(grey\) or 3 \(colour\)"),
    ],
)
def test_a_wrong_spec_is_named_with_what_is_allowed(spec: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        load(spec)
    assert "\n" not in str(caught.value)


def test_arguments_are_checked_like_options_and_must_agree_with_them() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        load("digits", size=0)
    with pytest.raises(ValueError, match="channels is 4"):
        load("digits", channels=4)
    with pytest.raises(ValueError, match="size is 16 in the SPEC but 32 is needed here"):
        load("digits?size=16", size=32)
    assert load("digits?size=16", size=16).train.shape == (1, 16, 16)


def test_options_shape_train_and_test_and_limit_only_train() -> None:
    source = load("digits?limit=50&size=12&channels=3")
    assert source.spec == "digits?limit=50&size=12&channels=3"
    assert (len(source.train), len(source.test)) == (50, 355)
    assert source.train.shape == source.test.shape == (3, 12, 12)
    few = load("digits?limit=50").train
    assert len(few) == 50
    assert torch.equal(few.pixels, load("digits?limit=50").train.pixels)
    assert len(load("digits?limit=5000").train) == 1442


@pytest.mark.parametrize("reader", READERS.values(), ids=lambda reader: reader.name)
def test_every_reader_has_a_line_of_help_and_a_row_in_the_docs(reader: Reader) -> None:
    assert READERS[reader.name] is reader
    assert reader.help
    assert "\n" not in reader.help
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert re.search(rf"^\|.*`{re.escape(reader.spec)}[`?].*\|$", page, re.MULTILINE)
    assert all(f"`{option}=" in page for option in (*reader.options, *GENERAL))


def test_a_made_up_reader_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(request: Request) -> Source:
        images = Images(torch.zeros(int(request.options["rows"]), 1, 2, 2, dtype=torch.uint8), torch.zeros(3).long())
        return Source(request.spec, images, None, (request.path,))

    monkeypatch.setitem(READERS, "tape", Reader("tape", "from a tape", read, path="REEL", options=("rows",)))
    source = load("tape:seven?rows=3&size=4&limit=2")
    assert (source.classes, source.train.shape, len(source.train)) == (("seven",), (1, 4, 4), 2)
    assert parse("tape:seven?rows=3").kind == "tape"
    for spec, reason in {
        "tape": "'tape' lacks what it reads; write tape:REEL",
        "tap:x": "did you mean 'tape'",
        "nothing": "tape:REEL",
        "tape:x?speed=3": "allowed are rows, half, limit, size, channels",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse(spec)


@pytest.mark.parametrize("path", sorted(Path(lmdp.data.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_importing_the_room_stays_cheap(path: Path) -> None:
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & HEAVY


def test_the_two_halves_are_disjoint_complete_and_about_as_large() -> None:
    one, two, whole = load("digits?half=1"), load("digits?half=2"), load("digits")

    def contents(images: Images) -> list[bytes]:
        return sorted(example.numpy().tobytes() for example in images.pixels)

    assert sorted(contents(one.train) + contents(two.train)) == contents(whole.train)
    assert len(one.test) + len(two.test) == len(whole.test)
    assert abs(len(one.train) - len(two.train)) <= 4 * len(whole.train) ** 0.5
    old = load("digits?half=1", splits="position")
    assert old.by_position
    assert not one.by_position
    with pytest.raises(ValueError, match="splits is 'magic'; it must be 'content' or 'position'"):
        load("digits", splits="magic")
    with pytest.raises(ValueError, match="option half is '3'"):
        load("digits?half=3")
