"""Streams and sources, one part after the other; each prints its bars.

    python -m bench.streams                 all parts
    python -m bench.streams backfill        those that are named

Each part is a module that has `measure(root, rounds)` and arguments of its own, such as
`python -m bench.streams.backfill --rows 1_000_000`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.streams import backfill, bindings, latency, scan

# Each measures in an empty directory, with the median of so many rounds, and tells whether all of its bars hold.
PARTS: dict[str, Callable[[Path, int], bool]] = {
    "latency": latency.measure,
    "backfill": backfill.measure,
    "bindings": bindings.measure,
    "scan": scan.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(PARTS)}; all of them by default")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement, of which the median counts")
    parser.add_argument("--directory", help="where to work; default a temporary directory")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    held = True
    for name in arguments.parts or PARTS:
        print(f"=== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-streams-", dir=arguments.directory) as directory:
            held &= PARTS[name](Path(directory), arguments.rounds)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
