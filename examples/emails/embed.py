"""Write the embeddings that a finished run serves, of all mails: those it was trained on and those it was not.

    python examples/emails/embed.py runs/lora embeddings.npz
    lmdp audit embeddings.npz                       # what somebody finds who sees embeddings alone
    python examples/emails/search.py runs/lora embeddings.npz "cheap loans"

`member` and `nonmember` are rows in the order of the file of mails; `member_inputs` and `nonmember_inputs` are words:
an audit can see whether the two groups differed to begin with. Who was a member is as private as the mails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mails import embeddings, load, mails


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    settings, model = load(given.run)
    data, arrays = mails(settings), {}
    for name, group in {"member": data.train, "nonmember": data.test}.items():
        ids, labels = group.tensors
        arrays |= {
            name: embeddings(model, ids).numpy(),
            f"{name}_labels": labels.numpy(),
            f"{name}_inputs": ids.numpy(),
        }
    np.savez_compressed(given.out, **arrays)
    print(f"{len(data.train) + len(data.test):,} embeddings of {arrays['member'].shape[1]} numbers: {given.out}")


if __name__ == "__main__":
    main()
