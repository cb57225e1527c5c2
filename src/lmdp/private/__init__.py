"""The trust boundary: the only room that sees private gradients.

Read in this order: tape (what each layer saw) → mixing and divisors (that examples do not meet) → rules (norms and sums
of per-example gradients; compiled holds their inner loops) → clipping (norms to scales, and the sensitivity) → weights
(where w comes from) → step (sums, noise, release) → door (the user's optimizer) → engine (the API).
"""

from lmdp.guards.modules import make_compatible
from lmdp.private.engine import PrivacyEngine

__all__ = ["PrivacyEngine", "make_compatible"]
