"""What a training leaves on disk."""

from lmdp.runs.checkpoint import Checkpoint, load_model, save_model
from lmdp.runs.files import write, write_json
from lmdp.runs.folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "load_model", "save_model", "write", "write_json"]
