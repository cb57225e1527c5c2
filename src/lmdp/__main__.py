"""`python -m lmdp` is the command line."""

import sys

from lmdp.cli import main

sys.exit(main())
