"""Speed and memory of one private step against non-private SGD and other libraries, in one run."""

from lmdp.app.bench.growth import growth
from lmdp.app.bench.run import plans, run
from lmdp.app.bench.table import growth_text, table

__all__ = ["growth", "growth_text", "plans", "run", "table"]
