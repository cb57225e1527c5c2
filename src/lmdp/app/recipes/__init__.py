"""One small file per experiment.

mnist-paper.toml, cifar10.toml, cifar100.toml, celeba.toml   the four of the paper
mnist.toml, fashion-mnist.toml, cifar10-scatter.toml   tuned for accuracy (docs/utility.md)
demo.toml                                              the whole flow in two minutes
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from importlib import resources
from typing import Any

from lmdp.app.config import Config


def recipe_names() -> list[str]:
    folder = resources.files("lmdp.app.recipes")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def recipe(name: str) -> dict[str, Any]:
    """The values that a recipe sets: one that installs with the package, or a TOML file of your own."""
    if name.endswith(".toml"):
        return Config.load(name).to_dict()
    if name not in recipe_names():
        near = get_close_matches(name.lower(), recipe_names(), n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"recipe is {name!r}; {guess}it must be one of {', '.join(recipe_names())}, or a .toml file")
    text = resources.files("lmdp.app.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
