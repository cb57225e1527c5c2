"""`reproduce`: measure the cells that are missing, judge the claims, and write the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdp.app.cells.run import measure_all
from lmdp.app.cells.sources import Sources
from lmdp.app.cells.store import Store
from lmdp.app.progress import Show
from lmdp.app.reproduce.grid import PARTS, Grid, cells_of
from lmdp.app.reproduce.paper import EXPERIMENTS
from lmdp.app.reproduce.scales import SCALES
from lmdp.app.runs.files import write, write_json

SOURCES_FILE = "sources.json"


@dataclass(frozen=True)
class Asked:
    """What somebody wants to see, of which experiments, how large, and on which data."""

    what: tuple[str, ...]
    grid: Grid
    sources: Sources

    @classmethod
    def of(
        cls,
        what: str,
        scale: str,
        *,
        seeds: int | None = None,
        experiments: Sequence[str] = (),
        data_folder: Path | None = None,
        private: str | None = None,
        shadow: str | None = None,
    ) -> Asked:
        """Refuses, by name, what there is not."""
        parts = tuple(PARTS) if what == "all" else (what,)
        if unknown := [part for part in parts if part not in PARTS]:
            raise ValueError(f"reproduce {unknown[0]!r}: it must be one of {', '.join(PARTS)}, or all")
        if scale not in SCALES:
            raise ValueError(f"--scale is {scale!r}; it must be one of {', '.join(SCALES)}")
        size = SCALES[scale]
        chosen = tuple(experiments) or size.experiments
        if unknown := [name for name in chosen if name not in size.experiments]:
            larger = f"; --scale full has {', '.join(EXPERIMENTS)}" if unknown[0] in EXPERIMENTS else ""
            raise ValueError(
                f"--experiments has {unknown[0]!r}; at --scale {scale} there are {', '.join(size.experiments)}{larger}"
            )
        count = size.seeds if seeds is None else seeds
        if not 1 <= count <= 100:
            raise ValueError(f"--seeds is {count}; it must be 1 to 100, and an interval needs 2 or more")
        given = _given(size.base(chosen[0]) if len(chosen) == 1 else None, private, shadow)
        return cls(parts, Grid(size, chosen, count), Sources.of(data_folder, given))


def _given(base: dict[str, Any] | None, private: str | None, shadow: str | None) -> dict[str, str]:
    """SPECs of one's own, by the data set that they stand for."""
    if not private and not shadow:
        return {}
    if base is None:
        raise ValueError("--private and --shadow are the data of one experiment: choose it with --experiments")
    names = {key: str(base[key]).partition("?")[0] for key in ("data", "shadow")}
    if names["data"] == names["shadow"]:
        raise ValueError(
            f"at this scale private and shadow data are halves of {names['data']}; choose --scale cpu or full"
        )
    return {names[key]: spec for key, spec in (("data", private), ("shadow", shadow)) if spec}


def reproduce(
    asked: Asked,
    out: Path,
    show: Show,
    *,
    command: str,
    jobs: int | None = None,
    draw: bool = False,
    device: str = "cpu",
) -> Any:
    """Measure what is missing (nothing, with `draw`), then judge and draw all that is there."""
    from lmdp.app.reproduce.page import figures, render
    from lmdp.app.reproduce.verdicts import verdicts

    out.mkdir(parents=True, exist_ok=True)
    cells = cells_of(asked.what, asked.grid)
    failed: dict[str, str] = {}
    if not draw:
        from lmdp.app.reproduce.rates import rates_for

        _keep_sources(asked.sources, out)
        failed = measure_all(cells, out, asked.sources, show, rates=rates_for, jobs=jobs, device=device)
    store = Store(out)
    told = verdicts(asked.grid, asked.what, store)
    write(out / "report.html", render(asked.grid, asked.what, store, told, command))
    (out / "figures").mkdir(exist_ok=True)
    for name, drawing in figures(asked.grid, asked.what, store).items():
        write(out / "figures" / name, drawing)
    write_json(out / "verdicts.json", [verdict.to_dict() for verdict in told])
    if failed:
        first = next(iter(failed.items()))
        raise RuntimeError(
            f"{len(failed)} of {len(cells)} cells failed, the first of them {first[0]}: {first[1]}. The page has the "
            "others; the same command tries these again"
        )
    return told


def _keep_sources(sources: Sources, out: Path) -> None:
    """A folder holds results of one set of data: refuse others of the same name."""
    path = out / SOURCES_FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    if changed := [name for name, spec in sources.specs.items() if before.get(name, spec) != spec]:
        name = changed[0]
        raise ValueError(
            f"{out} holds results in which {name} was {before[name]}, and now it is {sources.specs[name]}. Choose "
            "another --out"
        )
    write_json(path, {**before, **sources.specs})
