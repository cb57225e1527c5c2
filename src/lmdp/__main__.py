"""`python -m lmdp` is the command line."""

import atexit
import os
import sys

from lmdp.app.cli import main
from lmdp.app.launched import several

status = main()
if several():
    # Threads of a group that an error still holds outlive it, and may abort a Python that ends with its work done.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
