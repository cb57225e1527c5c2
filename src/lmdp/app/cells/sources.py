"""Which files stand for the data sets that cells name, so that results say what data is, and not where it lay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILES: dict[str, tuple[str, ...]] = {
    "mnist": ("mnist",),
    "fashion-mnist": ("fashion_mnist", "fashion-mnist"),
    "cifar10": ("cifar10", "cifar10_subset"),
    "cifar100": ("cifar100",),
    "svhn": ("svhn", "svhn32", "svhn32_subset"),
    "celeba": ("celeba",),
    "imagenet": ("imagenet", "imagenet32", "tiny_imagenet32", "tiny_imagenet32_subset"),
    "ffhq": ("ffhq",),
    "vggface2": ("vggface2",),
}
"""Data set → names that its .npz file may have in a --data-folder, the first that is there counts."""
OF_YOUR_OWN = ("imagenet", "ffhq", "vggface2")
"""Data sets that no SPEC names: they come from a folder, or from --private and --shadow."""


@dataclass(frozen=True)
class Sources:
    """Data set → SPEC, for those that do not come from their official files."""

    specs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path | None = None, given: Mapping[str, str] | None = None) -> Sources:
        """Files of a folder, and SPECs for data sets by name, which count more."""
        specs: dict[str, str] = {}
        if folder is not None:
            if not folder.is_dir():
                raise FileNotFoundError(f"--data-folder {folder} is not a folder; it holds .npz files ({_names()})")
            for name, stems in FILES.items():
                there = [path for stem in stems if (path := folder / f"{stem}.npz").exists()]
                specs |= {name: f"npz:{there[0]}"} if there else {}
            if not specs:
                raise FileNotFoundError(f"--data-folder {folder} holds none of {_names()}")
        return cls({**specs, **(given or {})})

    def resolved(self, spec: str) -> str:
        """The SPEC to load, with the options that the cell asks for."""
        name, _, options = spec.partition("?")
        given = self.specs.get(name, name)
        if given == name and name in OF_YOUR_OWN:
            raise ValueError(
                f"{name} has no SPEC of its own: put {FILES[name][0]}.npz into a --data-folder, or name yours with "
                "--private or --shadow"
            )
        return f"{given}{'&' if '?' in given else '?'}{options}" if options else given


def _names() -> str:
    return ", ".join(f"{stems[0]}.npz" for stems in FILES.values())
