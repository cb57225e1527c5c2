"""Layer-wise membership risk on public data: shadow model → representations → adversaries → risk profile.

shadow     shadow models: the private model's architecture, trained without noise on half of the public data
estimate   `estimate_risk`: train them, attack every layer, calibrate with the others where there are several
profile    `RiskProfile`: per-layer error rates of the best adversary, saved as risk.json
"""

from lmdp.risk.estimate import estimate_risk
from lmdp.risk.profile import LayerRisk, RiskProfile

__all__ = ["LayerRisk", "RiskProfile", "estimate_risk"]
