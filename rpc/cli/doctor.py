"""`persist doctor [PATTERN]`: what is wrong, why, and what to do about it, by itself or through a server.

It writes nothing. It lives beside the service because the service knows what a file of tokens is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from textwrap import wrap
from urllib.parse import urlencode

from persist.cli.inspect import FOUND, HEALTHY, exit_of, look_of, server_of
from persist.cli.inspect_far import understood
from persist.cli.screen import complain, plain, texts_of
from persist.cli.where import add_client_arguments, check_given
from persist.commit.system import SystemClock
from persist.core.errors import PersistError
from persist.doctor import beside
from persist.doctor.beside import BackupsSeen, Beside, TokenSeen
from persist.doctor.examining import Report, examined, report, report_of
from persist.doctor.limits import AGES, FREE, Limits, read_limits
from rpc.auth import read_ending
from rpc.ending_tokens import tokens_seen

SERVER_S = 600.0  # that a server may take to look at all shards
LINE_CHARS = 100
LIMITS = (*AGES, "free")
OF_HERE = ("backup_age",)  # of these a server knows nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; without it all")
    add_client_arguments(parser)
    parser.add_argument("--backup", metavar="URL", help="where backups lie, to tell whether the newest one is old")
    parser.add_argument("--tokens", metavar="FILE", help="a file of tokens, to tell which of them end soon")
    for name, what in AGES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="AGE", help=what)
    parser.add_argument("--free", metavar="PERCENT", help=FREE)
    parser.add_argument("--json", action="store_true", help="print JSON; docs/doctor.md has its schema")


def run(arguments: argparse.Namespace) -> int:
    """0: nothing is wrong. 1: there are findings. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        check_given(arguments, "backup", "tokens", *LIMITS)
        given = {name: getattr(arguments, name) or "" for name in LIMITS}
        found = _asked(arguments, given, read_limits(**given))
    except PersistError as error:
        complain("persist doctor", error.message, texts_of(arguments))
        return exit_of(error)
    if arguments.json:
        sys.stdout.write(found.text())
    else:
        for line in _lines(found):
            print(plain(line))
    return FOUND if found.findings else HEALTHY


def _asked(arguments: argparse.Namespace, given: dict[str, str], limits: Limits) -> Report:
    clock = SystemClock()
    backups = None if arguments.backup is None else beside.look_at_backups(arguments.backup, clock)
    tokens = None if arguments.tokens is None else tokens_seen(read_ending(arguments.tokens))
    server = server_of(arguments)
    if server is None:
        with closing(look_of(arguments)) as look:
            return examined(look, arguments.name or None, limits, Beside(backups, tokens))
    asked = {"pattern": arguments.name, **given}
    query = urlencode({name: value for name, value in asked.items() if value and name not in OF_HERE})
    path = f"/v1/doctor?{query}" if query else "/v1/doctor"
    with understood(server.url):
        told = report_of(server.document(path, SERVER_S))
    return _with(told, backups, tokens, clock.now_ms(), limits)


def _with(
    told: Report, backups: BackupsSeen | None, tokens: list[TokenSeen] | None, now_ms: int, limits: Limits
) -> Report:
    """The report of a server, with what is seen from here."""
    more = list(told.findings)
    if backups is not None:
        beside.check_location(backups, told.location.id)
        more += beside.backups(backups, now_ms, limits)
    if tokens is not None:
        more += beside.tokens(tokens, now_ms, limits)
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
