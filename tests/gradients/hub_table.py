"""The table of models: `python -m tests.gradients.hub_table [name …]`.

    model                        double   single   step

Errors are the worst, relative, of per-example norms and sums against one example at a time (tiny models). Then, of wide
ones (256 features, 16 examples of 64 tokens): the time of a private step as a multiple of a non-private one, the median
of runs in turn. Pictures, sounds and the models of timm stay as small as they are: their time is that of calling.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from tests.gradients.hub_models import MODELS, Batch, HubModel
from tests.gradients.reference import compare

RUNS, EXAMPLES, LENGTH = 9, 16, 64


def error(case: HubModel, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    model = case.make().to(dtype).eval()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in case.batch(5, 6).items()}
    examples = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(5)]
    return compare(model, case.total, batch, examples, generic_modules=case.options.get("generic", ())).worst


def step_of(case: HubModel, *, private: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = case.make(wide=True)
    case.mended(model)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch: Batch = case.batch(EXAMPLES, LENGTH)
    if private:
        lmdp.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(torch.zeros(EXAMPLES)), batch_size=EXAMPLES),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            check_mixing=False,
            **{"allow_unused": True, **case.options},
        )

    def step() -> None:
        optimizer.zero_grad()
        case.mean(model, batch).backward()
        optimizer.step()

    step()
    step()
    return step


def ratio(case: HubModel) -> float:
    plain, private = step_of(case, private=False), step_of(case, private=True)
    times: dict[Callable[[], None], list[float]] = {plain: [], private: []}
    for _ in range(RUNS):
        for step, taken in times.items():
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    return statistics.median(times[private]) / statistics.median(times[plain])


def row(name: str, case: HubModel) -> str:
    try:
        double, single = error(case, torch.float64), error(case, torch.float32)
    except (ImportError, RuntimeError) as problem:
        return f"{name:42s} not tried: {str(problem).splitlines()[0][:60]}"
    told = f"as told: {case.refusal.replace(chr(92), '')}" if case.refusal else "as it comes"
    return f"{name:42s} {double:8.1e} {single:8.1e} {ratio(case):5.2f} x  {told}"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    write = sys.stdout.write
    write(f"{'model':42s} {'double':>8s} {'single':>8s} {'step':>7s}\n")
    for name in names or MODELS:
        write(row(name, MODELS[name]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
