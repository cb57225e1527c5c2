"""What a training leaves on disk.

folder       a run folder: claimed by one process, checked, published to, continued from
checkpoint   checkpoints and models as safetensors
members      which examples a run was trained on, as keyed digests
canaries     which canaries were in its training, as keyed digests
files        files that appear whole or not at all
"""

from lmdp.app.runs.canaries import Coins
from lmdp.app.runs.checkpoint import Checkpoint, load_model, save_model, spent_for
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.folder import RunFolder
from lmdp.app.runs.members import Changes, Members

__all__ = [
    "Changes",
    "Checkpoint",
    "Coins",
    "Members",
    "RunFolder",
    "load_model",
    "save_model",
    "spent_for",
    "write",
    "write_json",
]
