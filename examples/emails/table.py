"""Make the runs behind the table of docs/emails.md, one after another, and print it.

    python examples/emails/table.py --model MODEL --data emails.jsonl.gz --out runs/emails --minutes 10

What is finished stays finished: call it again until nothing is left. After `--minutes` it begins nothing new. `--only`
makes a part of the runs, `--seeds 1` the first of each, and `--print` none: it shows what there is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent
START = ("--tune", "head", "--epsilon", "3")


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed. `begun` is the row, or none, whose head they begin with."""

    label: str
    given: tuple[str, ...]
    begun: str = ""


ROWS = {
    "start": Row("probe of epsilon 3, with which the private ones below begin", START),
    "probe-sgd": Row("probe, not private", ("--tune", "head", "--method", "sgd")),
    "probe": Row("probe, DP-SGD", ("--tune", "head")),
    "lora-sgd": Row("LoRA, not private", ("--method", "sgd")),
    "lora-dpsgd": Row("LoRA, DP-SGD", ("--method", "dpsgd"), "start"),
    "lora-lm": Row("LoRA, LM-DP-SGD", ("--method", "lm"), "start"),
    "tangent-sgd": Row("LoRA by the tangent, not private", ("--tune", "tangent", "--method", "sgd"), "probe-sgd"),
    "tangent-dpsgd": Row("LoRA by the tangent, DP-SGD", ("--tune", "tangent", "--method", "dpsgd"), "start"),
    "tangent-lm": Row("LoRA by the tangent, LM-DP-SGD", ("--tune", "tangent", "--method", "lm"), "start"),
    "full-sgd": Row("full, not private", ("--tune", "full", "--method", "sgd")),
    "full-dpsgd": Row("full, DP-SGD", ("--tune", "full", "--method", "dpsgd"), "start"),
    "full-lm": Row("full, LM-DP-SGD", ("--tune", "full", "--method", "lm"), "start"),
}
CANARIES = "-canaries"
AUDITED = {f"{name}{CANARIES}": row for name, row in ROWS.items() if name.startswith(("lora", "tangent"))}
"""Trained once more with canaries, which cost accuracy, and audited."""


def commands(given: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """(what it makes, command), in the order in which they depend on one another."""
    wanted = given.only or [*ROWS, *AUDITED]
    data, hurry = ["--model", given.model, "--data", given.data], ["--quick"] if given.quick else []
    for seed in range(given.seeds):
        for name in [each for each in ROWS if each in {*wanted, *(begins(every) for every in wanted)}]:
            yield made(given.out, name, seed, ROWS[name], [*data, *hurry])
    for name in [each for each in AUDITED if each in wanted]:
        yield made(given.out, name, 0, AUDITED[name], [*data, "--canaries", "400", *hurry])
        yield given.out / f"{name}-0" / "audit.json", ["audit.py", str(given.out / f"{name}-0"), *hurry]


def begins(name: str) -> str:
    return {**ROWS, **AUDITED}[name].begun


def made(out: Path, name: str, seed: int, row: Row, data: list[str]) -> tuple[Path, list[str]]:
    run = out / f"{name}-{seed}"
    begun = ["--init", str(out / f"{row.begun}-{seed}")] if row.begun else []
    return run / "result.json", ["train.py", *data, *row.given, *begun, "--seed", str(seed), "--out", str(run)]


def finish(given: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * given.minutes
    for result, (script, *options) in commands(given):
        if result.exists():
            continue
        if time.monotonic() > end:
            raise SystemExit(f"{given.minutes} minutes are over; {result.parent} is next. The same command goes on.")
        print("python", HERE.name + "/" + script, *options, flush=True)
        subprocess.run([sys.executable, str(HERE / script), *options], check=True)


def cell(out: Path, name: str) -> str:
    results = [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}-[0-9]/result.json"))]
    if not results:
        return "- | - | -"
    right = [100 * result["accuracy"] for result in results]
    spent = [json.loads(path.read_text())["epsilon"] for path in sorted(out.glob(f"{name}-[0-9]/privacy.json"))]
    spread = f" ({min(right):.1f}–{max(right):.1f}, {len(right)} seeds)" if len(right) > 1 else " (1 seed)"
    epsilon = f"{max(spent):.2f}" if spent else "none"
    return f"{epsilon} | {mean(right):.1f} %{spread} | {mean(result['minutes'] for result in results):.1f}"


def audited(out: Path, name: str) -> str:
    path = out / f"{name}{CANARIES}-0" / "audit.json"
    if not path.exists():
        return "- | -"
    report = json.loads(path.read_text())
    return " | ".join(worst(part["layers"]) for part in (report, report["canaries"]))


def worst(layers: list[dict[str, object]]) -> str:
    top = max(layers, key=lambda layer: float(str(layer["auc"])))
    return f"{top['auc']:.3f} ({top['name']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", choices=[*ROWS, *AUDITED], default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--print", action="store_true", help="make nothing; print what there is")
    given = parser.parse_args()
    if not given.print:
        finish(given)
    print("| | epsilon | test accuracy | minutes of one core | AUC, ordinary mails | AUC, canaries |")
    print("|---|---|---|---|---|---|")
    for name, row in ROWS.items():
        print(f"| {row.label} | {cell(given.out, name)} | {audited(given.out, name)} |")


if __name__ == "__main__":
    main()
