"""What would break the privacy analysis: refused by name, or noted against the assumption that it touches.

modules       modules and optimizers that cannot be trained privately, and the swap that makes it possible
verdicts      the assumptions of the proof, and what is known of each: holds, violated, not established
loss_scale    what a loss divides by, read off its graph
delivery      what the data loader handed out, and what the loop did with it
handed        what the data loader handed out, and whether the model was given it
proof         whether a loss's graph shows that each of its terms is one example's own
loss          whether examples meet in a loss, as far as one backward pass can tell
replay        whether examples meet in the model: it is run again with others beside them
again         calls of the model that are yet to be run again, once the batch is out of memory
still         randomness that does not depend on how many examples there are
ways          ways of making a step, and what is known of each
looks         who is handed out to be looked at, and when
company       what the same examples tell beside others, and without them
words         what is said of examples that may meet, and of steps that an account may miss
independence  all looks at examples that meet, and what they establish
content       whether something that carries no noise has changed
processes     whether this process trains alone, or in a group whose sums are added up
watch         all guards of one run, in the order in which a step meets them
"""

from lmdp.guards.content import fingerprints, unnoised
from lmdp.guards.handed import Read, common_examples, refuse_repeated, shapes
from lmdp.guards.independence import Independence
from lmdp.guards.modules import Stated, check_model, check_optimizer, check_setup, make_compatible, refuse_scaler
from lmdp.guards.verdicts import ASSUMPTIONS, HOLDS, NOT_ESTABLISHED, VIOLATED, Judgement, Verdict, unjudged
from lmdp.guards.watch import Watch

__all__ = [
    "ASSUMPTIONS",
    "HOLDS",
    "NOT_ESTABLISHED",
    "VIOLATED",
    "Independence",
    "Judgement",
    "Read",
    "Stated",
    "Verdict",
    "Watch",
    "check_model",
    "check_optimizer",
    "check_setup",
    "common_examples",
    "fingerprints",
    "make_compatible",
    "refuse_repeated",
    "refuse_scaler",
    "shapes",
    "unjudged",
    "unnoised",
]
