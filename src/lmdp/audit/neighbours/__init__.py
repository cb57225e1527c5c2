"""One whole training with and without one example: does what leaves it move by no more than is stated?

check      `check_neighbours` for one example, and `check`, which picks the examples itself
outliers   examples that may give a training away, built from those of a dataset
training   a training that can be run again with one example more or less, everything else being equal
chance     what is random in a training and must not differ between its runs: dropout, augmentation
run        one run of it, and the record of all that it gave out
compare    from these records to findings
result     the findings, and the reports that they make
"""
