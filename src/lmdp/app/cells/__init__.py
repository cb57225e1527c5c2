"""Experiments as grids of cells: each is measured once, in a process of its own, and kept as one small JSON file.

cell         what is measured, and the name of its file
sources      which files stand for the data sets that cells name
store        the files of a folder, written whole or not at all
measure      one cell: train, attack, time
run          all that are missing, side by side, with progress over all
statistics   differences that are paired over seeds, with intervals, and what may be said of them
choice       one setting out of several, on the frontier of leakage against accuracy
"""
