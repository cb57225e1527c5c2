"""Train models on private data that are then served as embeddings, without leaking who was in the data.

public shadow data → shadow model → representations → adversaries → **risk profile** → private training
(norms → scales → weighted sums → noise → step, accountant beside it) → model → **audit** → report.
"""

from lmdp.accounting import PrivacyStatement
from lmdp.layers import Layer, LayerMap
from lmdp.private import PrivacyEngine, make_compatible

__version__ = "0.1.0"

__all__ = ["Layer", "LayerMap", "PrivacyEngine", "PrivacyStatement", "make_compatible"]
