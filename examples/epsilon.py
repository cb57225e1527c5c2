"""Lower bounds on epsilon, by method and weight source, beside what is claimed.

    python examples/epsilon.py [--runs 1000]

Gradients are set by hand on a small model (`lmdp.audit.canaries.Slate`), where canaries can be as bad as they get.
`dirac`: a gradient in a direction that no other example has. `tipping`: one that takes over weights which follow the
batch. A bound from one run is given for two families: under the assumption that the training is its own steps with some
noise multiplier ("mechanism"), and without one ("any").
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import lmdp
from lmdp.audit import EpsilonBound, canaries
from lmdp.methods import METHODS

DELTA, CONFIDENCE = 1e-5, 0.99
TRAININGS = [(m.name, source) for m in METHODS.values() if m.private for source in m.sources or ("fixed",)]


def one_run(method: str, weights: str) -> EpsilonBound:
    """A thousand orthogonal canaries in one training of a few steps."""
    train = canaries.slate_training(batch_size=900, noise_multiplier=1.0, epochs=2, method=method, weights=weights)
    common, many = canaries.crowd(20, 2, 1001), canaries.dirac(2, 1001, 1000)
    settings = {"delta": DELTA, "confidence": CONFIDENCE, "score": canaries.along, "canary": "dirac"}
    return lmdp.audit_epsilon(train, common, many, guesses=200, **settings)


def repeated(method: str, weights: str, canary: str, runs: int) -> EpsilonBound:
    """One canary, many trainings of two steps: little noise for dirac, much for tipping."""
    one, score, sigma = {
        "dirac": (canaries.dirac(2, 2, 1)[0], canaries.along, 1.0),
        "tipping": (canaries.tipping(2, 2), canaries.tipped, 3.0),
    }[canary]
    train = canaries.slate_training(batch_size=30, noise_multiplier=sigma, method=method, weights=weights)
    common = canaries.crowd(39, 2, 2)
    settings = {"delta": DELTA, "confidence": CONFIDENCE, "score": score, "canary": canary, "runs": runs}
    return lmdp.audit_epsilon(train, common, [one], **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="trainings for each bound by repeated runs")
    runs = parser.parse_args().runs
    print("| training | canary | method | family | claimed ε | lower bound | claim refuted |\n" + 7 * "|---" + "|")
    for method, weights in TRAININGS:
        once = one_run(method, weights)
        bounds = [once, replace(once, family="any", lower=once.details["lower_any"])]
        bounds += [repeated(method, weights, canary, runs) for canary in ("dirac", "tipping")]
        for b in bounds:
            refuted = "**yes**" if b.exceeded else "no"
            kind = f"{b.training} | {b.canary} | {b.method} | {b.family}"
            print(f"| {kind} | {b.claimed:.2f} | {b.lower:.2f} | {refuted} |", flush=True)


if __name__ == "__main__":
    main()
