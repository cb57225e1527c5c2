"""Texts: read alike from every kind of file, as whole numbers, each text's place in splits up to itself."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdp.data import Texts, load
from lmdp.data.examples import names_of
from lmdp.data.tokens import BUILT_IN, tokenizer_for

ROWS = [(f"letter {i} about {'lunch' if i % 3 else 'money'}, at {i % 24}", i % 2) for i in range(60)]


def write_jsonl(path: Path, rows: list[tuple[str, object]], text: str = "text", label: str = "label") -> str:
    raw = "".join(json.dumps({text: t, label: y, "other": 1}) + "\n" for t, y in rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return f"jsonl:{path}"


def write_csv(path: Path, rows: list[tuple[str, object]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "label"), *rows])
    return f"csv:{path}"


def same(first: Texts, second: Texts) -> bool:
    pairs = ((first.ids, second.ids), (first.mask, second.mask), (first.labels, second.labels))
    return all(torch.equal(one, other) for one, other in pairs)


def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    specs = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_jsonl(tmp_path / "a.jsonl.gz", ROWS),
        write_jsonl(tmp_path / "b.jsonl", ROWS, "body", "kind") + "?text=body&label=kind",
        write_csv(tmp_path / "a.csv", ROWS),
    ]
    sources = [load(spec, tokenizer="words", length=9, classes=2) for spec in specs]
    for source in sources:
        assert same(source.train, sources[0].train)  # type: ignore[arg-type]
        assert same(source.test, sources[0].test)  # type: ignore[arg-type]
    assert len(sources[0].train) + len(sources[0].test or ()) == len(ROWS)
    assert sources[0].inferred == ()
    assert not sources[0].by_position


def test_numbers_for_words_stay_whole_numbers_and_bring_their_mask(tmp_path: Path) -> None:
    source = load(write_csv(tmp_path / "a.csv", ROWS), tokenizer="bytes", length=12)
    inputs, labels = source.train.tensors()
    assert isinstance(inputs, dict)
    assert {name: rows.dtype for name, rows in inputs.items()} == dict.fromkeys(inputs, torch.int64)
    assert list(inputs) == ["input_ids", "attention_mask"]
    assert labels.dtype == torch.int64
    assert "there are 2 classes" in str(source.inferred[0])


def test_taking_one_text_away_leaves_every_other_where_it_was(tmp_path: Path) -> None:
    def parts(rows: list[tuple[str, int]]) -> tuple[set[bytes], set[bytes], set[bytes]]:
        source = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer="words", length=9, classes=2)  # type: ignore[arg-type]
        halves = load(f"jsonl:{tmp_path / 'a.jsonl'}?half=1", tokenizer="words", length=9, classes=2)
        assert source.test is not None
        return set(source.train.contents()), set(source.test.contents()), set(halves.train.contents())

    whole = parts(ROWS)
    for gone in (0, 17, 59):
        rest = parts([row for i, row in enumerate(ROWS) if i != gone])
        assert all(len(before - after) <= 1 and not after - before for before, after in zip(whole, rest))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.sampled_from(BUILT_IN))
def test_what_a_text_is_does_not_depend_on_its_padding(texts: list[str], name: str) -> None:
    tokenizer = tokenizer_for(name)
    labels = torch.zeros(len(texts), dtype=torch.int64)
    short, long = (Texts(*tokenizer.encode(texts, length), labels) for length in (130, 150))
    assert list(short.contents()) == list(long.contents())
    assert short.digests(b"k") == long.digests(b"k")
    assert int(long.ids.max()) < tokenizer.vocabulary


@pytest.mark.parametrize("name", BUILT_IN)
def test_noise_is_made_of_words_only_and_follows_from_its_generator(name: str) -> None:
    tokenizer = tokenizer_for(name)
    ids, mask = tokenizer.noise(50, 20, torch.Generator().manual_seed(1))
    again, _ = tokenizer.noise(50, 20, torch.Generator().manual_seed(1))
    assert torch.equal(ids, again)
    assert bool(mask.all())
    assert set(ids[:, 0].tolist()) == {tokenizer.begin}
    assert not set(ids[:, 1:].flatten().tolist()) & tokenizer.special
    assert len(ids.unique(dim=0)) == 50


def test_names_of_classes_are_declared_or_said_to_be_inferred(tmp_path: Path) -> None:
    named = [(text, "spam" if label else "ham") for text, label in ROWS]
    spec = write_csv(tmp_path / "a.csv", named)
    declared = load(spec, tokenizer="words", classes=["spam", "ham"])
    assert (declared.classes, declared.inferred) == (("spam", "ham"), ())
    inferred = load(spec, tokenizer="words")
    assert inferred.classes == ("ham", "spam")
    assert '--classes "ham,spam"' in str(inferred.inferred[0])
    by_number = load(write_csv(tmp_path / "b.csv", ROWS), tokenizer="words", classes=["ham", "spam"])
    assert torch.equal(by_number.train.labels, inferred.train.labels)


def test_a_test_file_is_the_test_part(tmp_path: Path) -> None:
    spec = write_jsonl(tmp_path / "a.jsonl", ROWS[:40])
    write_jsonl(tmp_path / "t.jsonl", ROWS[40:])
    source = load(f"{spec}?test={tmp_path / 't.jsonl'}", tokenizer="words", classes=2)
    assert (len(source.train), len(source.test or ())) == (40, 20)
    assert names_of(source.test) == tuple(f"t.jsonl:{line}" for line in range(1, 21))


def test_every_text_keeps_the_line_of_its_file_through_splits_and_halves(tmp_path: Path) -> None:
    for spec in (write_jsonl(tmp_path / "a.jsonl", ROWS), write_csv(tmp_path / "a.csv", ROWS)):
        lines = Path(spec.partition(":")[2]).read_text().splitlines()
        source = load(f"{spec}?half=1", tokenizer="words", length=9, classes=2)
        assert isinstance(source.train, Texts)
        every = source.train if source.test is None else source.train.joined(source.test)  # type: ignore[arg-type]
        names = names_of(every)
        assert len(set(names)) == len(every) > 9
        tokenizer = tokenizer_for("words")
        for row, name in enumerate(names):
            text = next(text for text, _ in ROWS if text in lines[int(name.rpartition(":")[2]) - 1])
            assert torch.equal(tokenizer.encode([text], 9)[0][0], every.ids[row])


LINES = {
    "not json\n": "line 1 is not JSON",
    '["text"]\n': "line 1 is a list",
    '{"text": "a"}\n': r"no column 'label' for the label; it has text: name one with \?label=COLUMN",
    '{"text": 3, "label": 1}\n': "the text is 3",
    '{"text": "a", "label": 1.5}\n': "the label is 1.5",
    '{"text": "a", "label": null}\n': "the label is None",
    '{"text": "a", "label": 7}\n': "label 7; with 2 classes labels must be 0 to 1",
    '{"text": "a", "label": "x"}\n{"text": "b", "label": 1}\n': "none of the classes|one kind",
    '{"text": "a", "label": -1}\n': "label -1",
}


@pytest.mark.parametrize("lines", LINES)
def test_a_bad_line_is_named_with_what_would_be_right(tmp_path: Path, lines: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=LINES[lines]):
        load(f"jsonl:{tmp_path / 'a.jsonl'}", tokenizer="words", classes=2)


def test_texts_are_refused_without_a_tokenizer_and_with_settings_of_images(tmp_path: Path) -> None:
    spec = write_csv(tmp_path / "a.csv", ROWS)
    with pytest.raises(ValueError, match="add --tokenizer FOLDER"):
        load(spec)
    with pytest.raises(ValueError, match="size and channels are for images"):
        load(spec, tokenizer="words", size=8)
    with pytest.raises(ValueError, match="it must be bytes or words, or a folder"):
        load(spec, tokenizer="wrds")
    with pytest.raises(ValueError, match=r"did you mean 'csv:.*a\.csv'"):
        load(str(tmp_path / "a.csv"), tokenizer="words")


def test_documentation_that_installs_with_packages_is_read_without_running_it() -> None:
    source = load("sklearn-docs?limit=300", tokenizer="words", length=16)
    assert source.classes == ("cluster", "ensemble", "linear_model", "metrics", "model_selection")
    assert source.inferred == ()
    assert (len(source.train), source.train.shape) == (300, (16,))
    assert set(source.train.labels.tolist()) == set(range(5))


def test_text_columns_of_a_hub_dataset_are_found_by_type_or_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    where = tmp_path / "set"
    where.mkdir()
    names = datasets.ClassLabel(names=["no", "yes", "never"])
    kinds = datasets.Features({"body": datasets.Value("string"), "title": datasets.Value("string"), "kind": names})
    content = {"body": [t for t, _ in ROWS], "title": ["x"] * len(ROWS), "kind": [y for _, y in ROWS]}
    datasets.Dataset.from_dict(content, features=kinds).to_parquet(where / "train.parquet")
    with pytest.raises(ValueError, match=r"2 columns that could be the text .*\?text=COLUMN"):
        load(f"hf:{where}", tokenizer="words", cache=tmp_path / "cache")
    source = load(f"hf:{where}?text=body", tokenizer="words", length=9, cache=tmp_path / "cache")
    assert source.classes == ("no", "yes", "never")
    plain = load(write_csv(tmp_path / "a.csv", ROWS), tokenizer="words", length=9, classes=3)
    assert same(source.train, plain.train)  # type: ignore[arg-type]


def test_tables_without_labels_are_read_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in ROWS))
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{text}"\n' for text, _ in ROWS))
    for spec in (f"jsonl:{tmp_path / 'a.jsonl'}", f"csv:{tmp_path / 'a.csv'}"):
        source = load(spec, tokenizer="words", labelled=False)
        assert (len(source.train), source.test, source.classes) == (60, None, ("",))
        with pytest.raises(ValueError, match="no column 'label'"):
            load(spec, tokenizer="words")
        with pytest.raises(ValueError, match="no column 'kind'"):
            load(f"{spec}?label=kind", tokenizer="words", labelled=False)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "b", "label": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:1 has no label, and other rows have one"):
        load(f"jsonl:{tmp_path / 'b.jsonl'}", tokenizer="words", labelled=False)
    labelled = load(write_csv(tmp_path / "c.csv", ROWS), tokenizer="words", classes=2)
    assert same(load(f"csv:{tmp_path / 'c.csv'}", tokenizer="words", classes=2, labelled=False).train, labelled.train)  # type: ignore[arg-type]
