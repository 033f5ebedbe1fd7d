"""`persist check NAME --repair`: puts copies in the place of what is damaged, or takes a part out."""

from __future__ import annotations

import argparse
import json
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

from persist.cli.backup import backups_at
from persist.cli.connection_args import where_of
from persist.commit.location import Location
from persist.copies.blob_repair import LEFT, PUT, REPLACED, mended, put_anew, replace_part
from persist.copies.shard_facts import NamedPart, all_parts
from persist.core import commands as c
from persist.core.batch import Part
from persist.core.errors import InvalidUsage
from persist.core.ids import PartId, check_shard_name, parse
from persist.core.record import asdict
from persist.core.state import State

EXIT_FOUND = 1
SOURCES = ("source", "replace", "excise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --repair, and what it takes."""
    parser.add_argument("--repair", action="store_true", help="repair the shard NAME, by one of the next three")
    parser.add_argument("--from", dest="source", metavar="URL", help="put back all that a store of backups has")
    parser.add_argument("--replace", nargs=2, metavar=("PART", "FILE"), help="replace PART by FILE, a copy of it")
    parser.add_argument("--excise", metavar="PART", help="take this part out: its rows are lost")
    parser.add_argument("--yes", action="store_true", help="repair; without it, only print what would be done")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises InvalidUsage where the arguments of a repair do not fit together."""
    given = [name for name in SOURCES if getattr(arguments, name) is not None]
    if not arguments.repair:
        if given or arguments.yes:
            raise InvalidUsage("--from, --replace, --excise and --yes are for --repair")
        return
    if len(given) != 1:
        raise InvalidUsage("--repair takes one of --from URL, --replace PART FILE and --excise PART")
    if arguments.quick or arguments.deep or arguments.url is not None:
        raise InvalidUsage("--repair opens the stores, and has no depth: leave out --quick, --deep and --url")
    check_shard_name(arguments.name)


def repair(arguments: argparse.Namespace) -> int:
    """0: everything can be read, or what was asked is done. 1: something is left, or would be done."""
    location = where_of(arguments).open(must_exist=True)
    try:
        name = check_shard_name(arguments.name)
        if arguments.source is not None:
            return _mend(location, name, arguments.source, arguments.yes)
        if arguments.excise is not None:
            return _excise(location, name, parse(PartId, arguments.excise), arguments.yes)
        part_id, file = arguments.replace
        return _replace(location, name, parse(PartId, part_id), Path(file), arguments.yes)
    finally:
        location.close()


def _mend(location: Location, name: str, source: str, is_meant: bool) -> int:
    """Print what becomes of each fault, or would; then their number."""
    counts = dict.fromkeys((PUT, REPLACED, LEFT), 0)
    with backups_at(source) as store:
        for found in mended(location, name, store, dry_run=not is_meant):
            counts[found.done] += 1
            told = {"shard": name, "what": found.fault.what, "key": found.fault.key or "inline", "done": found.done}
            print(json.dumps({**told, "by": found.by or None, "why": found.why or None}))
    print(json.dumps({"shard": name, **counts, "dry_run": not is_meant}))
    would = not is_meant and counts[PUT] + counts[REPLACED]
    return EXIT_FOUND if counts[LEFT] or would else 0


def _excise(location: Location, name: str, part_id: PartId, is_meant: bool) -> int:
    state = location.machine(name).refresh()
    named = _named(location, state, part_id)
    part = named.part
    if not is_meant:
        print(f"would take {part.rows} rows out of shard {name!r}, for ever; with --yes it is done")
        print(json.dumps(_shown(named, state)))
        return EXIT_FOUND
    return _done(location, replace_part(named, None), state, named)


def _replace(location: Location, name: str, part_id: PartId, file: Path, is_meant: bool) -> int:
    state = location.machine(name).refresh()
    named = _named(location, state, part_id)
    part = named.part
    if part.is_inline:
        raise InvalidUsage(f"part {part_id} lies in the State itself: there is no file of it")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidUsage(f"{file} cannot be read: {error.strerror}") from error
    size = part.blob_size
    if len(data) != size or zlib.crc32(data) != part.checksum:
        raise InvalidUsage(f"{file} is no copy of part {part_id}, which has {size} bytes and another checksum")
    if not is_meant:
        print(f"would put {file} in the place of part {part_id} of shard {name!r}; with --yes it is done")
        return EXIT_FOUND
    return _done(location, replace_part(named, put_anew(location, state, part, data)), state, named)


def _done(location: Location, command: c.ReplacePart, before: State, named: NamedPart) -> int:
    """Commit it, and print what was taken out as a receipt to be kept. A part in a bundle is taken out of that first.

    A later commit bundles the other parts again.
    """
    result = location.machine(before.name).apply(command)
    assert isinstance(result, c.PartReplaced)
    by = None if command.replacement is None else command.replacement.key
    print(json.dumps({"shard": before.name, "taken_out": _shown(named, before), "in_its_place": by}))
    return 0


def _named(location: Location, state: State, part_id: PartId) -> NamedPart:
    for named in all_parts(state, location.blob):
        if named.part.id == part_id:
            return named
    raise InvalidUsage(
        f"part {part_id} is not in shard {state.name!r}; `persist check {state.name} --deep` lists what is damaged"
    )


def _place(state: State, part: Part, within: Part | None) -> dict[str, Any]:
    """Which reads a part spoils: those of its batch's times and of its keys."""
    named = part.id if within is None else within.id
    batch = next(batch for batch in state.trace.batches if any(held.id == named for held in batch.parts()))
    interval = [batch.desc.lower.to_json(), batch.desc.upper.to_json()]
    upper = None if part.key_upper is None else part.key_upper.hex()
    keys = [part.key_lower.hex(), upper]
    return {"part": part.id, "rows": part.rows, "bytes": part.size, "interval": interval, "keys": keys}


def _shown(named: NamedPart, state: State) -> dict[str, Any]:
    """All that the State says of a part, as JSON: bytes are base64."""
    fields = {
        k: b64encode(v).decode() if isinstance(v, bytes) else v
        for k, v in asdict(named.part).items()
        if k not in ("receipt", "bundle")
    }
    return {**fields, "interval": _place(state, named.part, named.within)["interval"]}
