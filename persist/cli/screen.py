"""What a terminal shows: colours, how wide it is, and texts that cannot take it over."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from blob import without_secrets

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WIDE = ("W", "F")
_BOLD, _DIM, _RED, _GREEN = ("1", "2", "31", "32")
NO_COLOUR = ("--no-colour", "--no-color")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --no-colour."""
    parser.add_argument(*NO_COLOUR, dest="no_colour", action="store_true", help="no colours; NO_COLOR says the same")


@dataclass(frozen=True)
class Screen:
    """Where output goes. `width` is in columns of a terminal; None: lines are not cut."""

    is_terminal: bool = False
    colours: bool = False
    width: int | None = None

    @classmethod
    def of(cls, out: TextIO, no_colour: bool = False) -> Screen:
        """What a stream is, by itself and by the environment. Only a terminal has colours, unless NO_COLOR is set."""
        is_terminal = out.isatty()
        plain = no_colour or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((0, 0)).columns if is_terminal else 0
        return cls(is_terminal, is_terminal and not plain, width or None)

    def bold(self, text: str) -> str:
        return self._in(_BOLD, text)

    def dim(self, text: str) -> str:
        return self._in(_DIM, text)

    def red(self, text: str) -> str:
        return self._in(_RED, text)

    def green(self, text: str) -> str:
        return self._in(_GREEN, text)

    def _in(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.colours and text else text


def complain(command: str, message: str, arguments: Sequence[str] = ()) -> None:
    """Say on standard error, in one line, what went wrong."""
    screen = Screen.of(sys.stderr, any(name in arguments for name in NO_COLOUR))
    print(f"{screen.red(command)}: {plain(without_secrets_of(arguments, message))}", file=sys.stderr)


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """What was given, for `complain`."""
    found = (one if isinstance(one, list) else [one] for one in vars(arguments).values())
    return [one for some in found for one in some if isinstance(one, str)]


def without_secrets_of(arguments: Sequence[str], message: str) -> str:
    """The message with each argument that is a URL, or holds one, without its secrets, wherever it was given."""
    for word in arguments:
        for url in {word, word.partition("=")[2]}:
            if "://" in url:
                for said in (url, repr(url)[1:-1]):
                    message = message.replace(said, without_secrets(said))
    return message


def plain(text: str) -> str:
    """The text with characters that would move the cursor, or do worse, as escapes such as `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def harmless(text: str, form: Callable[[str], str]) -> str:
    """The text of many lines with characters that would move the cursor elsewhere as `form` writes them."""
    return _CONTROL.sub(lambda found: found.group() if found.group() in "\n\r\t" else form(found.group()), text)


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in _WIDE else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The text in at most so many columns; what is cut ends in `…`."""
    if width_of(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += width_of(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + "…"


def padded(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly so many columns, cut or with blanks; `right`: at their right end."""
    found = cut(text, width)
    blanks = " " * (width - width_of(found))
    return blanks + found if right else found + blanks
