"""Laws that must hold with the compiled loops and without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmdp.private import compiled

WIDTHS = [width for width in (64, 32, 16) if width <= (compiled.vector_bytes() or 0)]
"""Of the vectors that this processor has; on some there is only one."""


def _named(width: int | None) -> str:
    return f"{width} bytes" if width else "PyTorch"


@pytest.fixture(scope="module", params=[*WIDTHS, None], ids=_named)
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """By compiled loops of every width, and by PyTorch."""
    yield from _by(request.param)


@pytest.fixture(scope="module", params=[*WIDTHS[:1], None], ids=_named)
def widest_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """By compiled loops, and by PyTorch."""
    yield from _by(request.param)


def _by(width: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "vector_bytes", lambda: width)
        yield
