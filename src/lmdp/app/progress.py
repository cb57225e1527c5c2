"""While one waits: a bar with the time left on a terminal, plain lines elsewhere, nothing if quiet; and how to stop."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

LINE_EVERY = 10.0
"""Seconds between plain lines, where there is no terminal to redraw a bar on."""


class Interrupted(Exception):
    """The user stopped what was going on; it can be continued."""


class Show:
    """Writes to standard error, so that standard output holds results only."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._bar: Bar | None = None

    def say(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.note(text)
        else:
            print(text, file=self._stream, flush=True)

    def part(self, fraction: float) -> None:
        """How much of the current bar is done, for work that reports fractions."""
        if self._bar is not None:
            self._bar.to(fraction * self._bar.total)

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        """A bar from 0 to `total`. Lines said meanwhile stay readable beside it."""
        kind = SilentBar if self._quiet else TerminalBar if self._stream.isatty() else PlainBar
        self._bar = bar = kind(label, total, self._stream)
        try:
            yield bar
        finally:
            self._bar = None
            bar.close()


class Bar:
    """Draws nothing."""

    def __init__(self, label: str, total: float, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, total, stream
        self.done = 0.0
        self.start = time.monotonic()

    def to(self, done: float, text: str = "") -> None:
        self.done = done

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


SilentBar = Bar


class TerminalBar(Bar):
    """Redrawn in place by tqdm."""

    def __init__(self, label: str, total: float, stream: TextIO) -> None:
        from tqdm import tqdm

        super().__init__(label, total, stream)
        form = "{desc} {percentage:3.0f}% |{bar}| {elapsed} < {remaining}{postfix}"
        self._tqdm: Any = tqdm(total=total, desc=label, file=stream, bar_format=form, dynamic_ncols=True, leave=True)

    def to(self, done: float, text: str = "") -> None:
        if text:
            self._tqdm.set_postfix_str(text, refresh=False)
        self._tqdm.update(done - self.done)
        self.done = done

    def note(self, text: str) -> None:
        self._tqdm.write(text, file=self.stream)

    def close(self) -> None:
        self._tqdm.close()


class PlainBar(Bar):
    """A line now and then: what is done, what was reached, how long is left."""

    def __init__(self, label: str, total: float, stream: TextIO) -> None:
        super().__init__(label, total, stream)
        self._last = self.start
        self._text = ""
        self._write(f"{label} …")

    def to(self, done: float, text: str = "") -> None:
        self.done = done
        self._text = text or self._text
        now = time.monotonic()
        if now - self._last < LINE_EVERY or not 0 < done < self.total:
            return
        self._last = now
        left = (now - self.start) * (self.total - done) / done
        self._write(f"{self.label} {done / self.total:4.0%}, {_clock(left)} left{self._reached}")

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        self._write(f"{self.label} took {_clock(time.monotonic() - self.start)}{self._reached}")

    @property
    def _reached(self) -> str:
        return f", {self._text}" if self._text else ""

    def _write(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask the loop to stop after the current step; a Ctrl-C after that stops at once.

    (torchrun passes a Ctrl-C on as SIGTERM, to processes that have had it.)
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, _: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping(Protocol):
    """Processes that train together, or one alone."""

    stop_asked: bool

    def ask_to_stop(self) -> None: ...


def stop_asked(stop: threading.Event, group: Stopping) -> bool:
    """Whether somebody has asked to stop; of several processes, only once all of them know of it."""
    if stop.is_set():
        group.ask_to_stop()
    return group.stop_asked
