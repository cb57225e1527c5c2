"""Draws results; computes nothing.

story → judgement (the verdict) · charts (forest, lines, roc on scales and svg) → page
"""

from lmdp.report.story import Story, Trained, figures, render, verdict

__all__ = ["Story", "Trained", "figures", "render", "verdict"]
