"""`persist maintain run|gc|sweep`: merge batches and delete garbage in the background.

`run` performs all maintenance: merges, history, retention, erasures, publications, and garbage collection. `gc` only
collects garbage. `sweep` deletes orphans: blobs of writers and workers that died before their commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial

from blob import optional
from compactor.engine import Engine, EngineSettings, use_system_allocator
from compactor.loop import Loop, in_turn
from compactor.metering import MaintenanceMetrics
from compactor.monitor import Monitor, of_maintenance
from compactor.orphans import Sweeper, SweepReport, SweepSettings
from compactor.scrubber import SAMPLES, Scrubber, check_sample, samples_per_day
from compactor.tasks import Eraser, PublicationRounds, gc_task, history_task, merge_task, publish_task, retention_task
from compactor.worker import Worker, WorkerSettings, local_engine, through_server
from persist.cli import connection_args
from persist.cli.connection_args import add_subcommand, read_age_ms, read_size
from persist.cli.long_running import announce, configure_logs, end_with_parent, on_signals
from persist.cli.terminal import ProgressBar
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import Transport, is_same
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.committer import CommitterOf
from persist.commit.location import Location, LocationSettings
from persist.copies.throttled_blob import read_rate
from persist.core.errors import InvalidUsage
from persist.core.merge_plan import MergePolicy
from persist.formats.exposition import Family, exposition
from persist.maintenance.collector import Collector
from persist.maintenance.journal_keeper import Published
from persist.maintenance.journal_writer import PublishSettings
from persist.regions.failover import HomeWatch
from persist.regions.region_index import check_region, open_index

PUBLISH_EVERY = "PERSIST_PUBLISH_EVERY"
VERIFY_SAMPLE = "PERSIST_VERIFY_SAMPLE"
NUMBER_MAX = 2**31  # of any number among the arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="SUBCOMMAND")
    running = add_subcommand(commands, "run", "run all maintenance", _run)
    _add_common(running)
    _add_loop(running, 2)
    _add_run(running)
    collecting = add_subcommand(commands, "gc", "only collect garbage", _gc)
    _add_common(collecting)
    _add_loop(collecting, 4)
    sweeping = add_subcommand(commands, "sweep", "delete orphaned blobs once, then exit", _sweep)
    _add_common(sweeping)
    sweeping.add_argument("--age", default="24h", metavar="AGE", help="the least age of orphans (default 24h)")
    sweeping.add_argument("--concurrency", type=int, default=4, metavar="N", help="visits at a time (default 4)")
    sweeping.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _add_common(parser: argparse.ArgumentParser) -> None:
    connection_args.add_arguments(parser)
    parser.add_argument("--shards", action="append", metavar="PATTERN", help="only shards like 'orders-*' (repeatable)")
    parser.add_argument("--nice", type=int, default=0, metavar="N", help="lower this process's priority by N")
    parser.add_argument("--end-with-parent", type=int, metavar="PID", help="exit when the parent process PID ends")
    parser.add_argument("--region", metavar="NAME", help="with --index: the region of this home")
    parser.add_argument("--index", metavar="FILE", help="the region index (a file or server), which names the home")
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="port of /metrics and /healthz (0: any free)")
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="HOST", help="at this address (127.0.0.1); no authentication"
    )
    parser.add_argument("--verbose", action="store_true", help="log every piece of work")


def _add_loop(parser: argparse.ArgumentParser, concurrency: int) -> None:
    parser.add_argument("--once", action="store_true", help="do what is due now, then exit")
    parser.add_argument(
        "--concurrency", type=int, default=concurrency, metavar="N", help=f"visits at a time (default {concurrency})"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-gc", dest="gc", action="store_false", help="delete no blobs, so erasures do not complete")
    parser.add_argument("--memory", default="1GiB", metavar="SIZE", help="memory for all merges together (1GiB)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="key ranges merged at a time (default 2)")
    parser.add_argument("--part-size", default="128MiB", metavar="SIZE", help="target size of parts (128MiB)")
    parser.add_argument(
        "--engine", choices=("local", "spark"), default="local", help="where merges run (local; spark needs pyspark)"
    )
    parser.add_argument("--url", metavar="URL", help="commit through this server; PERSIST_TOKEN: of the scope maintain")
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of trusted CAs, for --url https://…")
    parser.add_argument("--publish-every", metavar="AGE", help="least time between log publications (5s; none: never)")
    parser.add_argument("--verify-sample", metavar="SHARE", help="share of parts to check daily (default 1%%; 0: none)")
    parser.add_argument("--verify-rate", metavar="BYTES", default="8MiB", help="read at most this per second (8MiB)")
    parser.add_argument("--rate", metavar="BYTES", help="the most bytes per second to read and write, such as 50MiB")


def _run(arguments: argparse.Namespace) -> int:
    _check_positive(arguments, "concurrency", "threads")
    memory = read_size("--memory", arguments.memory)
    part_size = read_size("--part-size", arguments.part_size)
    rate = read_rate(arguments.rate)
    scrub, publish = _sample(arguments), _publish_settings(arguments)
    _prepare(arguments)
    use_system_allocator()
    settings = WorkerSettings(
        policy=MergePolicy().beside_writers(),
        engine=EngineSettings(
            memory_bytes=memory // arguments.concurrency, part_bytes_target=part_size, threads=arguments.threads
        ),
    )
    with ExitStack() as opened:
        location = opened.enter_context(closing(_open_location(arguments)))
        _check_stores(location)
        transport = _server(arguments, location)
        if transport is not None:
            opened.callback(transport.close)
        committer_of: CommitterOf = location.machine if transport is None else through_server(location, transport)
        metrics, stop = MaintenanceMetrics(), threading.Event()
        engine = _engine(arguments, location, settings) or local_engine(location, settings.engine, metrics, rate)
        progress = ProgressBar(sys.stderr)
        worker = partial(
            Worker, location, settings, engine=engine, metrics=metrics, progress=progress, committer_of=committer_of
        )
        merging = merge_task(location, worker, idle=True if arguments.once else None, ending=stop.is_set)
        keeping = retention_task(location, transport or EmbeddedTransport(location), metrics)
        tasks = [merging, history_task(location, committer_of), keeping]
        if arguments.gc:
            collector = Collector(location, count=metrics.add, committer_of=committer_of)
            within_s = 0.0 if publish is None else publish.within_s
            eraser = Eraser(
                location, collector, published_within_s=within_s, committer_of=committer_of, ending=stop.is_set
            )
            tasks += [eraser.run, gc_task(location, collector, ending=stop.is_set)]
        rounds: PublicationRounds | None = None
        if publish is not None:
            published = Published(location, publish, at_once=arguments.once)
            opened.callback(published.close)
            rounds = PublicationRounds(location, published)
            opened.callback(rounds.stop)
            tasks.append(publish_task(location, published))
        loop = Loop(
            location,
            in_turn(tasks, stop.is_set),
            patterns=_patterns(arguments),
            concurrency=arguments.concurrency,
            per_shard=arguments.concurrency,
            stop=stop,
        )
        if rounds is not None:
            rounds.once() if arguments.once else rounds.start()
        if scrub is not None:
            scrubber = Scrubber(location, metrics, loop.names, of=scrub[0], rate=scrub[1])
            opened.callback(scrubber.stop)
            scrubber.start()
        return _work(loop, arguments, metrics, partial(of_maintenance, location, loop, metrics, transport))


def _sample(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """The number of samples and the rate: the argument, PERSIST_VERIFY_SAMPLE (set by servers), or the default.

    None: samples are switched off, or the process runs once.
    """
    argument: str | None = arguments.verify_sample
    text = os.environ.get(VERIFY_SAMPLE) if argument is None else argument
    of = SAMPLES if text is None else samples_per_day(text)
    rate = read_rate(arguments.verify_rate, "--verify-rate")
    if of is None or rate is None:
        return None
    check_sample(of, rate)
    return None if arguments.once else (of, rate)


def _publish_settings(arguments: argparse.Namespace) -> PublishSettings | None:
    """From the argument, PERSIST_PUBLISH_EVERY (set by servers), or the default. None: no publications."""
    text = os.environ.get(PUBLISH_EVERY)
    every_ms = None if arguments.publish_every is None else read_age_ms("--publish-every", arguments.publish_every)
    if every_ms is None and text is not None:
        if not text.isdecimal():
            raise InvalidUsage(f"the variable {PUBLISH_EVERY} is {text!r}; it must be a whole number")
        every_ms = int(text) * 1000
    if every_ms == 0:
        return None
    settings = PublishSettings() if every_ms is None else PublishSettings(every_s=every_ms / 1000)
    settings.check()
    return settings


def _server(arguments: argparse.Namespace, location: Location) -> Transport | None:
    """The server through which to commit, if any. Raises InvalidUsage if it serves another location."""
    if arguments.url is None:
        return None
    transport = connection_args.connection_to(arguments.url, arguments.ca_file).transport()
    if not is_same(location.blob, transport.proof):
        transport.close()
        raise InvalidUsage(f"the server at {arguments.url} serves other shards than those at {location.blob.url}")
    return transport


def _engine(arguments: argparse.Namespace, location: Location, settings: WorkerSettings) -> Engine | None:
    """The Spark engine if requested; None: merges run in this process."""
    if arguments.engine == "local":
        return None
    if arguments.rate is not None:
        raise InvalidUsage("--rate limits only merges in this process; it cannot be combined with --engine spark")
    if location.blob.url.startswith("mem:"):
        raise InvalidUsage("Spark executors cannot reach a blob store in memory")
    spark_engine = optional("compactor.spark_engine", "--engine spark", "persist-shards[spark]", InvalidUsage)
    engine: Engine = spark_engine.SparkEngine(spark_engine.local_session(), location.blob, settings.engine)
    return engine


def _gc(arguments: argparse.Namespace) -> int:
    _check_positive(arguments, "concurrency")
    _prepare(arguments)
    with closing(_open_location(arguments)) as location:
        _check_stores(location)
        metrics = MaintenanceMetrics()
        collector = Collector(location, count=metrics.add)
        task, concurrency = gc_task(location, collector), arguments.concurrency
        loop = Loop(location, task, patterns=_patterns(arguments), concurrency=concurrency)
        return _work(loop, arguments, metrics, partial(of_maintenance, location, loop, metrics))


def _sweep(arguments: argparse.Namespace) -> int:
    """Print a line for each shard that has orphans. Exit code 1 if a shard could not be swept."""
    _check_positive(arguments, "concurrency")
    settings = SweepSettings(read_age_ms("--age", arguments.age), arguments.dry_run)
    settings.check()
    _prepare(arguments)
    with closing(_open_location(arguments)) as location:
        _check_stores(location)
        metrics, patterns = MaintenanceMetrics(), _patterns(arguments)
        sweeper = Sweeper(location, settings, metrics=metrics)

        def task(name: str) -> None:
            _print_report(name, sweeper.sweep(name))

        loop = Loop(location, task, patterns=patterns, concurrency=arguments.concurrency)
        on_signals(loop.stop)
        with _monitored(arguments, partial(of_maintenance, location, loop, metrics)):
            failures = loop.once()
            if patterns == ("*",):
                _print_report("", sweeper.sweep_unborn())
        print(json.dumps(metrics.to_json()))
        return 1 if failures else 0


def _print_report(name: str, report: SweepReport) -> None:
    if report.orphans:
        print(json.dumps({"shard": name or None, **asdict(report)}), flush=True)


def _prepare(arguments: argparse.Namespace) -> None:
    """Apply the arguments for the parent process, the priority and the logs. Called first."""
    if arguments.end_with_parent is not None:
        end_with_parent(arguments.end_with_parent)
    if arguments.metrics_port is not None and not 0 <= arguments.metrics_port < 65536:
        raise InvalidUsage(f"--metrics-port is {arguments.metrics_port}; it must be in [0, 65535]")
    try:
        os.nice(arguments.nice)
    except (OSError, OverflowError) as error:
        raise InvalidUsage(f"--nice {arguments.nice} is not possible: {error}") from error
    configure_logs("info" if arguments.verbose else "warning")


def _open_location(arguments: argparse.Namespace) -> Location:
    """The location, without small merges after commits, which only writers do."""
    settings = LocationSettings(small_merges=False, metered=True, shows_no_copy=True)
    connection_args.check_given(arguments, "region", "index")
    region, index = check_region(arguments.region) if arguments.region else "", arguments.index
    if index and not region:
        raise InvalidUsage("--index needs --region: the region that this is home of")
    trust = connection_args.trust_in(getattr(arguments, "ca_file", None))
    region_index = open_index(index, os.environ.get("PERSIST_INDEX_TOKEN"), SystemClock(), trust) if index else None
    location = connection_args.where_of(arguments).open(settings, must_exist=True)
    if region_index is not None:  # nothing is committed or deleted after a failover to another home
        HomeWatch(location.identity, region, region_index)
    return location


def _check_stores(location: Location) -> None:
    """Probe the stores. A store that is read-only because its disk is full is logged: deletions continue."""
    for unwritable in location.check():
        announce("a store cannot be written: deletions continue", why=unwritable)


def _check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidUsage unless these arguments are more than 0 and at most NUMBER_MAX."""
    for name in names:
        value = getattr(arguments, name)
        if not 0 < value <= NUMBER_MAX:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidUsage(f"{flag} is {value}; it must be more than 0 and at most {NUMBER_MAX}")


@contextmanager
def _monitored(arguments: argparse.Namespace, families: Callable[[], Iterator[Family]]) -> Iterator[None]:
    """Serve metrics during the `with` if the arguments name a port. The URL is logged."""
    if arguments.metrics_port is None:
        yield
        return
    monitor = Monitor(arguments.metrics_host, arguments.metrics_port, lambda: exposition(families()))
    announce("metrics", url=f"{monitor.url}/metrics")
    try:
        yield
    finally:
        monitor.close()


def _work(
    loop: Loop, arguments: argparse.Namespace, metrics: MaintenanceMetrics, families: Callable[[], Iterator[Family]]
) -> int:
    """Run until a signal, or once over every shard, and print the counters. Returns the exit code."""
    on_signals(loop.stop)
    with _monitored(arguments, families):
        if not arguments.once:
            announce("running", command=arguments.action)
            loop.run()
            announce("ended", command=arguments.action, **metrics.to_json())
            return 0
        failures = loop.once()
        print(json.dumps(metrics.to_json()))
        return 1 if failures else 0


def _patterns(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(arguments.shards or ("*",))
