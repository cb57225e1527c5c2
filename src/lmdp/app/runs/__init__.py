"""What a training leaves on disk.

folder       a run folder: claimed by one process, checked, published to, continued from
checkpoint   checkpoints and models as safetensors
files        files that appear whole or not at all
"""

from lmdp.app.runs.checkpoint import Checkpoint, load_model, save_model
from lmdp.app.runs.files import write, write_json
from lmdp.app.runs.folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "load_model", "save_model", "write", "write_json"]
