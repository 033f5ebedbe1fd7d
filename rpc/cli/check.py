"""`persist check [PATTERN]`: find faults of a location, their causes and remedies; with --repair, repair them.

Without --repair it writes nothing. It belongs to the service because it reads the tokens file.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any
from urllib.parse import urlencode

from persist.check import location_checks
from persist.check.check_runner import Report, decode_report, make_report, run_check
from persist.check.findings import AGES, FREE, CheckThresholds, read_limits
from persist.check.location_checks import BackupFacts, ExternalState, TokenFacts
from persist.cli.backup import backups_at
from persist.cli.connection_args import add_client_arguments, check_given, where_of
from persist.cli.inspect import FOUND, HEALTHY, exit_of, open_readonly, server_of, understood
from persist.cli.terminal import complain, print_line, texts_of
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.location import Location
from persist.copies.blob_repair import LEFT, PUT, REPLACED, put_anew, repair_blobs, replace_part
from persist.copies.shard_facts import NamedPart, all_parts
from persist.copies.throttled_blob import PacedBlob, read_rate
from persist.copies.verify import QUICK, Depth
from persist.core.batch import Part
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import PartId, check_shard_name, parse
from persist.core.record import asdict
from persist.core.state import State
from rpc.auth import read_tokens, tokens_for_check

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
    add_repair(parser)


def run(arguments: argparse.Namespace) -> int:
    """0: no findings. 1: there are findings. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        check_given(arguments, "backup", "tokens", "rate", "source", "excise", *LIMITS)
        check_repair(arguments)
        if arguments.repair:
            return repair(arguments)
        limits = {name: getattr(arguments, name) or "" for name in LIMITS}
        result = _check(arguments, limits, read_limits(**limits))
    except PersistError as error:
        complain("persist check", error.message, texts_of(arguments))
        return exit_of(error)
    if arguments.json:
        sys.stdout.write(result.text())
    else:
        for line in _lines(result):
            print_line(line)
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
        with closing(server), understood(server.url):
            server_report = decode_report(server.document(f"/v1/check?{query}".rstrip("?")))
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
    report: Report, backups: BackupFacts | None, tokens: list[TokenFacts] | None, now_ms: int, limits: CheckThresholds
) -> Report:
    """The report of a server, extended with the local findings."""
    findings = list(report.findings)
    if backups is not None:
        location_checks.check_location(backups, report.location.id)
        findings += location_checks.backups(backups, now_ms, limits)
    if tokens is not None:
        findings += location_checks.tokens(tokens, now_ms, limits)
    if len(findings) == len(report.findings):
        return report
    shards, left_out = report.shards, report.left_out
    return make_report(report.pattern, report.location, shards, findings, now_ms, left_out)


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


# `persist check NAME --repair`: replace damaged blobs by copies, or remove a damaged part.

SOURCES = ("source", "replace", "excise")


def add_repair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repair", action="store_true", help="repair the shard NAME; requires one of the next three")
    parser.add_argument("--from", dest="source", metavar="URL", help="restore damaged blobs from a store of backups")
    parser.add_argument("--replace", nargs=2, metavar=("PART", "FILE"), help="replace PART by FILE, a copy of it")
    parser.add_argument("--excise", metavar="PART", help="remove this part: its rows are lost")
    parser.add_argument("--yes", action="store_true", help="repair; without it, only print what would be done")


def check_repair(arguments: argparse.Namespace) -> None:
    """Raise InvalidUsage if the arguments of a repair contradict each other."""
    sources = [name for name in SOURCES if getattr(arguments, name) is not None]
    if not arguments.repair:
        if sources or arguments.yes:
            raise InvalidUsage("--from, --replace, --excise and --yes require --repair")
        return
    if len(sources) != 1:
        raise InvalidUsage("--repair takes one of --from URL, --replace PART FILE and --excise PART")
    if arguments.quick or arguments.deep or arguments.url is not None:
        raise InvalidUsage("--repair opens the stores, and has no depth: leave out --quick, --deep and --url")
    check_shard_name(arguments.name)


def repair(arguments: argparse.Namespace) -> int:
    """0: everything is repaired. 1: faults are left, or without --yes there is something to do."""
    with closing(where_of(arguments).open(must_exist=True)) as location:
        name = check_shard_name(arguments.name)
        if arguments.source is not None:
            return _put_back(location, name, arguments.source, arguments.yes)
        state = location.machine(name).refresh()
        part_id, file = arguments.replace or (arguments.excise, None)
        located = _find_part(location, state, parse(PartId, part_id))
        replacement = None if file is None else _read_replacement(located.part, Path(file))
        if not arguments.yes:
            what = f"replace part {part_id} of shard {name!r} by {file}"
            if replacement is None:
                what = f"remove {located.part.rows} rows from shard {name!r} permanently"
            print_line(f"would {what}; give --yes to do it")
            if replacement is None:
                print(json.dumps(_part_json(located)))
            return FOUND
        # The removed part is printed, as a receipt to keep. One in a bundle is removed from the bundle, and a later
        # commit bundles the other parts again.
        part = None if replacement is None else put_anew(location, state, located.part, replacement)
        location.machine(name).apply(replace_part(located, part))
        key = None if part is None else part.key
        print(json.dumps({"shard": name, "taken_out": _part_json(located), "in_its_place": key}))
        return 0


def _put_back(location: Location, name: str, source: str, confirmed: bool) -> int:
    """Print the result for each fault, then their number."""
    counts = dict.fromkeys((PUT, REPLACED, LEFT), 0)
    with backups_at(source) as store:
        for result in repair_blobs(location, name, store, dry_run=not confirmed):
            counts[result.done] += 1
            line = {"shard": name, "what": result.fault.what, "key": result.fault.key or "inline", "done": result.done}
            print(json.dumps({**line, "by": result.by or None, "why": result.why or None}))
    print(json.dumps({"shard": name, **counts, "dry_run": not confirmed}))
    would = not confirmed and counts[PUT] + counts[REPLACED]
    return FOUND if counts[LEFT] or would else 0


def _read_replacement(part: Part, file: Path) -> bytes:
    """Read a copy of the blob of a part. Raises InvalidUsage: it is not one."""
    if part.is_inline:
        raise InvalidUsage(f"part {part.id} is stored inline in the State: it has no file")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidUsage(f"{file} cannot be read: {error.strerror}") from error
    if (len(data), zlib.crc32(data)) != (part.blob_size, part.checksum):
        size = part.blob_size
        raise InvalidUsage(f"{file} is not a copy of part {part.id}, which has {size} bytes and another checksum")
    return data


def _find_part(location: Location, state: State, part_id: PartId) -> NamedPart:
    for located in all_parts(state, location.blob):
        if located.part.id == part_id:
            return located
    raise InvalidUsage(
        f"shard {state.name!r} has no part {part_id}; `persist check {state.name} --deep` lists damaged ones"
    )


def _part_json(located: NamedPart) -> dict[str, Any]:
    """The description of a part in the State as JSON; bytes are base64."""
    fields = {
        k: b64encode(v).decode() if isinstance(v, bytes) else v
        for k, v in asdict(located.part).items()
        if k not in ("receipt", "bundle")
    }
    return {**fields, "interval": [located.desc.lower.to_json(), located.desc.upper.to_json()]}
