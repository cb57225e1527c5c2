"""Several processes that train one model together (`torchrun`): what they say to each other. METHOD: one mechanism.

group        the processes of one training: what they exchange, how they add up, and what becomes of all if one fails
agreement    what must be the same on all of them before they begin
comparison   whether all have the same examples, or none in common
population   the data of all of them together: how many examples, at which rate, and whose share a drawn example is
held         what a process holds of the parameters: all, or a part of each
shards       models under `fully_shard`: nobody holds all, and sums and noise are made for the parts
sums         what has been added up of a batch, and the same over all processes: why one example moves it no further
verdicts     what all of them together know of the assumptions
"""

from lmdp.processes.agreement import agree, on_all
from lmdp.processes.group import Group, Parted
from lmdp.processes.held import Held, Whole, held_by
from lmdp.processes.population import Population, Uniforms, sample_rate_of, steps_per_pass
from lmdp.processes.sums import Sums
from lmdp.processes.verdicts import all_hold, everywhere, open_in_any, said_by_all

__all__ = [
    "Group",
    "Held",
    "Parted",
    "Population",
    "Sums",
    "Uniforms",
    "Whole",
    "agree",
    "all_hold",
    "everywhere",
    "held_by",
    "on_all",
    "open_in_any",
    "said_by_all",
    "sample_rate_of",
    "steps_per_pass",
]
