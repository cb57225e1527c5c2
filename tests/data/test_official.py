"""The official formats, downloaded and read; and what broken files of each kind give."""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdp.data import load, official
from lmdp.data.cifar import LAYOUTS, members_of, parse_records
from lmdp.data.download import DownloadError
from lmdp.data.idx import parse_idx
from lmdp.data.svhn import parse_mat
from tests.data.files import idx, idx_gz, mat, random_images, records, tar_gz
from tests.data.server import Server, serving

X, Y = random_images(6, 28, 28), np.arange(6, dtype=np.uint8)
IDX_FILES = {
    "train-images-idx3-ubyte.gz": idx_gz(X[:4]),
    "train-labels-idx1-ubyte.gz": idx_gz(Y[:4]),
    "t10k-images-idx3-ubyte.gz": idx_gz(X[4:]),
    "t10k-labels-idx1-ubyte.gz": idx_gz(Y[4:]),
}
SMALL = random_images(7, 3, 32, 32)
CIFAR10 = {
    **{f"cifar-10-batches-bin/data_batch_{i + 1}.bin": records(SMALL[i : i + 1], [i]) for i in range(5)},
    "cifar-10-batches-bin/test_batch.bin": records(SMALL[5:], [8, 9]),
    "cifar-10-batches-bin/batches.meta.txt": b"a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n",
}
CIFAR100 = {
    "cifar-100-binary/train.bin": records(SMALL[:5], [1] * 5, [10, 20, 30, 40, 99]),
    "cifar-100-binary/test.bin": records(SMALL[5:], [19, 19], [0, 50]),
    "cifar-100-binary/fine_label_names.txt": "\n".join(f"n{i}" for i in range(100)).encode(),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as running:
        yield running


def publish(server: Server, monkeypatch: pytest.MonkeyPatch, spec: str, files: dict[str, bytes]) -> None:
    remotes = tuple(server.remote(name, data) for name, data in files.items())
    monkeypatch.setitem(official.REMOTES, spec, remotes)


def test_every_official_file_has_a_checksum_and_an_address_that_ends_in_its_name() -> None:
    http_only = {"fashion-mnist.s3-website.eu-central-1.amazonaws.com", "ufldl.stanford.edu"}
    for spec, remotes in official.REMOTES.items():
        for remote in remotes:
            assert re.fullmatch("[0-9a-f]{64}", remote.sha256), spec
            assert remote.urls
            for url in remote.urls:
                parts = urllib.parse.urlsplit(url)
                assert parts.scheme == "https" or parts.netloc in http_only
                assert parts.path.endswith("/" + remote.name)
    assert len({remote.sha256 for remotes in official.REMOTES.values() for remote in remotes}) == 12


@pytest.mark.parametrize("spec, first", [("mnist", "0"), ("fashion-mnist", "T-shirt/top")])
def test_idx_sets(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: str, first: str) -> None:
    publish(server, monkeypatch, spec, IDX_FILES)
    source = load(spec, cache=tmp_path)
    assert source.inferred == ()
    assert torch.equal(source.train.pixels, torch.tensor(X[:4]).unsqueeze(1))
    assert torch.equal(source.test.pixels, torch.tensor(X[4:]).unsqueeze(1))
    assert source.train.labels.tolist() == [0, 1, 2, 3]
    assert source.test.labels.tolist() == [4, 5]
    assert source.classes[0] == first
    assert len(source.classes) == 10
    assert (tmp_path / spec / "t10k-labels-idx1-ubyte.gz").exists()


def test_the_cache_folder_can_be_set_in_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(server, monkeypatch, "mnist", IDX_FILES)
    monkeypatch.setenv("LMDP_DATA", str(tmp_path / "chosen"))
    load("mnist")
    assert (tmp_path / "chosen" / "mnist" / "train-images-idx3-ubyte.gz").exists()


def test_an_interrupted_set_is_completed_by_the_next_load(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(server, monkeypatch, "mnist", IDX_FILES)
    server.drop_after = 1000
    with pytest.raises(DownloadError, match=r"train-images-idx3-ubyte.gz could not be downloaded"):
        load("mnist", cache=tmp_path)
    server.drop_after = None
    assert len(load("mnist", cache=tmp_path).train) == 4
    assert server.ranges[:2] == [None, "bytes=1000-"]


@pytest.mark.parametrize(
    "spec, name, members",
    [("cifar10", "cifar-10-binary.tar.gz", CIFAR10), ("cifar100", "cifar-100-binary.tar.gz", CIFAR100)],
)
def test_cifar_archives(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    spec: str,
    name: str,
    members: dict[str, bytes],
) -> None:
    archive = {"../outside.txt": b"no", "cifar-10-batches-bin/readme.html": b"", **members}
    publish(server, monkeypatch, spec, {name: tar_gz(archive)})
    source = load(spec, cache=tmp_path)
    assert source.inferred == ()
    assert torch.equal(source.train.pixels, torch.tensor(SMALL[:5]))
    assert torch.equal(source.test.pixels, torch.tensor(SMALL[5:]))
    expected = ([0, 1, 2, 3, 4], [8, 9]) if spec == "cifar10" else ([10, 20, 30, 40, 99], [0, 50])
    assert (source.train.labels.tolist(), source.test.labels.tolist()) == expected
    assert len(source.classes) == (10 if spec == "cifar10" else 100)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {name, f".{name}.lock"}


def test_svhn_digits_with_ten_as_zero(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = random_images(32, 32, 3, 5)
    files = {
        "train_32x32.mat": mat(X=x, y=np.array([[1], [10], [9], [2], [10]], np.uint8)),
        "test_32x32.mat": mat(X=x[..., :2], y=np.array([[5], [10]], np.uint8)),
    }
    publish(server, monkeypatch, "svhn", files)
    source = load("svhn", cache=tmp_path)
    assert source.inferred == ()
    assert source.train.labels.tolist() == [1, 0, 9, 2, 0]
    assert source.test.labels.tolist() == [5, 0]
    assert torch.equal(source.train.pixels[3], torch.tensor(x[..., 3]).permute(2, 0, 1))


def by_reason(value: object) -> str:
    """Names of tests without the bytes of their files, which hold the time of day."""
    return value if isinstance(value, str) else "file"


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda data: data[:-20], "not a whole gzip file"),
        (lambda data: data[:40] + bytes([data[40] ^ 255]) + data[41:], "not a whole gzip file"),
        (lambda data: b"<html>busy</html>", "not a whole gzip file"),
        (lambda data: b"", "begins with nothing"),
        (lambda data: gzip.compress(b""), "begins with nothing"),
        (lambda data: gzip.compress(idx(Y)), "begins with 00 00 08 01"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1]), "but holds 3135"),
        (lambda data: gzip.compress(gzip.decompress(data) + b"x"), "but holds 3137"),
        (lambda data: gzip.compress(bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"x"), "announces .4294967295"),
        (lambda data: idx_gz(X[:3]), "3 images but train-labels-idx1-ubyte.gz has 4 labels"),
    ],
)
def test_broken_idx_files(server: Server, monkeypatch, tmp_path: Path, damage, reason: str) -> None:
    name = "train-images-idx3-ubyte.gz"
    publish(server, monkeypatch, "mnist", {**IDX_FILES, name: damage(IDX_FILES[name])})
    with pytest.raises(ValueError, match=reason) as caught:
        load("mnist", cache=tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "archive, reason",
    [
        (tar_gz({k: v for k, v in CIFAR10.items() if "batch_4" not in k}), "lacks .*data_batch_4.bin"),
        (tar_gz({**CIFAR10, "cifar-10-batches-bin/data_batch_4.bin": b"short"}), "multiple of 3073"),
        (tar_gz({**CIFAR10, "cifar-10-batches-bin/test_batch.bin": b""}), "0 bytes"),
        (tar_gz({**CIFAR10, "cifar-10-batches-bin/test_batch.bin": records(SMALL[:1], [10])}), "label 10; .* 0 to 9"),
        (tar_gz({**CIFAR10, "cifar-10-batches-bin/batches.meta.txt": b"a b"}), "names 2 classes"),
        (tar_gz(CIFAR10)[:-900], "not a whole tar.gz"),
        (gzip.compress(b"no archive"), "not a whole tar.gz"),
        (b"no gzip", "not a whole tar.gz"),
        (b"", "not a whole tar.gz"),
    ],
    ids=by_reason,
)
def test_broken_cifar_archives(server: Server, monkeypatch, tmp_path: Path, archive: bytes, reason: str) -> None:
    publish(server, monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": archive})
    with pytest.raises(ValueError, match=reason):
        load("cifar10", cache=tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "other"])
@pytest.mark.parametrize("size", [1 << 20, 1 << 62])
def test_a_member_that_announces_more_than_there_is_is_refused_at_once(tmp_path: Path, name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512))
    with pytest.raises(ValueError, match=r"not a whole"):
        members_of(tmp_path / "a.tar.gz", ("train.bin",))


def test_a_link_in_the_place_of_a_member_is_not_followed(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("train.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    (tmp_path / "a.tar.gz").write_bytes(out.getvalue())
    with pytest.raises(ValueError, match=r"lacks train.bin"):
        members_of(tmp_path / "a.tar.gz", ("train.bin",))


GOOD_MAT = mat(X=random_images(4, 4, 3, 2), y=np.array([[1], [2]], np.uint8))


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "not a readable MATLAB file"),
        (b"x" * 500, "not a readable MATLAB file"),
        (GOOD_MAT[:-30], "not a readable MATLAB file"),
        (GOOD_MAT[:140] + b"\xff\xff\xff\x7f" + GOOD_MAT[144:], "not a readable MATLAB file"),
        (mat(X=np.zeros((4, 4, 3, 2), np.uint8)), "lacks X or y"),
        (mat(X=np.zeros((4, 4, 3, 2)), y=np.ones((2, 1), np.uint8)), "X is float64"),
        (mat(X=np.zeros((4, 4, 3, 2), np.uint8), y=np.ones((3, 1), np.uint8)), r"shape \(3, 1\)"),
        (mat(X=np.zeros((4, 4, 3, 2), np.uint8), y=np.array([[1], [11]], np.uint8)), "1 to 10"),
    ],
    ids=by_reason,
)
def test_broken_mat_files(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "train_32x32.mat").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        parse_mat(tmp_path / "train_32x32.mat")


def header(dimensions: int) -> st.SearchStrategy[bytes]:
    sizes = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), min_size=dimensions, max_size=dimensions)
    return sizes.map(lambda s: bytes([0, 0, 8, dimensions]) + struct.pack(f">{dimensions}I", *s))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 3]), st.data())
def test_any_bytes_are_an_idx_array_or_a_value_error(dimensions: int, data: st.DataObject) -> None:
    blob = data.draw(st.binary(max_size=40) | st.builds(bytes.__add__, header(dimensions), st.binary(max_size=30)))
    try:
        array = parse_idx(blob, "any", dimensions=dimensions)
    except ValueError:
        return
    assert idx(array) == blob


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["cifar10", "cifar100"]), st.integers(0, 2), st.integers(-1, 1), st.integers(0, 255))
def test_any_bytes_are_cifar_records_or_a_value_error(spec: str, count: int, more: int, fill: int) -> None:
    layout = LAYOUTS[spec]
    blob = bytes([fill]) * max(0, count * (3072 + layout.label_bytes) + more)
    try:
        images = parse_records([blob], layout, "any")
    except ValueError:
        return
    assert (len(images), more) == (count, 0)
    assert fill < layout.classes


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 1535), st.integers(0, 255)), max_size=12))
def test_any_bytes_are_an_archive_or_a_value_error(tmp_path_factory, noise: bytes, changes: list) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.tar.gz"
    inside = bytearray(gzip.decompress(tar_gz({"train.bin": b"12345"}))[:1536])
    for at, value in changes:
        inside[at] = value
    for data in (noise, gzip.compress(noise), gzip.compress(bytes(inside), compresslevel=1)):
        path.write_bytes(data)
        with suppress(ValueError):
            assert len(members_of(path, ("train.bin",))["train.bin"]) <= 1536
