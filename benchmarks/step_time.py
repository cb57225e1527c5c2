"""`python benchmarks/step_time.py` is `lmdp bench`, with the same options."""

import sys

from lmdp.app.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
