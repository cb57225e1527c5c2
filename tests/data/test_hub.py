"""hf:NAME, from local folders: the library takes paths as it takes names."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the library is imported

import numpy as np
import pytest
import torch

from lmdp.data import load
from tests.data.files import random_images, save

datasets = pytest.importorskip("datasets")


def rows(count: int, seed: int = 0) -> dict[str, list]:
    return {"img": list(random_images(count, 6, 6, 3, seed=seed)), "fine": [i % 3 for i in range(count)]}


def parquet(root: Path, name: str, columns: dict[str, list], **kinds: object) -> None:
    root.mkdir(exist_ok=True)
    features = datasets.Features({"img": datasets.Image(), **kinds})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(root / f"{name}-00000.parquet")


def test_columns_are_found_by_their_types(tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=["a", "b", "c"])
    parquet(tmp_path / "set", "train", {**rows(7), "id": list(range(7))}, fine=kind, id=datasets.Value("int64"))
    parquet(tmp_path / "set", "test", {**rows(3, seed=1), "id": list(range(3))}, fine=kind, id=datasets.Value("int64"))
    source = load(f"hf:{tmp_path / 'set'}", cache=tmp_path / "cache")
    assert torch.equal(source.train.pixels, torch.tensor(random_images(7, 6, 6, 3)).permute(0, 3, 1, 2))
    assert source.train.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(source.test) == 3
    assert source.classes == ("a", "b", "c")
    limited = load(f"hf:{tmp_path / 'set'}?limit=4&size=3&channels=1", cache=tmp_path / "cache")
    assert len(limited.train) == 4
    assert torch.equal(
        load(f"hf:{tmp_path / 'set'}?limit=7", cache=tmp_path / "cache").train.pixels, source.train.pixels
    )
    assert limited.train.shape == limited.test.shape == (1, 3, 3)
    by_id = load(f"hf:{tmp_path / 'set'}?label=id&limit=2", cache=tmp_path / "cache")
    assert by_id.classes == tuple("0123456")


def test_a_folder_of_images_and_no_test_part(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for i in range(3):
            save(tmp_path / "images" / "train" / name / f"{i}.png", random_images(5, 5, seed=i))
    source = load(f"hf:{tmp_path / 'images'}", cache=tmp_path / "cache")
    assert source.classes == ("cat", "dog")
    assert [fact.fact for fact in source.inferred] == ["there are these 2 classes", "images are grey"]
    assert load(f"hf:{tmp_path / 'images'}", classes=2, channels=1, cache=tmp_path / "cache").inferred == ()
    assert source.test is None
    assert source.train.shape == (1, 5, 5)


def test_columns_that_cannot_be_told_apart_must_be_named(tmp_path: Path) -> None:
    two = {**rows(4), "coarse": [0, 1, 0, 1]}
    parquet(tmp_path / "set", "train", two, fine=datasets.Value("int64"), coarse=datasets.Value("int8"))
    with pytest.raises(ValueError, match=r"2 columns that could be the label .*\?label=COLUMN"):
        load(f"hf:{tmp_path / 'set'}", cache=tmp_path / "cache")
    assert load(f"hf:{tmp_path / 'set'}?label=coarse", cache=tmp_path / "cache").classes == ("0", "1")
    with pytest.raises(ValueError, match="no label column 'none'"):
        load(f"hf:{tmp_path / 'set'}?label=none", cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="no image column 'fine'; it has img"):
        load(f"hf:{tmp_path / 'set'}?image=fine&label=fine", cache=tmp_path / "cache")


def test_what_is_no_data_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hf:nobody/nothing could not be loaded") as caught:
        load("hf:nobody/nothing", cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    parquet(
        tmp_path / "set", "train", {"img": [np.zeros((4, 4), np.uint8)], "fine": [-1]}, fine=datasets.Value("int64")
    )
    with pytest.raises(ValueError, match="label -1"):
        load(f"hf:{tmp_path / 'set'}", cache=tmp_path / "cache")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'lmdp\[hf\]'"):
        load(f"hf:{tmp_path / 'set'}")


def letters(root: Path, part: str, kind: object, texts: list | None = None, **columns: list) -> str:
    root.mkdir(exist_ok=True)
    count = len(columns["label"])
    features = datasets.Features({name: datasets.Value("string") for name in ("text", *columns)} | {"label": kind})
    rows = {"text": texts or [f"{part} letter {i}" for i in range(count)], **columns}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(root / f"{part}-00000.parquet")
    return f"hf:{root}"


def test_labels_of_texts_may_be_names_and_columns_called_text_and_label_are_these(tmp_path: Path) -> None:
    labels = ["ham", "spam"] * 10
    spec = letters(
        tmp_path / "set", "train", datasets.Value("string"), label=labels, subject=[f"{i}" for i in range(20)]
    )
    given = {"tokenizer": "words", "cache": tmp_path / "cache"}
    for asked in (spec, f"{spec}?text=text&label=label"):
        source = load(asked, classes=["spam", "ham"], **given)
        assert (
            sorted([*source.train.labels.tolist(), *(source.test.labels if source.test else ())]) == [0] * 10 + [1] * 10
        )
    assert load(spec, **given).classes == ("ham", "spam")


def test_a_split_without_labels_is_left_out_and_a_row_without_one_or_without_text_refused(tmp_path: Path) -> None:
    kind = datasets.ClassLabel(names=["no", "yes"])
    letters(tmp_path / "set", "test", kind, label=[-1, -1])
    letters(tmp_path / "set", "validation", kind, label=[0, 1, 1])
    spec = letters(tmp_path / "set", "train", kind, label=[0, 1] * 4)
    said: list[str] = []
    source = load(spec, tokenizer="words", cache=tmp_path / "cache", say=said.append)
    assert source.test is not None
    assert source.test.labels.tolist() == [0, 1, 1]
    assert any("split test of" in line and "has no labels" in line for line in said)
    for name, labels, texts, wrong in [
        ("mixed", [0, -1], None, r"train row 1: the label is -1; it must be 0 to 1"),
        ("silent", [0, 1], ["a letter", None], r"train row 1: the text is None"),
    ]:
        with pytest.raises(ValueError, match=wrong):
            load(
                letters(tmp_path / name, "train", kind, texts, label=labels),
                tokenizer="words",
                cache=tmp_path / "cache",
            )
