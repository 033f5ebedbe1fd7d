"""`persist check [PATTERN]`: find faults of a location, their causes and remedies; with --repair, repair them.

Without --repair it writes nothing. It belongs to the service because it reads the tokens file.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from textwrap import wrap
from types import FrameType
from urllib.parse import urlencode

from persist.check import location_checks
from persist.check.check_runner import Report, decode_report, make_report, run_check
from persist.check.findings import AGES, FREE, CheckThresholds, read_limits
from persist.check.location_checks import BackupFacts, ExternalState, TokenFacts
from persist.cli import repair
from persist.cli.connection_args import add_client_arguments, check_given
from persist.cli.inspect import FOUND, HEALTHY, exit_of, open_readonly, server_of
from persist.cli.inspect_client import understood
from persist.cli.terminal import complain, plain, texts_of
from persist.commit.clocks_and_ids import SystemClock
from persist.copies.throttled_blob import PacedBlob, read_rate
from persist.copies.verify import QUICK, Depth
from persist.core.errors import InvalidUsage, PersistError
from rpc.auth import read_tokens, tokens_for_check

SERVER_S = 600.0  # for a server to check all shards
LINE_CHARS = 100
LIMITS = (*AGES, "free")
LOCAL_LIMITS = ("backup_age",)  # not known to a server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; by default all shards")
    add_client_arguments(parser)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="read only rollups and bundles, as --url does")
    depth.add_argument("--deep", action="store_true", help="read every byte, decode every row")
    parser.add_argument("--rate", metavar="BYTES", help="with --deep: the maximum bytes per second, such as 50MiB")
    parser.add_argument("--backup", metavar="URL", help="a store of backups, to check the age of the newest one")
    parser.add_argument("--tokens", metavar="FILE", help="a tokens file, to find tokens that expire soon")
    for name, what in AGES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="AGE", help=what)
    parser.add_argument("--free", metavar="PERCENT", help=FREE)
    parser.add_argument("--json", action="store_true", help="print JSON; docs/check.md has its schema")
    repair.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """0: no findings. 1: there are findings. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        check_given(arguments, "backup", "tokens", "rate", "source", "excise", *LIMITS)
        repair.check_arguments(arguments)
        if arguments.repair:
            return repair.repair(arguments)
        limits = {name: getattr(arguments, name) or "" for name in LIMITS}
        result = _check(arguments, limits, read_limits(**limits))
    except PersistError as error:
        complain("persist check", error.message, texts_of(arguments))
        return exit_of(error)
    if arguments.json:
        sys.stdout.write(result.text())
    else:
        for line in _lines(result):
            print(plain(line))
    return FOUND if result.findings else HEALTHY


def _check(arguments: argparse.Namespace, limits: dict[str, str], thresholds: CheckThresholds) -> Report:
    wanted = Depth(arguments.deep, read_rate(arguments.rate))
    wanted.check()
    clock = SystemClock()
    backups = None if arguments.backup is None else location_checks.list_backups(arguments.backup, clock)
    tokens = None if arguments.tokens is None else tokens_for_check(read_tokens(arguments.tokens))
    server = server_of(arguments)
    if server is not None:
        if arguments.deep:
            raise InvalidUsage("--deep reads the stores directly: give --dir, or --blob and --consensus")
        parameters = {"pattern": arguments.name, **limits}
        query = urlencode({name: value for name, value in parameters.items() if value and name not in LOCAL_LIMITS})
        with understood(server.url):
            server_report = decode_report(server.document(f"/v1/check?{query}".rstrip("?"), SERVER_S))
        return _extended(server_report, backups, tokens, clock.now_ms(), thresholds)
    with closing(open_readonly(arguments)) as look, _stop_at_interrupt() as stop:
        read = PacedBlob(look.blob, wanted.rate, look.clock, stop)
        depth = QUICK if arguments.quick else Depth(wanted.deep)
        return run_check(look, arguments.name or None, thresholds, ExternalState(backups, tokens), depth, read)


@contextmanager
def _stop_at_interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that threads that read, or wait for the rate, end before the command does."""
    stop, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        signal.signal(signal.SIGINT, end)
    try:
        yield stop
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _extended(
    server_report: Report,
    backups: BackupFacts | None,
    tokens: list[TokenFacts] | None,
    now_ms: int,
    thresholds: CheckThresholds,
) -> Report:
    """The report of a server, extended with the local findings."""
    findings = list(server_report.findings)
    if backups is not None:
        location_checks.check_location(backups, server_report.location.id)
        findings += location_checks.backups(backups, now_ms, thresholds)
    if tokens is not None:
        findings += location_checks.tokens(tokens, now_ms, thresholds)
    if len(findings) == len(server_report.findings):
        return server_report
    shards, left_out = server_report.shards, server_report.left_out
    return make_report(server_report.pattern, server_report.location, shards, findings, now_ms, left_out)


def _wrapped(text: str) -> list[str]:
    """Wrapped lines; keys and names are not broken."""
    return wrap(text, LINE_CHARS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _lines(result: Report) -> Iterator[str]:
    """A paragraph for each finding."""
    for finding in result.findings:
        shard = "" if finding.shard is None else f" {finding.shard}"
        yield from _wrapped(f"{finding.severity.upper()} {finding.id}{shard}: {finding.what}.")
        yield from _wrapped(f"  cause: {finding.cause}.")
        yield from _wrapped(f"  remedy: {finding.remedy}.")
        if finding.command is not None:
            yield f"  command: {finding.command}"
        yield f"  more: {finding.page}"
        yield ""
    checked = f"{result.shards:,} shard{'' if result.shards == 1 else 's'} checked"
    count = len(result.findings) + result.left_out
    yield f"{checked}, no findings" if not count else f"{checked}, {count:,} finding{'' if count == 1 else 's'}"
    if result.left_out:
        yield f"{result.left_out:,} of them, the least severe, are not shown"
