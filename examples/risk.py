"""Estimate, layer by layer, how much a network gives away about its training data, on public images from a file.

    python examples/risk.py --data images.npz --model scnn [--models 4] [--protocol paper] [--out risk.json]

The file holds x_train (N, H, W or N, H, W, C; bytes) and y_train. Half of the first --examples images trains a shadow
model, the other half stays out; adversaries then try to tell them apart from every layer's representations.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lmdp
from lmdp.models import DCNN, SCNN


def load(path: Path, examples: int) -> tuple[Tensor, Tensor]:
    """Images scaled to −1 … 1 by public constants."""
    with np.load(path, allow_pickle=False) as arrays:
        x = torch.tensor(arrays["x_train"][:examples]).float() / 127.5 - 1
        y = torch.tensor(arrays["y_train"][:examples].astype(np.int64))
    return (x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()), y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=["scnn", "dcnn"], default="scnn")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1, help="number of shadow models")
    parser.add_argument("--protocol", choices=["heldout", "paper"], default="heldout")
    parser.add_argument("--out", type=Path, help="write the risk profile here")
    options = parser.parse_args()
    x, y = load(options.data, options.examples)
    factory = {"scnn": lambda: SCNN(x.shape[1], 10, x.shape[2]), "dcnn": lambda: DCNN(x.shape[1], 10)}[options.model]
    profile = lmdp.estimate_risk(
        factory, (x, y), models=options.models, protocol=options.protocol, progress=lambda text: print(text, flush=True)
    )
    print(profile)
    if options.out:
        profile.save(options.out)


if __name__ == "__main__":
    main()
