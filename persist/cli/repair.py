"""`persist check NAME --repair`: replace damaged blobs by copies, or remove a damaged part."""

from __future__ import annotations

import argparse
import json
import zlib
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

from persist.cli.backup import backups_at
from persist.cli.connection_args import where_of
from persist.commit.location import Location
from persist.copies.blob_repair import LEFT, PUT, REPLACED, put_anew, repair_blobs, replace_part
from persist.copies.shard_facts import NamedPart, all_parts
from persist.core.batch import Part
from persist.core.errors import InvalidUsage
from persist.core.ids import PartId, check_shard_name, parse
from persist.core.record import asdict
from persist.core.state import State

EXIT_FOUND = 1
SOURCES = ("source", "replace", "excise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repair", action="store_true", help="repair the shard NAME; requires one of the next three")
    parser.add_argument("--from", dest="source", metavar="URL", help="restore damaged blobs from a store of backups")
    parser.add_argument("--replace", nargs=2, metavar=("PART", "FILE"), help="replace PART by FILE, a copy of it")
    parser.add_argument("--excise", metavar="PART", help="remove this part: its rows are lost")
    parser.add_argument("--yes", action="store_true", help="repair; without it, only print what would be done")


def check_arguments(arguments: argparse.Namespace) -> None:
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
            print(f"would {what}; give --yes to do it")
            if replacement is None:
                print(json.dumps(_part_json(located)))
            return EXIT_FOUND
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
    return EXIT_FOUND if counts[LEFT] or would else 0


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
