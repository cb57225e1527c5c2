"""Layer-wise membership risk on public data: shadow model → representations → adversaries → risk profile."""

from lmdp.risk.estimate import estimate_risk
from lmdp.risk.profile import LayerRisk, RiskProfile

__all__ = ["LayerRisk", "RiskProfile", "estimate_risk"]
