"""Every method with every source that it can have, read off the tables: tests run over these, none is left out."""

from __future__ import annotations

from lmdp.methods import METHODS, SOURCES

Choice = tuple[str, str]


def choices() -> list[Choice]:
    """(method, source) of every private method; a method without layer weights comes once."""
    private = [method for method in METHODS.values() if method.private]
    return [(method.name, source) for method in private for source in method.sources or ("private",)]


def certified() -> list[Choice]:
    return [choice for choice in choices() if not METHODS[choice[0]].sources or not SOURCES[choice[1]].refuted]


def refuted() -> list[Choice]:
    return [choice for choice in choices() if choice not in certified()]


def with_default_source() -> list[str]:
    """Private methods that need no public data."""
    return [method for method, source in choices() if source == "private"]
