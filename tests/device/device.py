"""Builds and loads the device `pretend`, and counts what crosses between it and the host.

    with counting() as crossed:
        step()
    assert crossed.to_host <= 2

What is counted is what CUDA would do: see `Crossings`. Work on the device is free, whatever it needs of the host here.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import torch

NAME = "pretend"
LIBRARY = "pretend_device"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ["-O1", "-g0"]
KINDS = ("to_host", "to_device", "between", "synchronisation")


@functools.cache
def missing() -> str | None:
    """What this machine lacks to build the device and test with it, or None."""
    if not hasattr(os, "fork"):
        return "no processes can be forked, in which tests on the pretend device run"
    if _library().exists():
        return None
    from torch.utils import cpp_extension

    if not shutil.which(cpp_extension.get_cxx_compiler()):
        return f"no C++ compiler ({cpp_extension.get_cxx_compiler()}) to build the pretend device with"
    with _path():
        return None if cpp_extension.is_ninja_available() else "no ninja to build the pretend device with"


@functools.cache
def extension() -> Any:
    """The compiled part: built once per source and version of PyTorch, whoever comes first; others wait."""
    library = _library()
    with filelock.FileLock(library.with_suffix(".lock")):
        if not library.exists():
            return _build(library)
    spec = importlib.util.spec_from_file_location(LIBRARY, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load() -> torch.device:
    """Teaches PyTorch two devices, and gives the first. It cannot be undone: tests ask for the fixture instead.

    Gradients of a device are computed in a thread of its own, as for CUDA; a fork of this process computes no more.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    extension()
    from tests.device import module

    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.set_num_threads(torch.get_num_threads())  # renews the pool that a fork has lost: two threads at once abort
    torch.ones(1, requires_grad=True).backward()  # starts the threads, if it is the first
    extension().start_threads()
    atexit.register(time.sleep, 0.05)  # a device's thread that still wants the interpreter would die at its end
    return torch.device(NAME, 0)


@dataclass(frozen=True)
class Crossing:
    """One crossing: its kind (of `KINDS`), the operation, bytes moved, and where in Python it happened."""

    kind: str
    by: str
    bytes: int
    stack: traceback.StackSummary

    def __str__(self) -> str:
        return f"{self.kind} by {self.by}, {self.bytes} bytes\n{''.join(self.stack.format())}"


@dataclass
class Crossings:
    """What has crossed since counting began, or until it ended.

    to_host           copies of a tensor from a device to the host, and values read (`item`, `bool`, `equal`)
    to_device         copies of a tensor from the host to a device, and host tensors used as indices there
    between           copies from one device to the other
    synchronisations  times that the host waited besides those copies: values read (each is also a copy `to_host`),
                      results whose shape depends on values (`nonzero`, `unique`, `masked_select`, a mask as index),
                      `synchronize` of a device, stream or event
    bytes_…           elements of the destination times their size

    Copies of nothing are not counted; `non_blocking` changes nothing. All threads are counted together. A number put
    through a mask (`x[mask] = 0.0`) counts as a synchronisation, though CUDA fills without: `masked_fill` does not.
    """

    _before: list[tuple[int, int]]
    _after: list[tuple[int, int]] | None = None
    crossings: list[Crossing] = field(default_factory=list)
    """In order, if stacks were asked for."""

    to_host = property(lambda self: self._since(0, 0))
    to_device = property(lambda self: self._since(1, 0))
    between = property(lambda self: self._since(2, 0))
    synchronisations = property(lambda self: self._since(3, 0))
    bytes_to_host = property(lambda self: self._since(0, 1))
    bytes_to_device = property(lambda self: self._since(1, 1))
    bytes_between = property(lambda self: self._since(2, 1))

    def _since(self, kind: int, which: int) -> int:
        now = self._after or extension().counts()
        return now[kind][which] - self._before[kind][which]

    def __str__(self) -> str:
        return (
            f"to host {self.to_host} ({self.bytes_to_host} bytes), to device {self.to_device} "
            f"({self.bytes_to_device} bytes), between devices {self.between}, synchronisations {self.synchronisations}"
        )


@contextmanager
def counting(stacks: bool = False) -> Iterator[Crossings]:
    """Counts while it is open. With `stacks`, also who did it: `print(*crossed.crossings, sep="\\n")`."""
    if not load.cache_info().currsize:
        raise RuntimeError("there is no device to count for: ask for the fixture `pretend`, or call load() first")
    crossed = Crossings(extension().counts())

    def listen(kind: int, by: str, size: int) -> None:
        stack = traceback.extract_stack()[:-1]
        crossed.crossings.append(Crossing(KINDS[kind], by, size, traceback.StackSummary.from_list(stack)))

    if stacks:
        extension().listen(listen)
    try:
        yield crossed
    finally:
        crossed._after = extension().counts()
        if stacks:
            extension().listen(None)


def _library() -> Path:
    versions = [torch.__version__, sys.version, *FLAGS]
    key = hashlib.sha256("\n".join([SOURCE.read_text(), *versions]).encode()).hexdigest()
    return _cache() / f"{key[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _cache() -> Path:
    folder = Path(platformdirs.user_cache_dir("lmdp")) / "tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"lmdp-tests-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _build(library: Path) -> Any:
    """In a folder of its own, so that a build that was stopped leaves nothing behind that another would trip over."""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _path():
        module = cpp_extension.load(LIBRARY, [str(SOURCE)], extra_cflags=FLAGS, build_directory=folder)
        os.replace(module.__file__, library)
    return module


@contextmanager
def _path() -> Iterator[None]:
    """Programs that were installed beside Python, as ninja may be, are on the path."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
