"""Search mails by what they mean: those whose embeddings are nearest to that of a query.

python examples/emails/search.py runs/lora embeddings.npz "cheap loans" "kernel does not boot"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mails import embeddings, load, read, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("queries", nargs="+")
    parser.add_argument("--top", type=int, default=3)
    given = parser.parse_args()
    settings, model = load(given.run)
    texts, labels = read(settings.data)
    with np.load(given.embeddings) as arrays:
        known = np.concatenate([arrays["member"], arrays["nonmember"]])
    asked = embeddings(model, tokens(given.queries, settings.model, settings.length)).numpy()
    for query, near in zip(given.queries, asked @ known.T):  # rows have length 1: products are cosines
        print(query)
        for i in np.argsort(-near)[: given.top]:
            print(f"  {near[i]:.2f}  {'spam' if labels[i] else 'mail'}  {texts[i][:90]}")


if __name__ == "__main__":
    main()
