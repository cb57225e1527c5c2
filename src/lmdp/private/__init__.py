"""The mechanism: what a reviewer reads to believe an epsilon. The only room that sees private gradients.

The first six files carry the proof; each opens with its guarantee and with what it assumes. Read in this order:

    sampling     Poisson draws: who is in a batch
    clipping     norms [B, L] → scales [B, L], and how far one example can move the sum (formulas: `lmdp.methods`)
    weights      where the layer weights w come from: private, public, fixed, batch
    keystream    secret random bits
    noise        normal numbers and uniform ones from them
    step         sums + noise, divided by a public number, released
    optimizer    the private `optimizer.step()`: charge, then release
    public       gradients of public examples, for the weights
    run          one training as it stands: its account, and what is known of every assumption
    engine       `PrivacyEngine`: all of it around the user's own loop

Beside them: `lmdp.accounting` (the mechanism as one value, and what its steps spend), `lmdp.gradients` (norms and sums
of per-example gradients), `lmdp.bias` (bias-optimal weights), `lmdp.diagnostics` (un-noised numbers, off by
default), `lmdp.guards` (what would break the assumptions), `lmdp.statement` (what a run promises).
"""

from lmdp.private.engine import PrivacyEngine
from lmdp.private.step import Observer
from lmdp.statement import NotCertifiedWarning, PrivacyStatement

__all__ = ["NotCertifiedWarning", "Observer", "PrivacyEngine", "PrivacyStatement"]
