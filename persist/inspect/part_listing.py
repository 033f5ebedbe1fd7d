"""The parts of a shard by batch and run, and one part's footer, row groups and statistics."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from blob import BlobNotFound
from persist.codecs.json_rows import to_json_rows
from persist.copies.shard_checks import matches_checksum
from persist.copies.shard_facts import NOT_THERE, FaultKind, Faults, NamedPart, ShardFacts, newest
from persist.core.batch import Part
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, is_part_key, shard_of
from persist.core.errors import Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.ids import family_of, shard_id_of
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyFormat, instant
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import DIFF, TIME, valid_schemas
from persist.parts.part_files import PartFile, PartFiles

# The parts of a shard.


class PartRow(JsonRecord, frozen=True):
    """A part in run `run` of batch `batch`, whose times are in `[lower, upper)`.

    `key` is None for a part that is inline in the State. `bundle` is the id of the bundle that lists it, `lists` the
    number of parts that a bundle lists. `writer` wrote the part, and created its key at `minted` by its own clock.
    `there`: whether its blob exists and has the right size; None: it has no blob.
    """

    batch: int
    run: int
    lower: Frontier
    upper: Frontier
    id: str
    key: str | None
    bundle: str | None
    lists: int | None
    format: str
    schema_id: int
    updates: int
    bytes: int
    diff_sum: int | None
    key_lower: str | None
    key_upper: str | None
    time: int | None
    time_min: int
    time_max: int
    clip: int | None
    writer: str | None
    minted: str | None
    there: bool | None


def parts_noting_faults(facts: ShardFacts, faults: Faults) -> Iterator[NamedPart]:
    """All parts that the State names, each bundle before its parts. Bundles that cannot be read are noted."""
    for named in facts.parts():
        part, error = named.part, named.error
        if isinstance(error, Corruption):
            faults.note(FaultKind.BUNDLE, f"the bundle {part.id} cannot be read: {error.message}", part.key)
        elif error is not None and facts.is_named(part.key or ""):
            message = f"the bundle {part.id} {NOT_THERE}, so that the parts in it are unknown"
            faults.note(FaultKind.MISSING, message, part.key)
        yield named


def parts_document(location: ReadOnlyLocation, name: str, keys: KeyFormat) -> Document:
    """The parts of a shard, including those in bundles. Each is compared with a listing of the blob store."""
    facts = newest(location, name)
    rows = (_part(named, _check_blob(facts, named), keys) for named in parts_noting_faults(facts, facts.faults))
    return Document("parts", facts.faults, name, int(facts.known().seqno), rows=rows)


def _check_blob(facts: ShardFacts, named: NamedPart) -> bool | None:
    part = named.part
    if part.key is None:
        return None
    if facts.stat(part.key) is None and not facts.is_named((named.within or part).key or ""):
        return False
    return facts.check_blob(part.key, part.blob_size, facts.faults)


def _part(named: NamedPart, is_there: bool | None, keys: KeyFormat) -> PartRow:
    part = named.part
    return PartRow(
        batch=named.batch,
        run=named.run,
        lower=named.desc.lower.to_json(),
        upper=named.desc.upper.to_json(),
        id=str(part.id),
        key=part.key,
        bundle=None if named.within is None else str(named.within.id),
        lists=None if part.bundle is None else part.bundle.parts,
        format=part.format,
        schema_id=part.schema_id,
        updates=part.rows,
        bytes=part.size,
        diff_sum=part.diff_sum,
        key_lower=keys(part.key_lower),
        key_upper=keys(part.key_upper),
        time=part.time,
        time_min=part.time_min,
        time_max=part.time_max,
        clip=part.clip,
        writer=None if part.key is None else part.key.split("/")[1],
        minted=None if part.key is None else instant(born_ms(part.key)),
        there=is_there,
    )


# The blob of a part: its footer, row groups, statistics and checksums.


SHOWN_MAX = 1_000  # updates of a part
UNNAMED_BYTES_MAX = 64 * 1024 * 1024  # of a blob that no State names, which is read as a whole


class PartFileSummary(JsonRecord, frozen=True):
    """The blob of a part. `named`: whether the newest State names it; else its checksums are unknown, and null.

    `whole`, `footer`: whether the checksums of all bytes, and of the footer, match. `shown`: its first updates in
    stored order, as many as requested, with values as in `persist cat`. If only a clone that borrowed it names it, the
    document is about the clone.
    """

    key: str
    id: str | None
    named: bool
    bytes: int
    updates: int | None
    schema_id: int | None
    columns: list[str]
    created_by: str | None
    row_groups: int | None
    whole: bool | None
    footer: bool | None
    shown: list[dict[str, Any]]


class ColumnStatistics(JsonRecord, frozen=True):
    """Parquet's statistics of a column of a row group. Values are data: `least` and `greatest` are hashed."""

    column: str
    bytes: int
    nulls: int | None
    least: str | None
    greatest: str | None


class RowGroupSummary(JsonRecord, frozen=True):
    """A row group: its rows, its bytes in memory, and whether the checksums of its chunks match (None: unknown)."""

    row_group: int
    updates: int
    memory_bytes: int | None
    key_lower: str | None
    key_upper: str | None
    chunks: int
    sound: bool | None
    statistics: list[ColumnStatistics]


def part_document(location: ReadOnlyLocation, key: str, keys: KeyFormat, rows: int = 0) -> Document:
    """The blob of a part by its key, with its first updates.

    Raises InvalidUsage: it is not a key of a part; or no State names it, and it is missing or `rows` is given.
    """
    if not belongs_to(key, shard_of(key)) or not (is_part_key(key) or is_bundle_key(key)):
        raise InvalidUsage(f"{key!r:.120} is not the key of a part; `persist inspect parts NAME` lists them")
    if is_bundle_key(key):
        raise InvalidUsage(f"{key} is a bundle, a list of parts: `persist inspect parts NAME` lists them")
    family = family_of(shard_of(key))
    name = next((name for name in location.names() if family_of(shard_id_of(name)) == family), None)
    faults = Faults(name)
    with translated():
        stat = location.blob.stat(key)
    located: tuple[Part, State] | None = None
    if name is not None:
        facts = newest(location, name)
        faults = facts.faults
        if facts.state is not None:
            located = _find_named(facts, key, faults) or _find_borrowed(location, facts.state, key)
        if located is not None and located[1].name != name:
            name = location.shown_name(located[1].name)
            faults = Faults(name)
    if located is None:
        if stat is None:
            raise InvalidUsage(f"there is no blob {key}, and no State names it")
        if rows:
            raise InvalidUsage(f"no State names {key}, so that its updates cannot be shown")
        return _unnamed_document(location, key, stat.size, name, faults, keys)
    if stat is None:
        faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
        part, state = located
        return Document("part", faults, name, int(state.seqno), _summary(key, 0, None, part))
    return _named_document(location, located, stat.size, faults, keys, rows)


def _find_named(facts: ShardFacts, key: str, faults: Faults) -> tuple[Part, State] | None:
    state = facts.known()
    for named in parts_noting_faults(facts, faults):
        if named.part.key == key:
            return named.part, state
    done = (part for claim in state.claims.values() for part in claim.done)
    return next(((part, state) for part in done if part.key == key), None)


def _find_borrowed(location: ReadOnlyLocation, owner: State, key: str) -> tuple[Part, State] | None:
    """The part in the State of a clone that borrowed it, if the owner's State no longer has it."""
    for borrower in sorted({loan.borrower for loan in owner.loans.values()}):
        with suppress(UnknownShard):
            facts = newest(location, borrower)
            located = None if facts.state is None else _find_named(facts, key, Faults(borrower))
            if located is not None:
                return located
    return None


def _summary(
    key: str, size: int, metadata: Any, part: Part | None, whole: bool | None = None, shown: Sequence[Any] = ()
) -> PartFileSummary:
    """Combine what the State says of a part (None: no State names it) with Parquet's metadata (None: unreadable).

    `whole` None: the bytes were not verified, so that the footer is unverified too.
    """
    return PartFileSummary(
        key=key,
        id=None if part is None else str(part.id),
        named=part is not None,
        bytes=size,
        updates=part.rows if part is not None else None if metadata is None else metadata.num_rows,
        schema_id=None if part is None else part.schema_id,
        columns=[] if metadata is None else list(metadata.schema.names),
        created_by=None if metadata is None else metadata.created_by,
        row_groups=None if metadata is None else metadata.num_row_groups,
        whole=whole,
        footer=None if whole is None else metadata is not None,
        shown=list(shown),
    )


def _named_document(
    location: ReadOnlyLocation, located: tuple[Part, State], size: int, faults: Faults, keys: KeyFormat, shown: int
) -> Document:
    part, state = located
    key = part.key or ""
    if size != part.size:
        faults.note(FaultKind.SIZE, f"the blob {key} has {size} bytes, not {part.size}", key)
    with translated():
        whole = size == part.size and matches_checksum(part, location.blob)
    if not whole:
        faults.note(FaultKind.PART, f"the bytes of part {part.id} do not match its checksum", key)
    file: PartFile | None = None
    try:
        with translated_but_missing():
            file = _Ranged(location.blob, valid_schemas(state.schemas)).open(part)
    except BlobNotFound:
        faults.note(FaultKind.MISSING, f"the blob {key} was deleted meanwhile", key)
    except (Corruption, UpgradeNeeded) as error:
        faults.note(FaultKind.PART, error.message, key)
    if file is None:
        about, groups = _summary(key, size, None, part, whole), []
    else:
        about = _summary(key, size, file.metadata, part, whole, _first_updates(file, shown, faults))
        groups = list(_groups(location, file, faults, keys))
    return Document("part", faults, location.shown_name(state.name), int(state.seqno), about, groups)


def _first_updates(file: PartFile, rows: int, faults: Faults) -> list[dict[str, Any]]:
    groups, rows_before = [], 0
    for number, group in enumerate(file.groups):
        if rows_before < rows:
            groups.append(number)
        rows_before += group.rows
    if not groups:
        return []
    try:
        table = file.read(groups, [*file.schema.arrow.names, TIME, DIFF])
    except Corruption as error:
        faults.note(FaultKind.PART, error.message, file.part.key)
        return []
    return to_json_rows(table.slice(0, rows))


class _Ranged(PartFiles):
    """Reads ranges, so that a footer can be read even if other bytes of a small part are damaged."""

    def is_small(self, part: Part) -> bool:
        return False


def _groups(location: ReadOnlyLocation, file: PartFile, faults: Faults, keys: KeyFormat) -> Iterator[RowGroupSummary]:
    part = file.part
    for number, group in enumerate(file.groups):
        chunks = [*group.chunks, *(() if group.twins is None else (group.twins,))]
        sound = True
        for chunk in chunks:
            try:
                with translated():
                    data = location.blob.get_range(part.key or "", chunk.start, chunk.size)
            except Corruption:
                data = b""
            if len(data) != chunk.size or zlib.crc32(data) != chunk.checksum:
                end = chunk.start + chunk.size
                message = f"bytes {chunk.start} to {end} of part {part.id} do not match their checksum"
                faults.note(FaultKind.PART, message, part.key)
                sound = False
        yield RowGroupSummary(
            row_group=number,
            updates=group.rows,
            memory_bytes=group.nbytes,
            key_lower=keys(group.key_lower),
            key_upper=keys(group.key_upper),
            chunks=len(chunks),
            sound=sound,
            statistics=_statistics(file.metadata, number, keys),
        )


def _statistics(metadata: Any, number: int, keys: KeyFormat) -> list[ColumnStatistics]:
    group, statistics = metadata.row_group(number), []
    for position in range(group.num_columns):
        column = group.column(position)
        bounds_of, name = column.statistics, column.path_in_schema
        show = KeyFormat(True) if name in (TIME, DIFF) else keys
        bounds = (None, None) if bounds_of is None or not bounds_of.has_min_max else _bounds(bounds_of)
        nulls = bounds_of.null_count if bounds_of is not None and bounds_of.has_null_count else None
        statistics.append(ColumnStatistics(name, column.total_compressed_size, nulls, *map(show.value, bounds)))
    return statistics


def _bounds(bounds_of: Any) -> tuple[Any, Any]:
    """The minimum and the maximum; times out of Python's range are their numbers of units."""
    try:
        return bounds_of.min, bounds_of.max
    except (OverflowError, ValueError):
        return f"@{bounds_of.min_raw}", f"@{bounds_of.max_raw}"


def _unnamed_document(
    location: ReadOnlyLocation, key: str, size: int, name: str | None, faults: Faults, keys: KeyFormat
) -> Document:
    """A blob that the newest State does not name: an orphan, or one that left the State. Its own footer is read."""
    if size > UNNAMED_BYTES_MAX:
        raise InvalidUsage(f"{key} has {size} bytes, and no State names it; at most {UNNAMED_BYTES_MAX} are read then")
    metadata: Any = None
    try:
        with translated():
            metadata = pq.read_metadata(pa.BufferReader(location.blob.get(key)))
    except (pa.ArrowException, OSError, ValueError) as error:
        faults.note(FaultKind.PART, f"the blob {key} is not a Parquet file: {error}", key)
    about = _summary(key, size, metadata, None)
    rows = []
    for number in range(0 if metadata is None else metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = _statistics(metadata, number, keys)
        rows.append(RowGroupSummary(number, group.num_rows, None, None, None, group.num_columns, None, statistics))
    return Document("part", faults, name, None, about, rows)
