"""What is wrong with a command line, in one line; and what was perhaps meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*?)\)$")
"""What argparse says of a word that is none of several."""


class Parser(argparse.ArgumentParser):
    """One with commands, or one of the commands."""

    given: Sequence[str] = ()
    """All words of the command line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Options that nobody knows are named together with the nearest that the command has."""
        args = sys.argv[1:] if args is None else list(args)
        for parser in (self, *self._commands().values()):
            parser.given = args
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        command = self._commands().get(parsed.command, self)
        return command.error(f"unrecognized arguments: {' '.join(unknown)}{command.guess(unknown)}")

    def guess(self, words: Iterable[str]) -> str:
        """Which options were perhaps meant by those of the words that are none."""
        every = [option for action in self._actions for option in action.option_strings]
        named = [word.partition("=")[0] for word in words if word.startswith("-")]
        near = (get_close_matches(word, every, n=1) for word in named if word not in every)
        return "".join(f"; did you mean {meant[0]}?" for meant in near if meant)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            message += self._mistyped()
        elif wrong := CHOICE.search(message):
            near = get_close_matches(wrong[1].lower(), re.findall(r"[^\s',]+", wrong[2]), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _mistyped(self) -> str:
        """Of options that are missing, those that stand there in another spelling."""
        every = [option for action in self._actions for option in action.option_strings]
        unknown = [word for word in self.given if word.startswith("--") and word.partition("=")[0] not in every]
        guessed = [word for word in unknown if self.guess([word])]
        return (
            f"; {' and '.join(guessed)} {'is' if len(guessed) == 1 else 'are'} unknown{self.guess(guessed)}"
            if guessed
            else ""
        )

    def _commands(self) -> dict[str, Parser]:
        """By name; none of a command itself."""
        choices = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(choices[0]) if choices else {}
