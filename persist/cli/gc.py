"""`persist gc`: delete blobs that no reader can need any more, and truncate the logs of shards."""

from __future__ import annotations

import argparse
import json
import sys

from compactor.gc import Collector, GcSettings
from compactor.jobs import gc_job
from compactor.loop import Loop, LoopSettings
from compactor.metering import Metrics
from persist.cli import running, where
from persist.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where.add_arguments(parser)
    running.add_arguments(parser)
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="shards at a time (default 4)")
    parser.add_argument("--delete-threads", type=int, default=8, metavar="N", help="deletions at a time (default 8)")


def run(arguments: argparse.Namespace) -> int:
    for name in ("concurrency", "delete_threads"):
        if getattr(arguments, name) <= 0:
            raise InvalidUsage(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be more than 0")
    running.prepare(arguments)
    location = where.where_of(arguments).open(must_exist=True)
    try:
        location.check()
        metrics = Metrics()
        collector = Collector(location, GcSettings(delete_threads=arguments.delete_threads), metrics=metrics)
        patterns = tuple(arguments.shards or ("*",))
        loop_settings = LoopSettings(patterns, arguments.concurrency, arguments.interval)
        loop = Loop(location, gc_job(location, collector), loop_settings)
        running.on_signals(loop.stop, arguments)
        if arguments.once:
            failures = loop.once()
            print(json.dumps(metrics.to_json()))
            return 1 if failures else 0
        print("persist gc: running", file=sys.stderr, flush=True)
        loop.run()
        return 0
    finally:
        location.close()


__all__ = ["add_arguments", "run"]
