"""Speed and memory of one private step against non-private SGD and other libraries, in one run."""

from lmdp.bench.run import plans, run
from lmdp.bench.table import table

__all__ = ["plans", "run", "table"]
