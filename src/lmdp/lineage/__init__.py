"""What earlier trainings on private data have spent, recognised by the weights that they released.

A released weight carries noise, so that no two trainings release the same one: who begins with it begins after what it
cost. What is trained on from such weights costs the composition of all of it, on whatever data: the composition holds
for the union of them, and data that cannot be told apart, or only seem different, need no special care.

spending     one training as the accountant is told of it, and what several cost together
index        released weights → what was spent for them, on this machine
training     `Lineage`: what one training has behind it, and what it adds
noted        weights that are noted with what they cost, though nobody asks for a statement; averages of them too

    lineage = Lineage(all parameters and buffers, dataset=dataset_digest(dataset))     before the first step
    lineage.epsilon(mechanism, steps, delta)                                           instead of the mechanism's own
    lineage.record(trained parameters, lineage.spent(...))                             whenever weights are released
"""

from lmdp.lineage.index import (
    append,
    blind,
    dataset_digest,
    digests,
    earlier,
    in_common,
    keep_dataset,
    record,
    steps_noted,
)
from lmdp.lineage.noted import Noted, note_all_but, noted_of
from lmdp.lineage.spending import Spending, epsilon_of, from_metadata, metadata, spendings, together
from lmdp.lineage.training import Lineage

__all__ = [
    "Lineage",
    "Noted",
    "Spending",
    "append",
    "blind",
    "dataset_digest",
    "digests",
    "earlier",
    "epsilon_of",
    "from_metadata",
    "in_common",
    "keep_dataset",
    "metadata",
    "note_all_but",
    "noted_of",
    "record",
    "spendings",
    "steps_noted",
    "together",
]
