"""Several processes that train together, on this machine.

crew    processes that are started once and do one piece of work after the other, each in its place of a group
train   a small training, the same for any number of processes
"""
