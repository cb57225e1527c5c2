"""What a user sees while waiting: a bar on a terminal, plain lines elsewhere, nothing if quiet."""

from __future__ import annotations

import io

import pytest

from lmdp.app import progress
from lmdp.app.progress import Show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(show: Show) -> None:
    with show.bar("train lm", 4) as bar:
        for step in range(1, 5):
            bar.to(step, f"epsilon {step}.00")
        show.say("a remark")


def test_plain_lines_say_what_is_done_how_long_is_left_and_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 15))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    work(Show(stream=stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train lm …"
    assert lines[1] == "train lm  25%, 0:45 left, epsilon 1.00"
    assert "a remark" in lines
    assert lines[-1].startswith("train lm took")
    assert lines[-1].endswith("epsilon 4.00")
    assert "\r" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left_and_epsilon() -> None:
    stream = Terminal()
    work(Show(stream=stream))
    assert "100%" in stream.getvalue()
    assert "epsilon 4.00" in stream.getvalue()
    assert "a remark" in stream.getvalue()


def test_quiet_is_quiet() -> None:
    stream = Terminal()
    work(Show(quiet=True, stream=stream))
    assert stream.getvalue() == ""


def test_fractions_move_the_current_bar() -> None:
    show = Show(quiet=True)
    show.part(0.5)
    with show.bar("estimate", 2.0) as bar:
        show.part(0.5)
        assert bar.done == 1.0
