"""Layer-wise membership risk on public data: shadow model → representations → adversaries → risk profile.

shadow     shadow models: the private model's architecture, trained without noise on half of the public data
estimate   `estimate_risk`: train them, attack every layer, calibrate with the others where there are several
apart      which layers the measurement can tell apart; the others count alike
verdict    what a profile says in words, and what to do where it says nothing
profile    `RiskProfile`: per-layer error rates of the best adversary, saved as risk.json
"""

from lmdp.risk.estimate import estimate_risk
from lmdp.risk.profile import LayerRisk, RiskProfile
from lmdp.risk.shadow import Schedule

__all__ = ["LayerRisk", "RiskProfile", "Schedule", "estimate_risk"]
