"""npz:PATH: every layout, and no trust in what the file says about itself."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdp.data import load
from lmdp.data.npz import read_arrays
from tests.data.files import random_images

Y = np.array([0, 2, 1, 2], np.uint8)


def saved(path: Path, **arrays: np.ndarray) -> str:
    np.savez_compressed(path / "set.npz", **arrays)
    return f"npz:{path / 'set.npz'}"


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((4, 9, 8), (1, 9, 8)),
        ((4, 9, 8, 1), (1, 9, 8)),
        ((4, 9, 8, 3), (3, 9, 8)),
        ((4, 1, 9, 8), (1, 9, 8)),
        ((4, 3, 9, 8), (3, 9, 8)),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_bytes_of_every_layout(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...], order: str) -> None:
    x = np.asarray(random_images(*shape), order=order)
    source = load(saved(tmp_path, x_train=x, y_train=Y, x_test=x[:2], y_test=Y[:2].reshape(2, 1)))
    assert source.train.shape == expected
    assert source.test.shape == expected
    channels_first = x.reshape(4, *expected) if x.ndim == 3 or shape[1] < 4 else x.transpose(0, 3, 1, 2)
    assert torch.equal(source.train.pixels, torch.tensor(np.ascontiguousarray(channels_first)))
    assert source.train.labels.tolist() == Y.tolist()
    assert source.test.labels.tolist() == [0, 2]
    assert source.classes == ("0", "1", "2")


@pytest.mark.parametrize("kind", ["<f4", ">f4", "f8", "f2"])
def test_floats_are_used_as_they_are(tmp_path: Path, kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(kind)
    source = load(saved(tmp_path, x_train=x, y_train=Y.astype(">i8")))
    assert torch.equal(source.train.tensors()[0], torch.tensor(x.astype(np.float32)))
    assert source.test is None


def test_floats_with_channels_last_are_read_as_bytes_are(tmp_path: Path) -> None:
    x, said = np.random.default_rng(0).random((4, 9, 8, 3)), []
    source = load(saved(tmp_path, x_train=x, y_train=Y), say=said.append)
    assert source.train.shape == (3, 9, 8)
    assert torch.equal(source.train.tensors()[0], torch.tensor(x.astype(np.float32)).permute(0, 3, 1, 2))
    assert any("x_train has shape (4, 9, 8, 3): read as NHWC, channels last" in line for line in said)
    assert load(saved(tmp_path, x_train=x.reshape(4, 3, 9, 8), y_train=Y)).train.shape == (3, 9, 8)


@pytest.mark.parametrize(
    "x, told",
    [
        (np.full((4, 64), 200.0), "from 200 to 200, and is taken as it is; .*bytes, it seems"),
        (np.linspace(-3000, 9, 256).reshape(4, 8, 8), "from -3000 to 9, and is taken as it is; .*: standardise with"),
        (np.linspace(-4, 4, 256).reshape(4, 64), ""),
    ],
)
def test_floats_of_unusual_size_are_told_of_with_what_to_do(tmp_path: Path, x: np.ndarray, told: str) -> None:
    said: list[str] = []
    load(saved(tmp_path, x_train=x, y_train=Y), say=said.append)
    assert re.search(told, " ".join(said)) if told else said == []


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_floats_that_are_not_finite_are_refused_with_where_they_are(tmp_path: Path, wrong: float) -> None:
    x = np.zeros((4, 5))
    x[2, 3] = x[3, 0] = wrong
    with pytest.raises(ValueError, match=r"x_train has 2 values that are NaN, .* first at \(2, 3\): of example 2\."):
        load(saved(tmp_path, x_train=x, y_train=Y))


def test_parts_of_different_shape_can_be_made_equal(tmp_path: Path) -> None:
    spec = saved(tmp_path, x_train=random_images(4, 9, 9), y_train=Y, x_test=random_images(2, 8, 8, 3), y_test=Y[:2])
    with pytest.raises(ValueError, match=r"Add \?size="):
        load(spec)
    assert load(spec, size=8, channels=1).test.shape == (1, 8, 8)


def test_classes_can_be_named_in_the_file(tmp_path: Path) -> None:
    source = load(saved(tmp_path, x_train=random_images(4, 5, 5), y_train=Y, classes=np.array(["a", "b", "c", "d"])))
    assert source.classes == ("a", "b", "c", "d")


def test_the_number_of_classes_is_declared_or_read_off_the_labels(tmp_path: Path) -> None:
    arrays = {"x_train": random_images(4, 5, 5), "y_train": Y}
    (fact,) = load(saved(tmp_path, **arrays)).inferred
    assert str(fact).startswith("if it is public that there are 3 classes, add classes = 3 (--classes 3)")
    for source in (
        load(saved(tmp_path, **arrays), classes=5),
        load(saved(tmp_path, **arrays, num_classes=np.int64(5))),
        load(saved(tmp_path, **arrays), classes=tuple("abcde")),
        load(saved(tmp_path, **arrays, classes=np.array(list("abcde")))),
    ):
        assert len(source.classes) == 5
        assert source.inferred == ()
    with pytest.raises(ValueError, match="has label 2; with 2 classes"):
        load(saved(tmp_path, **arrays), classes=2)
    with pytest.raises(ValueError, match="has 5 classes; classes declares 4"):
        load(saved(tmp_path, **arrays, num_classes=np.int64(5)), classes=4)
    for wrong in (np.int64(0), np.float64(3), np.arange(3)):
        with pytest.raises(ValueError, match=r"num_classes is .* it must be 1 number"):
            load(saved(tmp_path, **arrays, num_classes=wrong))


@pytest.mark.parametrize(
    "arrays, reason",
    [
        ({"x": Y}, "lacks x_train; it has none"),
        ({"x_test": random_images(4, 5, 5), "y_test": Y}, "lacks x_train; it has x_test, y_test"),
        ({"x_train": random_images(4, 5, 5)}, "only one of x_train and y_train"),
        ({"x_train": random_images(4, 5, 5), "y_train": Y[:3]}, "it must be 4 whole numbers"),
        ({"x_train": random_images(4, 5, 5), "y_train": Y / 2}, "y_train is float64"),
        ({"x_train": random_images(4, 5, 5), "y_train": Y.astype(int) - 1}, "label -1"),
        ({"x_train": random_images(4, 5, 5), "y_train": Y.astype(int) * 10**9}, "label 2000000000"),
        ({"x_train": random_images(4, 5, 5, 2), "y_train": Y}, "must be NHW, NHWC or NCHW"),
        ({"x_train": random_images(4, 5, 5).astype(np.int32), "y_train": Y}, "x_train is int32"),
        ({"x_train": Y, "y_train": Y}, "at least one more"),
        ({"x_train": random_images(0, 5, 5), "y_train": Y[:0]}, "no training examples"),
    ],
)
def test_arrays_that_are_no_data_set(tmp_path: Path, arrays: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(saved(tmp_path, **arrays))


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("/nonexistent/never"),)


def test_pickled_arrays_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    spec = saved(tmp_path, x_train=np.array([Bomb()], dtype=object), y_train=Y)
    with pytest.raises(ValueError, match="pickled Python objects, which are never loaded"):
        load(spec)


def npy(shape: str, body: bytes, kind: str = "|u1") -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path / "set.npz", "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path / "set.npz"


@pytest.mark.parametrize(
    "data, reason",
    [
        (npy("(1000000000000, 28, 28)", b"x" * 9), "announces shape .* but holds 9"),
        (npy("(3,)", b"x" * 9), "announces shape .* but holds 9"),
        (npy("(-3, -3)", b"x" * 9), "announces shape"),
        (npy("(3, 3)", b"x" * 9, kind="|O"), "pickled"),
        (npy("__import__('os')", b""), "not a readable npz"),
        (b"\x93NUMPY\x09\x00", r"npy version \(9, 0\)"),
        (b"", "not a readable npz"),
        (b"PK", "not a readable npz"),
    ],
)
def test_headers_that_lie(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(f"npz:{zipped(tmp_path, x_train=data, y_train=npy('(3,)', b'abc'))}")


def test_a_missing_file_and_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load(f"npz:{tmp_path / 'none.npz'}")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match="not a readable npz file"):
        load(f"npz:{tmp_path / 'text.npz'}")


def whole() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x_train=random_images(4, 5, 5), y_train=Y)
    return out.getvalue()


WHOLE = whole()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=8), st.integers(0, 60))
def test_a_damaged_file_is_read_or_a_value_error(tmp_path_factory, changes: list, cut: int) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(data[: len(data) - cut])
    with suppress(ValueError):
        arrays = read_arrays(path, ("x_train", "y_train"))
        assert all(array.size <= 100 for array in arrays.values())
