"""`make demo`: the flights of 2013 through PySpark into a shard and back, every figure checked against the CSV.

    python -m examples.flights                                          in a fresh temporary directory
    python -m examples.flights --dir PATH                               in a directory that stays
    python -m examples.flights --blob s3://... --consensus postgresql://...

Exit code 0 only if all figures are equal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from examples.flights.dataset import carrier_names
from examples.flights.processes import Children, Deadline, DemoFailed
from examples.flights.progress import Progress
from examples.flights.report import Outcome, page, text_table
from examples.flights.run import Demo
from examples.flights.store import environment_of
from persist.cli.connection_args import Where, add_arguments, where_of
from persist.core.errors import PersistError

TIMEOUT_S = 900.0
SHOWN_MAX = 20  # differences that are named
EXIT_DIFFERENT = 1
EXIT_FAILED = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the page goes (default ./demo-out)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="Spark's tasks at a time, and splits")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="most seconds that all may take")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        print(
            "the demo runs PySpark, which needs Java 17: install it (on Debian: openjdk-17-jre-headless)",
            file=sys.stderr,
        )
        return EXIT_FAILED
    try:
        with tempfile.TemporaryDirectory(prefix="persist-demo-") as scratch:
            outcome = run(arguments, Path(scratch))
    except (DemoFailed, PersistError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return conclude(outcome, arguments.out)


def run(arguments: argparse.Namespace, scratch: Path) -> Outcome:
    """Run the demo where the arguments say, or else in `scratch`."""
    where = where_of(arguments)
    if where == Where():
        where = Where(directory=str(scratch / "shards"))
    location = where.open()
    try:
        location.check()
        with Children(environment_of(where, os.environ), scratch) as children:
            demo = Demo(location, children, Progress(sys.stderr), Deadline(arguments.timeout), scratch, arguments.cores)
            return demo.run()
    finally:
        location.close()


def conclude(outcome: Outcome, out: Path) -> int:
    """Write the page, print the table, name what differs; the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / "flights.html"
    target.write_text(page(outcome, carrier_names()), encoding="utf-8")
    print(f"\n{text_table(outcome)}")
    for sentence in outcome.failed[:SHOWN_MAX]:
        print(f"DIFFERS {sentence}")
    if len(outcome.failed) > SHOWN_MAX:
        print(f"and {len(outcome.failed) - SHOWN_MAX} more")
    print(f"page: {target}")
    return EXIT_DIFFERENT if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
