"""Standard input, output and error of a command: also where one was closed, and where output cannot be written."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

_IN, _OUT, _ERR = 0, 1, 2


class OutputLost(OSError):
    """Standard output cannot be written: its disk is full, or it was closed."""


class _Output(io.FileIO):
    """Standard output. What goes wrong with it is told apart from what goes wrong with other files."""

    def __init__(self) -> None:
        super().__init__(_OUT, "w", closefd=False)

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error.errno, error.strerror) from error


def take_streams() -> None:
    """Make the streams of this process such that a command can use them. To be called once, before all else.

    A stream that was closed fails when it is used, and no file that is opened later takes its number: it would get
    what is printed. What standard output has no character for is shown as an escape.
    """
    for number, mode in ((_IN, os.O_WRONLY), (_OUT, os.O_RDONLY), (_ERR, os.O_WRONLY)):
        _fill(number, mode)
    before = sys.stdout
    out = io.TextIOWrapper(
        io.BufferedWriter(_Output()),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=os.isatty(_OUT) or getattr(before, "write_through", False),  # as PYTHONUNBUFFERED asks
    )
    if before is not None:
        before.flush()
    sys.stdout = out
    if sys.stdin is None:
        sys.stdin = open(_IN, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


def drop_output(stream: TextIO) -> None:
    """Let go of what could not be written, so that the end of the process does not try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fill(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        found = os.open(os.devnull, mode)
        if found != number:
            os.dup2(found, number)
            os.close(found)
        os.set_inheritable(number, True)
