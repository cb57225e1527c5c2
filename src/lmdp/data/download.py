"""Files from the network: resumed where they broke off, verified, and never half-written under their final name."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmdp.data.request import Say

if TYPE_CHECKING:
    from http.client import HTTPResponse

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
NO_LOCKS = frozenset([errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])
"""What a file system answers that has no locks."""


class DownloadError(OSError):
    """A file could not be had; says from where to fetch it by hand and where to put it."""


@dataclass(frozen=True)
class Remote:
    """A published file: its name, the addresses that have it, and what it must hash to."""

    name: str
    urls: tuple[str, ...]
    sha256: str


def fetch(remote: Remote, folder: Path, say: Say) -> Path:
    """The verified file, from `folder` or downloaded into it. Safe to call from several processes at once."""
    path = folder / remote.name
    if path.exists():
        return _checked(path, remote)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{remote.name}.lock"):
        if path.exists():  # another process was faster
            return _checked(path, remote)
        _download(remote, folder / f"{remote.name}.part", path, say)
    return path


def _checked(path: Path, remote: Remote) -> Path:
    digest = _sha256(path)
    if digest != remote.sha256:
        raise DownloadError(
            f"{path} has SHA-256 {digest}; the published file ({remote.urls[0]}) has {remote.sha256}. "
            "Delete it, and it is downloaded again."
        )
    return path


def _download(remote: Remote, part: Path, path: Path, say: Say) -> None:
    from http.client import HTTPException

    failures = []
    for url in remote.urls:
        try:
            digest = _attempt(url, part, remote, say)
        except (OSError, HTTPException) as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise DownloadError(
                    errno.ENOSPC,
                    f"the disk is full: {remote.name} does not fit into {part.parent}. Free some space or set "
                    f"LMDP_DATA to another folder; what has arrived is kept in {part.name} and the rest is resumed",
                ) from error
            reason = str(error).removeprefix("<urlopen error ").removesuffix(">") or type(error).__name__
            failures.append(f"{url}: {reason}")
        else:
            if digest == remote.sha256:
                os.replace(part, path)
                return
            part.unlink()
            failures.append(f"{url}: has SHA-256 {digest}, expected {remote.sha256}; what arrived was removed")
        say(failures[-1])
    raise DownloadError(
        f"{remote.name} could not be downloaded ({'; '.join(failures)}). Try again (it resumes), or fetch "
        f"{remote.urls[0]} by hand and put it at {path}"
    )


def _attempt(url: str, part: Path, remote: Remote, say: Say) -> str:
    """The hash of what is now in `part`. A resumed file that does not verify is fetched once more, whole."""
    resumed = part.exists() and part.stat().st_size > 0
    if resumed and _sha256(part) == remote.sha256:
        return remote.sha256
    _transfer(url, part, remote.name, say)
    digest = _sha256(part)
    if resumed and digest != remote.sha256:
        part.unlink()
        _transfer(url, part, remote.name, say)
        digest = _sha256(part)
    return digest


def _transfer(url: str, part: Path, name: str, say: Say) -> None:
    """Append what is missing to `part`; all of it, if the server cannot send a part or has no such part."""
    have = part.stat().st_size if part.exists() else 0
    with _open(url, have) as response:
        start = have if response.status == 206 else 0
        if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise ConnectionError(f"sent {response.headers.get('Content-Range')!r} when asked for bytes from {start}")
        length = response.headers.get("Content-Length") or ""
        total = start + int(length) if length.isdigit() else None
        with open(part, "ab" if start else "wb") as file:
            arrived = start
            while chunk := response.read(CHUNK):
                file.write(chunk)
                arrived += len(chunk)
                _tell(name, arrived - len(chunk), arrived, total, say)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and arrived != total:
        raise ConnectionError(f"the connection broke off after {arrived} of {total} bytes")


def _open(url: str, have: int) -> HTTPResponse:
    """The server's answer, from byte `have` on where it can; from the beginning if it has no such byte."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    headers = {"User-Agent": "lmdp", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:
            return _open(url, 0)
        raise
    return response


def _tell(name: str, before: int, now: int, total: int | None, say: Say) -> None:
    """A line for every tenth of the file."""
    if total and 10 * before // total < 10 * now // total:
        say(f"{name}: {100 * now // total} % of {total / 1e6:.1f} MB")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One download of a file at a time. Where a file system has no locks, the checksum still guards the result."""
    from filelock import FileLock

    lock = FileLock(path)
    try:
        lock.acquire()
    except NotImplementedError:  # what older versions of filelock say of such a file system
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()
