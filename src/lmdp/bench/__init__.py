"""Speed and memory of one private step against non-private SGD and other libraries, in one run."""

from lmdp.bench.run import run, table

__all__ = ["run", "table"]
