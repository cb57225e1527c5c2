"""`python -m lmdp` is the command line."""

import atexit
import os
import sys

from lmdp.app.cli import main
from lmdp.app.launched import several

status = main()
if several():
    # Threads of a group of processes may outlive it, and abort a process at its end whose work is done.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
