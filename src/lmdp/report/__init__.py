"""Draws results; computes nothing.

story        what a report tells: the models that were trained, what they cost, what they give away
drawn        what is asked of audits and epsilon bounds, so that they can be drawn
values       what the other files read out of a story, with doubt kept
headline     the first sentence, with at most three numbers
verdict      one sentence, and nothing that the intervals do not support
svg          elements, words that fit, marks that differ in shape as well as colour
scales       from values to coordinates
axes         the plot area and its axes
forest       estimates with intervals, one row per layer
lines        values over steps, as lines or as a heat map
scatter      one value against another, with the doubt of both
roc          true against false positives on logarithmic axes
epsilon      claimed epsilon beside its lower bounds
charts       from a story to its charts; `figures` gives them as files
html         the page around the contents
tables       the numbers, each with its uncertainty
glossary     the words of a report, folded at its end
guarantee    what each model promises, and what no promise covers
files        which files of a run may leave the house
release      may this be released: promise, standing, what was tried, files, a place to sign
card         the same as privacy-card.md
page         `render`: a whole story as one page
audit_page   an audit alone as one page
page.css, page.js   the only style and script of a page
"""

from lmdp.report.card import card
from lmdp.report.charts import figures
from lmdp.report.headline import headline
from lmdp.report.page import render
from lmdp.report.story import Story, Together, Trained
from lmdp.report.verdict import verdict

__all__ = ["Story", "Together", "Trained", "card", "figures", "headline", "render", "verdict"]
