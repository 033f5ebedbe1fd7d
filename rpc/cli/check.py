"""`persist check [PATTERN]`: what is wrong with a location, why, and what to do about it; with --repair it repairs.

Without --repair it writes nothing. It is beside the service because it reads the service's file of tokens.
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
from persist.check.check_runner import Report, examined, report, report_of
from persist.check.findings import AGES, FREE, CheckThresholds, read_limits
from persist.check.location_checks import BackupsSeen, Beside, TokenSeen
from persist.cli import repair
from persist.cli.connection_args import add_client_arguments, check_given
from persist.cli.inspect import FOUND, HEALTHY, exit_of, look_of, server_of
from persist.cli.inspect_client import Server, understood
from persist.cli.terminal import complain, plain, texts_of
from persist.commit.system import SystemClock
from persist.copies.throttled_blob import PacedBlob, read_rate
from persist.copies.verify import QUICK, Depth
from persist.core.errors import InvalidUsage, PersistError
from rpc.auth import read_ending, tokens_seen

SERVER_S = 600.0  # that a server may take to check all shards
LINE_CHARS = 100
LIMITS = (*AGES, "free")
OF_HERE = ("backup_age",)  # of these a server knows nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; without it all")
    add_client_arguments(parser)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="read rollups and bundles alone, as --url does")
    depth.add_argument("--deep", action="store_true", help="read every byte, decode every row")
    parser.add_argument("--rate", metavar="BYTES", help="with --deep: at most so many bytes a second, such as 50MiB")
    parser.add_argument("--backup", metavar="URL", help="a store of backups, to find whether the newest one is old")
    parser.add_argument("--tokens", metavar="FILE", help="a file of tokens, to find which of them end soon")
    for name, what in AGES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="AGE", help=what)
    parser.add_argument("--free", metavar="PERCENT", help=FREE)
    parser.add_argument("--json", action="store_true", help="print JSON; docs/check.md has its schema")
    repair.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """0: nothing is wrong. 1: there are findings. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        check_given(arguments, "backup", "tokens", "rate", "source", "excise", *LIMITS)
        repair.check_arguments(arguments)
        if arguments.repair:
            return repair.repair(arguments)
        given = {name: getattr(arguments, name) or "" for name in LIMITS}
        found = _checked(arguments, given, read_limits(**given))
    except PersistError as error:
        complain("persist check", error.message, texts_of(arguments))
        return exit_of(error)
    if arguments.json:
        sys.stdout.write(found.text())
    else:
        for line in _lines(found):
            print(plain(line))
    return FOUND if found.findings else HEALTHY


def _checked(arguments: argparse.Namespace, given: dict[str, str], limits: CheckThresholds) -> Report:
    how = Depth(arguments.deep, read_rate(arguments.rate))
    how.check()
    clock = SystemClock()
    backups = None if arguments.backup is None else location_checks.look_at_backups(arguments.backup, clock)
    tokens = None if arguments.tokens is None else tokens_seen(read_ending(arguments.tokens))
    server = server_of(arguments)
    if server is not None:
        if arguments.deep:
            raise InvalidUsage("--deep reads the stores themselves: give --dir, or --blob and --consensus")
        return _with(_of_server(server, {"pattern": arguments.name, **given}), backups, tokens, clock.now_ms(), limits)
    with closing(look_of(arguments)) as look, _ending() as stop:
        read = PacedBlob(look.blob, how.rate, look.clock, stop)
        depth = QUICK if arguments.quick else Depth(how.deep)
        return examined(look, arguments.name or None, limits, Beside(backups, tokens), depth, read)


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Set by ctrl-C: threads that read, or wait for the rate, then end, and so does the command."""
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


def _of_server(server: Server, asked: dict[str, str]) -> Report:
    query = urlencode({name: value for name, value in asked.items() if value and name not in OF_HERE})
    path = f"/v1/check?{query}" if query else "/v1/check"
    with understood(server.url):
        return report_of(server.document(path, SERVER_S))


def _with(
    told: Report, backups: BackupsSeen | None, tokens: list[TokenSeen] | None, now_ms: int, limits: CheckThresholds
) -> Report:
    """The report of a server, with what is seen from here."""
    more = list(told.findings)
    if backups is not None:
        location_checks.check_location(backups, told.location.id)
        more += location_checks.backups(backups, now_ms, limits)
    if tokens is not None:
        more += location_checks.tokens(tokens, now_ms, limits)
    if len(more) == len(told.findings):
        return told
    return report(told.pattern, told.location, told.shards, more, now_ms, told.left_out)


def _wrapped(text: str) -> list[str]:
    """In lines of a good length; a key or a name is never broken."""
    return wrap(text, LINE_CHARS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _lines(found: Report) -> Iterator[str]:
    """For people: a paragraph for each finding."""
    for one in found.findings:
        where = "" if one.shard is None else f" {one.shard}"
        yield from _wrapped(f"{one.severity.upper()} {one.id}{where}: {one.what}.")
        yield from _wrapped(f"  cause: {one.cause}.")
        yield from _wrapped(f"  remedy: {one.remedy}.")
        if one.command is not None:
            yield f"  command: {one.command}"
        yield f"  more: {one.page}"
        yield ""
    looked = f"{found.shards:,} shard{'' if found.shards == 1 else 's'} looked at"
    count = len(found.findings) + found.left_out
    yield f"{looked}, nothing is wrong" if not count else f"{looked}, {count:,} finding{'' if count == 1 else 's'}"
    if found.left_out:
        yield f"{found.left_out:,} of them are not shown: the others come first"
