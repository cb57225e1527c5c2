"""Attack a finished run block by block: can one tell its mails from others, and its canaries from those left out?

    python examples/emails/audit.py runs/lora

Writes audit.json and audit.html into the run. What it finds is computed on private mails, and covered by no epsilon.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from mails import load, mails, planted
from torch.utils.data import Subset, TensorDataset

import lmdp


def first(data: TensorDataset, number: int) -> Subset[tuple[torch.Tensor, ...]]:
    return Subset(data, range(min(number, len(data))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=500, help="of members, and of mails that were kept out")
    parser.add_argument("--quick", action="store_true", help="200 of each")
    given = parser.parse_args()
    settings, model = load(given.run)
    data, number = mails(settings), 200 if given.quick else given.examples
    canaries = planted(settings, given.run, data.train).canaries if settings.canaries else None
    report = lmdp.audit(
        model,
        first(data.train, number),
        first(data.test, number),
        layers="block",
        pooling="mean",
        canaries=canaries,
        progress=print,
    )
    report.to_json(given.run / "audit.json")
    report.to_html(given.run / "audit.html")
    print(report)


if __name__ == "__main__":
    main()
