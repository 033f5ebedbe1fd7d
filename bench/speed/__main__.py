"""Everything beside its floor and its peers, one after the other.

    python -m bench.speed [--only posts,commits,reads,compaction,spark,s3,flatness] [--rounds 3]

Each part is a program of its own with arguments of its own, such as `python -m bench.speed.reads --help`. Whole it
takes about an hour on two cores, of which flatness takes the half.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.speed import commits, compaction, far_s3, flatness, reads, spark_jobs, thin_posts

PARTS: dict[str, Callable[[Path, int], None]] = {
    "posts": thin_posts.measure,
    "commits": commits.measure,
    "reads": reads.measure,
    "compaction": compaction.measure,
    "spark": spark_jobs.measure,
    "s3": far_s3.measure,
    "flatness": flatness.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement, of which the median counts")
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        print(f"=== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-speed-") as directory:
            Path(directory).chmod(0o755)  # an S3 server that runs as another user works below it
            PARTS[name](Path(directory), arguments.rounds)


if __name__ == "__main__":
    main()
