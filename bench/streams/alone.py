"""A part by itself, on as many rows as asked."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Protocol


class Measure(Protocol):
    def __call__(self, root: Path, rounds: int, *, rows: int) -> bool: ...


def run(measure: Measure, about: str | None, rows: int) -> int:
    """Measure by the arguments of the command line; the exit code. `rows` where none are given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: int(text.replace("_", "")), default=rows)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to work; default a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-streams-", dir=args.directory) as directory:
        return 0 if measure(Path(directory), args.rounds, rows=args.rows) else 1
