"""Speed and memory of one private step against non-private SGD and other libraries, in one run.

cases        what is measured on: models, each with its batch
language     models of text
contenders   who is measured: SGD, every private method of the table, a naive one, Opacus
measure      seconds in turns, peak memory alone in a process, the error against one example at a time
run          `run` measures all of it, `plans` says which rule every module uses
table        what was measured, as text
plot         step times as an SVG
growth       what larger batches, deeper models and longer sequences do to the price of privacy
processes    one step by several processes, beside DistributedDataParallel
loop         what surrounds a step: the rest of a training's loop, the start of a process
watch        a stopwatch on functions of a running command
"""

from lmdp.app.bench.growth import growth
from lmdp.app.bench.processes import by_processes, processes_text
from lmdp.app.bench.run import plans, run
from lmdp.app.bench.table import growth_text, table

__all__ = ["by_processes", "growth", "growth_text", "plans", "processes_text", "run", "table"]
