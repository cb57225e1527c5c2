"""What references add: python benchmarks/references.py FILE.npz --references 4 --models FOLDER

D-CNN on 10,000 examples of x_train, y_train ([N, 32, 32, 3], bytes), half of them members, trained without noise until
it fits them (Adam, as `lmdp.estimate_risk` trains shadow models); the references likewise, each on another random half.
The last three layers are audited alone and with references, and in a white box. Trained models are kept in --models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import lmdp
from lmdp.audit import Reference
from lmdp.models import build, fresh
from lmdp.risk.shadow import Schedule, halves, train_shadow

SIZE, MOST = 10_000, 4


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("data", type=Path)
    options.add_argument("--references", type=int, default=MOST, choices=range(MOST + 1))
    options.add_argument("--only", type=int, nargs="*", help="numbers of references to audit with (default: 0 and all)")
    options.add_argument("--models", type=Path, default=Path())
    given = options.parse_args()
    arrays = np.load(given.data)
    x = torch.from_numpy(arrays["x_train"][:SIZE]).permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5)
    y = torch.from_numpy(arrays["y_train"][:SIZE]).long()
    member = halves(SIZE, MOST + 1, 0)
    models = []
    for k in range(given.references + 1):
        model = fresh(lambda: build("d-cnn", (3, 32, 32), 10), k)
        path = given.models / f"cifar{k}.pt"
        if path.exists():
            model.load_state_dict(torch.load(path))
        else:
            train_shadow(model, x, y, member[k], Schedule(), k, print)
            torch.save(model.state_dict(), path)
        models.append(model)
    inside = torch.from_numpy(member[0])
    references = [
        Reference(model, mask[member[0]], mask[~member[0]]) for model, mask in zip(models[1:], member[1:], strict=False)
    ]
    for number in given.only or (0, len(references)):
        sides = ((x[part], y[part]) for part in (inside, ~inside))
        layers = ["convs.5", "convs.6", "head"]
        options = {"layers": layers, "controls": False, "white_box": True}
        report = lmdp.audit(models[0], *sides, references=references[:number], **options)
        print(f"{number} references, {report.seconds:.0f} s\n{report}\n", flush=True)


if __name__ == "__main__":
    main()
