"""What a training leaves on disk.

folder       a run folder: claimed by one process, checked, published to, continued from
checkpoint   checkpoints and models as safetensors
card         how the model of a run is used, without its data
members      which examples a run was trained on, as keyed digests
canaries     which canaries were in its training, as keyed digests
files        files that appear whole or not at all
"""

from lmdp.app.runs.canaries import Coins
from lmdp.app.runs.card import IMAGES, NETWORK, NUMBERS, TEXTS, TOKENIZER, Card, Options, found_elsewhere
from lmdp.app.runs.checkpoint import Checkpoint, add_spent, load_model, read_weights, save_model, spent_for
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.folder import AVERAGE, MODEL, RunFolder
from lmdp.app.runs.members import Changes, Members

__all__ = [
    "AVERAGE",
    "IMAGES",
    "MODEL",
    "NETWORK",
    "NUMBERS",
    "TEXTS",
    "TOKENIZER",
    "Card",
    "Changes",
    "Checkpoint",
    "Coins",
    "Members",
    "Options",
    "RunFolder",
    "add_spent",
    "found_elsewhere",
    "load_model",
    "read_weights",
    "save_model",
    "spent_for",
    "write",
    "write_json",
]
