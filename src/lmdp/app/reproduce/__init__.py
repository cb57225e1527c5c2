"""The paper's tables and figures, measured again: a grid of cells, verdicts on its claims, and one page.

paper        every number of the paper that is compared with ours
scales       how large each experiment is, and what the paper left open
grid         which cells each table and figure needs
rates        the error rates that a cell's layers are weighed by
results      what is read out of measured cells
verdicts     each claim: supported, not supported, cannot tell
figures      the paper's figures, drawn from cells
tables       the paper's tables
page         one page of it all
run          `reproduce`: measure what is missing, judge, draw
"""
