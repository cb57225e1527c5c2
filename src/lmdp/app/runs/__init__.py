"""What a training leaves on disk."""

from lmdp.app.runs.checkpoint import Checkpoint, load_model, save_model
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "load_model", "save_model", "write", "write_json"]
