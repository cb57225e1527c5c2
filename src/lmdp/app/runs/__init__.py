"""What a training leaves on disk.

folder       a run folder: claimed by one process, checked, published to, continued from
checkpoint   checkpoints and models as safetensors
finished     weights and the statement that names them, bound together
card         how the model of a run is used, without its data
members      which examples a run was trained on, as keyed digests
canaries     which canaries were in its training, as keyed digests
files        files that appear whole or not at all
"""

from lmdp.app.runs.canaries import Coins
from lmdp.app.runs.card import IMAGES, NETWORK, NUMBERS, TEXTS, TOKENIZER, Card, Options, found_elsewhere
from lmdp.app.runs.checkpoint import Checkpoint, add_spent, load_model, read_weights, save_model, spent_for
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.finished import SHA, digest, foreign, leave, privacy_of, statement_of, unfinished, versions
from lmdp.app.runs.folder import AVERAGE, MODEL, RunFolder
from lmdp.app.runs.members import Changes, Members

__all__ = [
    "AVERAGE",
    "IMAGES",
    "MODEL",
    "NETWORK",
    "NUMBERS",
    "SHA",
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
    "digest",
    "foreign",
    "found_elsewhere",
    "leave",
    "load_model",
    "privacy_of",
    "read_weights",
    "save_model",
    "spent_for",
    "statement_of",
    "unfinished",
    "versions",
    "write",
    "write_json",
]
