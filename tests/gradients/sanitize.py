"""The tests of loops, rules and noise under the compiler's sanitizers: `make sanitize`.

    address   reads and writes outside of memory that was asked for, and behaviour that C does not define
    threads   memory that two threads use without an order, one of them to write

The loops are compiled anew, under build/sanitize, and LMDP_KERNELS names them; what is installed is not touched. Tests
of PyTorch's operations in place of the loops are left out; so is a part for which the machine lacks something, and it
says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
BUILD = TOP / "build" / "sanitize"
LOOPS = "src/lmdp/gradients/compiled/kernels.c"
TESTS = (
    *("tests/gradients/test_compiled.py", "tests/gradients/test_grid.py", "tests/gradients/test_rules.py"),
    "tests/private/test_noise.py",
)
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0")
CC = "gcc"  # whose libraries, and whose calls of OpenMP, the parts know


@dataclass(frozen=True)
class Part:
    name: str
    libraries: tuple[str, ...]
    flags: tuple[str, ...]
    options: dict[str, str]
    pytest: tuple[str, ...]
    sources: tuple[str, ...] = ()


PARTS = (
    Part(
        "address",
        ("libasan.so", "libubsan.so"),
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fopenmp"),
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        ("-k", "not PyTorch"),
    ),
    Part(
        "threads",
        ("libtsan.so",),
        # Its own memcpy, memset and parallel regions, whatever else the process has loaded under these names.
        ("-fsanitize=thread", "-fopenmp", "-fno-builtin", "-fno-tree-loop-distribute-patterns", "-Wl,-Bsymbolic"),
        # Python and torch are not compiled for it: what they lock is not seen, and what they copy is not looked at.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
        ("-k", "not PyTorch and not fork", "-p", "tests.gradients.sanitize_threads"),  # it does not follow a fork
        ("tests/gradients/sanitize_threads.c",),
    ),
)


def lacking(part: Part) -> str | None:
    """Why a part cannot run here: a program that does nothing is compiled and run."""
    BUILD.mkdir(parents=True, exist_ok=True)
    source, program = BUILD / "nothing.c", BUILD / f"nothing-{part.name}"
    source.write_text("int main(void) { return 0; }\n")
    try:
        for command in ([CC, *part.flags, str(source), "-o", str(program)], [str(program)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"`{' '.join(command)}` ends with {done.returncode}: {done.stderr.strip()[-300:]}"
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    return next((f"{CC} has no {name}" for name in part.libraries if not Path(_library(name)).is_absolute()), None)


def _library(name: str) -> str:
    asked = subprocess.run([CC, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def compiled(part: Part) -> Path:
    """The loops, with the flags of an installation and those of the part; less optimized, to be compiled in seconds."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    flags = [*extension["extra-compile-args"], "-O1", "-g", "-fno-omit-frame-pointer", "-fPIC", "-shared"]
    library = BUILD / f"{part.name}.so"
    command = [CC, *flags, *part.flags, LOOPS, *part.sources, "-lm", "-o", str(library)]
    subprocess.run(command, cwd=TOP, check=True)
    return library


def run(part: Part) -> int:
    reason = lacking(part)
    if reason is not None:
        print(f"sanitize, {part.name}: left out, as {reason}", flush=True)  # noqa: T201
        return 0
    print(f"sanitize, {part.name}: {' '.join(TESTS)}", flush=True)  # noqa: T201
    loaded = {"LD_PRELOAD": ":".join(map(_library, part.libraries))}
    loops = {"LMDP_COMPILED": "1", "LMDP_KERNELS": str(compiled(part))}
    # Reports go to the terminal: a process that is stopped by one does not hand over what pytest has captured.
    command = [*PYTEST, "--capture=sys", *part.pytest, *TESTS]
    return subprocess.run(command, cwd=TOP, env=os.environ | part.options | loaded | loops, check=False).returncode


if __name__ == "__main__":
    failed = [part.name for part in PARTS if run(part)]
    sys.exit(f"sanitize: see above what {' and '.join(failed)} reported" if failed else 0)
