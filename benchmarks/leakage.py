"""What trained models give away about ordinary examples and about canaries, by method and epsilon.

    python benchmarks/leakage.py --out leakage [--cases fashion,cifar10] [--fashion SPEC] [--cifar10 SPEC] [--jobs 2]

Each cell is a run folder of `lmdp train --canaries …` and `lmdp audit`; a finished one is kept, so that a stopped table
goes on where it was. Risk for `lm` is estimated once for each case, on other data. Prints, for each case, epsilon and
method, the mean over seeds (and the spread) of the test accuracy, and of AUC and TPR at 1 % FPR at the leakiest layer,
for ordinary examples and for canaries; `leakage.json` has every layer of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEEDS = (1, 2, 3)
EPSILONS = (8, 50, 800)
METHODS = ("dpsgd", "lm")


@dataclass(frozen=True)
class Setting:
    """One network and its data; `more` are words of `lmdp train`."""

    model: str
    private: str
    shadow: str
    examples: int
    more: tuple[str, ...]

    def words(self, spec: str) -> list[str]:
        limited = f"{spec}{'&' if '?' in spec else '?'}limit={self.examples}"
        return ["--model", self.model, "--data", limited, "--classes", "10", "--sample-rate", "0.05", *self.more]


CASES = {
    "fashion": Setting(
        "s-cnn",
        "fashion-mnist",
        "mnist?limit=3000",
        5000,
        ("--epochs", "60", "--learning-rate", "1.2", "--sgd-learning-rate", "0.05", "--emphasis", "5"),
    ),
    "cifar10": Setting(
        "d-cnn",
        "cifar10",
        "svhn?limit=2500",
        3000,
        ("--epochs", "24", "--learning-rate", "1.0", "--sgd-learning-rate", "0.1", "--emphasis", "3"),
    ),
}


def run(*words: str, log: Path) -> None:
    """`lmdp …` in a process of its own, with one thread."""
    with log.open("a") as told:
        subprocess.run(
            [sys.executable, "-m", "lmdp", *words],
            check=True,
            stdout=told,
            stderr=told,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def cell(out: Path, case: str, spec: str, method: str, epsilon: float | None, seed: int, canaries: int) -> None:
    """Train and audit, or what is left of it."""
    folder = out / case / f"{method}-{epsilon or 'none'}-{seed}"
    if (folder / "audit.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    words = [*CASES[case].words(spec), "--seed", str(seed), "--method", method, "--canaries", str(canaries)]
    words += ["--holdout", "0.2", "--evaluate-every", "1000", "--keep-checkpoints", "1"]
    words += ["--epsilon", str(epsilon)] if epsilon else []
    words += ["--risk", str(out / case / "risk.json")] if method == "lm" else []
    if not (folder / "privacy.json").exists():
        again = ["--resume"] if (folder / "config.toml").exists() else []
        run("train", *words, *again, "--out", str(folder), log=log)
    run("audit", str(folder), log=log)


def estimate(out: Path, case: str, shadow: str) -> None:
    path = out / case / "risk.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        size = {"fashion": ("28", "1"), "cifar10": ("32", "3")}[case]
        shape = ["--size", size[0], "--channels", size[1]]
        words = ["--model", CASES[case].model, "--shadow", shadow, *shape, "--shadow-enough", "2"]
        run("risk", *words, "--out", str(path), log=out / case / "risk.log")


def read(folder: Path) -> dict[str, Any]:
    audit = json.loads((folder / "audit.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["test_accuracy"] for row in metrics if row.get("test_accuracy") is not None][-1]
    statement = json.loads((folder / "privacy.json").read_text())
    return {"accuracy": accuracy, "epsilon": statement["epsilon"], "audit": audit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakage"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    for name, case in CASES.items():
        parser.add_argument(f"--{name}", default=case.private, help=f"SPEC of the private data ({case.private})")
        parser.add_argument(f"--{name}-shadow", default=case.shadow, help=f"SPEC of the shadow data ({case.shadow})")
    told = parser.parse_args()
    cases = told.cases.split(",")
    with ThreadPoolExecutor(told.jobs) as pool:
        list(pool.map(lambda name: estimate(told.out, name, getattr(told, f"{name}_shadow")), cases))
        wanted = [("sgd", None), *((method, epsilon) for epsilon in EPSILONS for method in METHODS)]
        cells = [(name, method, epsilon, seed) for name in cases for seed in SEEDS for method, epsilon in wanted]
        for done in pool.map(lambda c: cell(told.out, c[0], getattr(told, c[0]), *c[1:], told.canaries), cells):
            assert done is None
    table(told.out, cells)


def table(out: Path, cells: list[tuple[str, str, float | None, int]]) -> None:
    results: dict[str, list[dict[str, Any]]] = {}
    for case, method, epsilon, seed in cells:
        kept = read(out / case / f"{method}-{epsilon or 'none'}-{seed}")
        results.setdefault(f"{case} {method} {epsilon or 'inf'}", []).append(kept)
    (out / "leakage.json").write_text(json.dumps(results, indent=1))
    for name, runs in results.items():
        shown = [f"{name:24s} accuracy {spread([each['accuracy'] for each in runs])}"]
        for kind, key in (("ordinary", "layers"), ("canaries", "canaries")):
            groups = [each["audit"][key] for each in runs]
            leaks = [group["layers"] if isinstance(group, dict) else group for group in groups]
            best = [max(layers, key=lambda layer: layer["auc"]) for layers in leaks]
            where = "/".join(sorted({layer["name"] for layer in best}))
            auc, tpr = spread([b["auc"] for b in best]), spread([b["tpr_at_1pct"] for b in best])
            shown.append(f"{kind} AUC {auc} TPR {tpr} ({where})")
        print("  ".join(shown))


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}±{statistics.stdev(values) if len(values) > 1 else 0:.3f}"


if __name__ == "__main__":
    main()
