"""One whole training with and without one example: does what leaves it move by no more than is stated?

training   a training that can be run again with one example more or less, everything else being equal
check      `check_neighbours`: four such runs, and the records of all that they gave out
compare    from these records to findings
result     the findings, and the report that they make
"""
