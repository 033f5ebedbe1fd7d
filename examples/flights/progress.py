"""Progress on stderr: a bar that moves on a terminal, one line for each finished step anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

WIDTH = 24
REDRAW_S = 0.1
NAME_WIDTH = 40


class Step:
    """One step of known length. Use as a context manager; `advance` as work is done."""

    def __init__(self, stream: TextIO, name: str, total: int, moves: bool) -> None:
        self._stream, self._name, self._total, self._moves = stream, name, max(1, total), moves
        self._done = 0
        self._note = ""
        self._began_s = self._drawn_s = time.monotonic()
        self.seconds = 0.0

    def advance(self, done: int, note: str | None = None) -> None:
        """`done` of the total so far, and what is being done now."""
        self._done = min(done, self._total)
        self._note = self._note if note is None else note
        now = time.monotonic()
        if self._moves and (now - self._drawn_s >= REDRAW_S or done >= self._total):
            self._drawn_s = now
            full = WIDTH * self._done // self._total
            bar = "█" * full + "░" * (WIDTH - full)
            self._stream.write(
                f"\r\x1b[K{self._name:{NAME_WIDTH}} {bar} {100 * self._done // self._total:3d}% {self._note}"
            )
            self._stream.flush()

    def note(self, text: str) -> None:
        """What is worth a line of its own."""
        self._stream.write(f"{self._clear()}  {text}\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self.advance(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = time.monotonic() - self._began_s
        end = f"{self.seconds:6.1f} s  {self._note}" if kind is None else "stopped"
        self._stream.write(f"{self._clear()}{self._name:{NAME_WIDTH}} {end}".rstrip() + "\n")
        self._stream.flush()

    def _clear(self) -> str:
        return "\r\x1b[K" if self._moves else ""


class Progress:
    """Makes steps for one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moves = stream.isatty()

    def step(self, name: str, total: int = 1) -> Step:
        return Step(self._stream, name, total, self._moves)


__all__ = ["Progress", "Step"]
