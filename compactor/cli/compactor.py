"""`persist compactor`: merge batches of shards in the background; with `--gc` also collect what that leaves."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from functools import partial

from blob import optional
from compactor.cli import running
from compactor.engine import Engine, EngineSettings, use_system_allocator
from compactor.erasure_steps import EraserSettings, erasure_task
from compactor.figures import of_maintenance
from compactor.loop import Loop, LoopSettings, in_turn
from compactor.metering import Metrics
from compactor.on_demand import through_server
from compactor.scrubber import Scrubber, ScrubSettings, samples_per_day
from compactor.tasks import Rounds, gc_task, history_task, merge_task, publish_task, retention_task
from compactor.worker import Worker, WorkerSettings, local_engine
from persist.cli import connection_args
from persist.cli.terminal import ProgressBar
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import Transport, is_same
from persist.commit.collector import Collector
from persist.commit.location import Location
from persist.commit.machine import CommitterOf
from persist.commit.publication_keeper import Published
from persist.commit.publication_writer import PublishSettings
from persist.copies.throttled_blob import read_rate
from persist.core.errors import InvalidUsage
from persist.core.merge_plan import MergePolicy

MIB = 1024 * 1024
PUBLISH_EVERY = "PERSIST_PUBLISH_EVERY"
VERIFY_SAMPLE = "PERSIST_VERIFY_SAMPLE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection_args.add_arguments(parser)
    running.add_arguments(parser)
    parser.add_argument("--gc", action="store_true", help="also delete what no reader can need any more")
    parser.add_argument("--concurrency", type=int, default=2, metavar="N", help="merges at a time (default 2)")
    parser.add_argument(
        "--memory", type=int, default=1024, metavar="MIB", help="memory for merges, all together (default 1024 MiB)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="key ranges of a large merge at a time (default 2)"
    )
    parser.add_argument("--part-size", type=int, default=128, metavar="MIB", help="target size of parts (default 128)")
    parser.add_argument(
        "--engine",
        choices=("local", "spark"),
        default="local",
        help="where merges run (default local; spark needs pyspark)",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="commit through this server of the same shards; its admin token goes in PERSIST_TOKEN",
    )
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for --url https://…")
    parser.add_argument(
        "--publish-every",
        type=int,
        metavar="S",
        help="least seconds between publications of the log in the blob store (default 5; 0: none)",
    )
    parser.add_argument(
        "--verify-sample",
        metavar="SHARE",
        help="once a day check so much of the parts, as persist check --deep does (default 1%%; 0: none)",
    )
    parser.add_argument(
        "--verify-rate", metavar="BYTES", default="8MiB", help="read at most so much a second for that (default 8MiB)"
    )
    parser.add_argument("--rate", type=float, metavar="MIB/S", help="bytes read and written a second, at most")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    scrub = _scrub_settings(arguments)
    running.prepare(arguments)
    use_system_allocator()
    location = running.open_location(arguments)
    transport: Transport | None = None
    try:
        running.check_stores(location)
        transport = _server(arguments, location)
        committer_of: CommitterOf = location.machine if transport is None else through_server(location, transport)
        settings = WorkerSettings(
            policy=MergePolicy().beside_writers(),
            engine=EngineSettings(
                memory_bytes=arguments.memory * MIB // arguments.concurrency,
                part_bytes_target=arguments.part_size * MIB,
                threads=arguments.threads,
                read_ahead=1,
            ),
            bytes_per_s=None if arguments.rate is None else max(1, int(arguments.rate * MIB)),
        )
        metrics, stop = Metrics(), threading.Event()
        engine = _engine(arguments, location, settings) or local_engine(location, settings, metrics)
        progress = ProgressBar(sys.stderr) if sys.stderr.isatty() else None

        def worker() -> Worker:
            return Worker(
                location, settings, engine=engine, metrics=metrics, progress=progress, committer_of=committer_of
            )

        merging = merge_task(location, worker, idle=True if arguments.once else None, ending=stop.is_set)
        keeping = retention_task(location, transport or EmbeddedTransport(location), metrics)
        tasks = [merging, history_task(location, committer_of), keeping]
        publish = _publish_settings(arguments)
        if arguments.gc:
            collector = Collector(location, metrics=metrics, committer_of=committer_of)
            erasing = EraserSettings(published_within_s=0.0 if publish is None else publish.within_s)
            tasks.append(erasure_task(location, collector, committer_of, erasing, stop.is_set))
            tasks.append(gc_task(location, collector, ending=stop.is_set))
        rounds: Rounds | None = None
        published: Published | None = None
        if publish is not None:
            published = Published(location, publish, at_once=arguments.once)
            rounds = Rounds(location, published)
            tasks.append(publish_task(location, published))
        patterns = tuple(arguments.shards or ("*",))
        loop_settings = LoopSettings(patterns, arguments.concurrency, arguments.interval)
        once = in_turn(tasks, stop.is_set)
        loop = Loop(location, once, loop_settings, per_shard=arguments.concurrency, stop=stop)
        scrubber = None if scrub is None else Scrubber(location, scrub, metrics, loop.names)
        try:
            if rounds is not None:
                rounds.once() if arguments.once else rounds.start()
            if scrubber is not None:
                scrubber.start()
            families = partial(of_maintenance, location, loop, metrics, transport)
            return running.run(loop, arguments, metrics, "compactor", families)
        finally:
            if scrubber is not None:
                scrubber.stop()
            if rounds is not None:
                rounds.stop()
            if published is not None:
                published.close()
    finally:
        if transport is not None:
            transport.close()
        location.close()


def _scrub_settings(arguments: argparse.Namespace) -> ScrubSettings | None:
    """The argument, else PERSIST_VERIFY_SAMPLE, which a server gives to its own maintenance, else the default.

    None: samples are switched off, or the process does only what is due now.
    """
    given: str | None = arguments.verify_sample
    text = os.environ.get(VERIFY_SAMPLE) if given is None else given
    of = ScrubSettings().of if text is None else samples_per_day(text)
    rate = read_rate(arguments.verify_rate, "--verify-rate")
    if of is None or rate is None:
        return None
    settings = ScrubSettings(of=of, rate=rate)
    settings.check()
    return None if arguments.once else settings


def _publish_settings(arguments: argparse.Namespace) -> PublishSettings | None:
    """The argument, else PERSIST_PUBLISH_EVERY, which a server gives to its own maintenance, else the default."""
    text = os.environ.get(PUBLISH_EVERY)
    given = arguments.publish_every
    if given is None and text is not None:
        if not text.isdecimal():
            raise InvalidUsage(f"the variable {PUBLISH_EVERY} is {text!r}; it must be a whole number")
        given = int(text)
    if given == 0:
        return None
    settings = PublishSettings() if given is None else PublishSettings(every_s=float(given))
    settings.check()
    return settings


def _server(arguments: argparse.Namespace, location: Location) -> Transport | None:
    """The server through which to commit, if one is given. Raises InvalidUsage if it serves other shards."""
    if arguments.url is None:
        return None
    transport = connection_args.connection_to(arguments.url, arguments.ca_file).transport()
    if not is_same(location.blob, transport.proof):
        transport.close()
        raise InvalidUsage(f"the server at {arguments.url} serves other shards than those at {location.blob.url}")
    return transport


def _engine(arguments: argparse.Namespace, location: Location, settings: WorkerSettings) -> Engine | None:
    """The Spark engine where it is asked for; None means that workers merge by themselves."""
    if arguments.engine == "local":
        return None
    if arguments.rate is not None:
        raise InvalidUsage("--rate holds merges in this process back; executors of --engine spark do not know it")
    if location.blob.url.startswith("mem:"):
        raise InvalidUsage("Spark executors cannot reach a blob store in memory")
    spark_engine = optional("compactor.spark_engine", "--engine spark", "persist-shards[spark]", InvalidUsage)
    found: Engine = spark_engine.SparkEngine(spark_engine.local_session(), location.blob, settings.engine)
    return found


def _check(arguments: argparse.Namespace) -> None:
    running.check_positive(arguments, "concurrency", "memory", "threads", "part_size", "rate")
