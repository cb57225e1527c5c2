"""`python -m lmdp` is the command line."""

import sys

from lmdp.app.cli import main

sys.exit(main())
