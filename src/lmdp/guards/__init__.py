"""What would break the privacy analysis: refused by name, or noted as a reason against certification.

modules       modules and optimizers that cannot be trained privately, and the swap that makes it possible
loss_scale    what a loss divides by, read off its graph
independence  whether examples meet, in the model or in the loss
content       whether something that carries no noise has changed
"""

from lmdp.guards.content import fingerprints, unnoised
from lmdp.guards.independence import Independence, same_randomness
from lmdp.guards.modules import check_model, check_optimizer, make_compatible

__all__ = [
    "Independence",
    "check_model",
    "check_optimizer",
    "fingerprints",
    "make_compatible",
    "same_randomness",
    "unnoised",
]
