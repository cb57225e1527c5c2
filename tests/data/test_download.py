"""A file under its final name is whole and verified, whatever the network, the server and the disk do."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmdp.data.download import NO_LOCKS, DownloadError, Remote, fetch
from tests.data.server import Server, serving

DATA = bytes(range(256)) * 4096  # 1 MB: several chunks


def quiet(_: str) -> None:
    pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as running:
        yield running


def only_the_file(folder: Path) -> bool:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == ["set.bin"]


def test_a_file_arrives_is_verified_and_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    remote, said = server.remote("set.bin", DATA), []
    assert fetch(remote, tmp_path / "deep" / "er", said.append).read_bytes() == DATA
    assert fetch(remote, tmp_path / "deep" / "er", said.append).read_bytes() == DATA
    assert server.ranges == [None]
    assert only_the_file(tmp_path / "deep" / "er")
    assert 4 <= len(said) <= 10
    assert said[-1] == "set.bin: 100 % of 1.0 MB"


def test_an_interrupted_transfer_is_resumed_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA)
    server.drop_after = 600_000
    with pytest.raises(DownloadError, match="broke off after 600000 of 1048576 bytes"):
        fetch(remote, tmp_path, quiet)
    assert not (tmp_path / "set.bin").exists()
    server.drop_after = None
    assert fetch(remote, tmp_path, quiet).read_bytes() == DATA
    assert server.ranges == [None, "bytes=600000-"]
    assert only_the_file(tmp_path)


def test_the_next_address_goes_on_where_the_first_broke_off(server: Server, tmp_path: Path) -> None:
    server.remote("set.bin", DATA)
    with serving() as broken:
        remote = broken.remote("set.bin", DATA)
        broken.drop_after = 1000
        both = Remote(remote.name, (broken.url("set.bin"), server.url("set.bin")), remote.sha256)
        assert fetch(both, tmp_path, quiet).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-"]


def test_a_server_that_ignores_ranges_sends_all_and_nothing_is_doubled(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA)
    (tmp_path / "set.bin.part").write_bytes(DATA[:5000])
    server.knows_ranges = False
    assert fetch(remote, tmp_path, quiet).read_bytes() == DATA
    assert server.ranges == ["bytes=5000-"]


@pytest.mark.parametrize("part", [DATA + b"more", b"x" * len(DATA), b"stale" * 100], ids=["longer", "as long", "stale"])
def test_a_part_of_another_file_is_replaced(server: Server, tmp_path: Path, part: bytes) -> None:
    (tmp_path / "set.bin.part").write_bytes(part)
    assert fetch(server.remote("set.bin", DATA), tmp_path, quiet).read_bytes() == DATA
    assert only_the_file(tmp_path)


def test_a_part_that_is_already_whole_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(DATA)
    nowhere = Remote("set.bin", ("http://127.0.0.1:9/set.bin",), hashlib.sha256(DATA).hexdigest())
    assert fetch(nowhere, tmp_path, quiet).read_bytes() == DATA


def test_a_server_that_sends_another_range_is_not_believed(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA)
    (tmp_path / "set.bin.part").write_bytes(DATA[:5000])
    server.wrong_range = True
    with pytest.raises(DownloadError, match="when asked for bytes from 5000"):
        fetch(remote, tmp_path, quiet)
    assert (tmp_path / "set.bin.part").read_bytes() == DATA[:5000]


def test_a_wrong_checksum_removes_what_arrived_and_names_both(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA, sha256="0" * 64)
    with pytest.raises(DownloadError) as caught:
        fetch(remote, tmp_path, quiet)
    for part in ("set.bin", "0" * 64, hashlib.sha256(DATA).hexdigest(), server.url("set.bin"), "removed"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_a_file_that_was_put_there_is_verified_and_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(b"cut short")
    with pytest.raises(DownloadError, match="Delete it"):
        fetch(server.remote("set.bin", DATA), tmp_path, quiet)
    assert (tmp_path / "set.bin").read_bytes() == b"cut short"
    assert server.ranges == []


def test_a_missing_file_and_no_network_say_what_to_put_where(server: Server, tmp_path: Path) -> None:
    gone = Remote("set.bin", (server.url("set.bin"), "http://127.0.0.1:9/set.bin"), "0" * 64)
    with pytest.raises(DownloadError) as caught:
        fetch(gone, tmp_path, quiet)
    for part in ("404", "refused", f"fetch {server.url('set.bin')} by hand", f"put it at {tmp_path / 'set.bin'}"):
        assert part in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_to_be_full(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA)
    (tmp_path / "set.bin.part").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match=r"the disk is full: set\.bin does not fit") as caught:
        fetch(remote, tmp_path, quiet)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "set.bin").exists()


def test_a_disk_that_fills_up_half_way_keeps_what_arrived(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    remote = server.remote("set.bin", DATA)
    server.drop_after = 300_000
    monkeypatch.setattr("lmdp.data.download.os.fsync", full)
    with pytest.raises(DownloadError, match="resumed"):
        fetch(remote, tmp_path, quiet)
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")
    server.drop_after = None
    assert fetch(remote, tmp_path, quiet).read_bytes() == DATA
    assert server.ranges == [None, "bytes=300000-"]


@pytest.mark.parametrize("answer", sorted(NO_LOCKS), ids=errno.errorcode.get)
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_still_gets_the_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_: object) -> None:
        raise OSError(answer, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert fetch(server.remote("set.bin", DATA), tmp_path, quiet).read_bytes() == DATA
    assert only_the_file(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_asked_for(server: Server, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        fetch(server.remote("set.bin", DATA), tmp_path, quiet)
    assert server.ranges == []


def _fetch_into(folder: str, url: str, sha256: str, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    fetch(Remote("set.bin", (url,), sha256), Path(folder), quiet)


def test_threads_and_processes_that_download_at_once_do_not_disturb_each_other(server: Server, tmp_path: Path) -> None:
    remote = server.remote("set.bin", DATA)
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    process = spawn.Process(target=_fetch_into, args=(str(tmp_path), remote.urls[0], remote.sha256, barrier))
    process.start()
    barrier.wait()
    threads = [threading.Thread(target=fetch, args=(remote, tmp_path, quiet)) for _ in range(4)]
    for worker in threads:
        worker.start()
    for worker in [*threads, process]:
        worker.join()
    assert process.exitcode == 0
    assert (tmp_path / "set.bin").read_bytes() == DATA
    assert server.ranges == [None]
    assert only_the_file(tmp_path)
