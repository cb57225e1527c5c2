"""A whole seeded run by the command line, and what its folder holds: `python -m tests.record.folders OUT` makes it.

OUT/risk.json   OUT/lm/ (trained, audited)   OUT/half/ (stopped in mid-training, to be resumed)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

MODEL = ["--model", "tests.record.models:factory", "--seed", "3"]
PRIVATE = [*MODEL, "--data", "digits?half=1&limit=400", "--sample-rate", "0.1", "--learning-rate", "0.5"]
PRIVATE += ["--keep-checkpoints", "1", "--epsilon", "6", "--accountant", "rdp"]
HALF = ["train", *PRIVATE, "--epochs", "4", "--method", "dpsgd", "--out", "half"]
TIMES = ("seconds", "train_seconds", "attack_seconds", "run", "dataset", "sha256", "trained", "versions")
"""And what follows from random keys: SHA-256 of files whose header names the run (`bound` compares them)."""


def make(out: Path) -> None:
    """The commands, one after the other."""
    run(out, "risk", *MODEL, "--shadow", "digits?half=2&limit=400", "--shadow-epochs", "8", "--out", "risk.json")
    weighted = ["--method", "lm", "--risk", "risk.json", "--risk-as-measured", "--emphasis", "2"]  # it is noise
    run(out, "train", *PRIVATE, "--epochs", "3", *weighted, "--out", "lm")
    run(out, "audit", "lm")
    run(out, *HALF, stop_after=15)


def run(where: Path, *words: str, stop_after: int | None = None) -> None:
    """In a process of its own; with `stop_after`, one that stops in mid-training as if Ctrl-C had been pressed."""
    code = "import sys, runpy\n"
    if stop_after is not None:
        code += (
            "import os, signal, lmdp.accounting as a\n"
            "plain = a.Ledger.record_step\n"
            "def count(self):\n"
            "    plain(self)\n"
            f"    if self.steps == {stop_after}: os.kill(os.getpid(), signal.SIGINT)\n"
            "a.Ledger.record_step = count\n"
        )
    code += "sys.argv = ['lmdp', *sys.argv[1:]]\nrunpy.run_module('lmdp', run_name='__main__')"
    top = Path(__file__).parents[2]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{top}{os.pathsep}{top / 'src'}"}
    command = [sys.executable, "-c", code, *words, "--quiet"]
    done = subprocess.run(command, cwd=where, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if stop_after is None else 130), (words, done.stderr)


READ = (".json", ".jsonl", ".safetensors", ".toml")


def held(folder: Path) -> dict[str, Any]:
    """File → what it holds, without times and keys: text as it is, JSON as values, tensors as digests."""
    contents = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in READ):
        if path.parent.name == "private":
            continue
        name, raw = str(path.relative_to(folder)), path.read_bytes()
        if path.suffix == ".json":
            contents[name] = without_times(json.loads(raw))
        elif path.suffix == ".jsonl":
            contents[name] = [without_times(json.loads(line)) for line in raw.splitlines()]
        elif path.suffix == ".safetensors":
            contents[name] = _tensors(raw)
        else:
            contents[name] = raw.decode().replace(f"{folder}{os.sep}", "")  # paths are kept whole
    return contents


def bound(folder: Path) -> dict[str, tuple[str, str]]:
    """Finished run → SHA-256 of its model: by the file, and by its statement ("" where that has none)."""
    told = {}
    for path in sorted(folder.rglob("model.safetensors")):
        stated = json.loads((path.parent / "privacy.json").read_text()).get("sha256", {}).get(path.name, "")
        told[path.parent.name] = hashlib.sha256(path.read_bytes()).hexdigest(), stated
    return told


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def _tensors(raw: bytes) -> dict[str, Any]:
    from safetensors.torch import load

    length = int.from_bytes(raw[:8], "little")
    rest = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    tensors = {
        name: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in load(raw).items()
    }
    return {"tensors": tensors, "rest": without_times(json.loads(rest["state"])) if "state" in rest else None}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
