"""`persist gc`: delete blobs that no reader can need any more, and truncate the logs of shards.

With `--orphans` also delete what writers and workers that died have left: blobs that nothing names.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial

from compactor.cli import running
from compactor.figures import of_maintenance
from compactor.loop import Loop, LoopSettings
from compactor.metering import Metrics
from compactor.orphans import Sweeper, SweepReport, SweepSettings
from compactor.tasks import gc_task
from persist.cli import connection_args
from persist.cli.long_running import on_signals
from persist.commit.collector import Collector, GcSettings
from persist.commit.location import Location
from persist.core.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection_args.add_arguments(parser)
    running.add_arguments(parser)
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="shards at a time (default 4)")
    parser.add_argument("--delete-threads", type=int, default=8, metavar="N", help="deletions at a time (default 8)")
    parser.add_argument("--orphans", action="store_true", help="sweep blobs that nothing names, then end")
    parser.add_argument(
        "--orphan-age", type=float, default=24.0, metavar="H", help="hours after which they are swept (default 24)"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --orphans: only say what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    running.check_positive(arguments, "concurrency", "delete_threads", "orphan_age")
    if arguments.dry_run and not arguments.orphans:
        raise InvalidUsage("--dry-run is for --orphans")
    running.prepare(arguments)
    location = running.open_location(arguments)
    try:
        running.check_stores(location)
        metrics = Metrics()
        collector = Collector(location, GcSettings(delete_threads=arguments.delete_threads), metrics=metrics)
        patterns = tuple(arguments.shards or ("*",))
        if arguments.orphans:
            return _sweep(location, arguments, patterns, metrics)
        loop_settings = LoopSettings(patterns, arguments.concurrency, arguments.interval)
        loop = Loop(location, gc_task(location, collector), loop_settings)
        return running.run(loop, arguments, metrics, "gc", partial(of_maintenance, location, loop, metrics))
    finally:
        location.close()


def _sweep(location: Location, arguments: argparse.Namespace, patterns: tuple[str, ...], metrics: Metrics) -> int:
    """Sweep every shard once; a line for each that has orphans. Exit code 1 when a shard could not be swept."""
    settings = SweepSettings(int(arguments.orphan_age * 3600 * 1000), arguments.dry_run)
    settings.check()
    sweeper = Sweeper(location, settings, metrics=metrics)

    def task(name: str) -> None:
        _show(name, sweeper.sweep(name))

    loop = Loop(location, task, LoopSettings(patterns, arguments.concurrency))
    on_signals(loop.stop)
    with running.monitored(arguments, partial(of_maintenance, location, loop, metrics)):
        failures = loop.once()
        if patterns == ("*",):
            _show("", sweeper.sweep_unborn())
    print(json.dumps(metrics.to_json()))
    return 1 if failures else 0


def _show(name: str, report: SweepReport) -> None:
    if report.orphans:
        print(json.dumps({"shard": name or None, **asdict(report)}), flush=True)
