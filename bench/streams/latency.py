"""What a micro-batch from shard to shard takes longer than Spark's from nowhere to nowhere, as `bench.spark` tells it.

python -m bench.streams latency
"""

from __future__ import annotations

from pathlib import Path

from bench.spark import Bench


def measure(root: Path, rounds: int) -> bool:
    """In the empty directory `root`, the median of so many rounds. Whether the bar holds."""
    bench = Bench(root, 0, rounds)
    try:
        return all(bench.stream())
    finally:
        bench.close()
