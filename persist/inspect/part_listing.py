"""The parts of a shard by batch and run, and one part's footer, row groups and statistics."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from blob import BlobNotFound
from persist.copies.shard_facts import NOT_THERE, FaultKind, Faults, NamedPart, ShardFacts, newest
from persist.core.batch import Part
from persist.core.blob_keys import belongs_to, born_ms, is_bundle_key, is_part_key, shard_of
from persist.core.errors import Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.ids import family_of, shard_id_of
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing
from persist.inspect.documents import Document, Frontier, JsonRecord, KeyShower, instant
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.parts import DIFF, TIME, valid_schemas
from persist.parts.part_files import PartFile, PartFiles

# The parts of a shard, by batch and run.


class PartRow(JsonRecord, frozen=True):
    """A part, in the run `run` of the batch `batch`, which holds the times `[lower, upper)`.

    `key` is None where its rows are in the State. `bundle` is the id of the bundle that lists it.

    `lists` counts the parts that a bundle stands for. `writer` is who wrote it, `minted` when its key was made, by that
    process's clock. `there`: whether its blob is there with its size; None: it has none.
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


def noted_parts(facts: ShardFacts, faults: Faults) -> Iterator[NamedPart]:
    """Every part that the State names, each bundle before what it lists. A bundle that cannot be read is noted."""
    for named in facts.parts():
        part, error = named.part, named.failed
        if isinstance(error, Corruption):
            faults.note(FaultKind.BUNDLE, f"nobody knows what the bundle {part.id} lists: {error.message}", part.key)
        elif error is not None and facts.is_named(part.key or ""):
            what = f"the bundle {part.id} {NOT_THERE}, so nobody knows what it lists"
            faults.note(FaultKind.MISSING, what, part.key)
        yield named


def parts_document(look: ReadOnlyLocation, name: str, keys: KeyShower) -> Document:
    """The parts of a shard, also those that bundles list. Each is compared with a listing of the blob store."""
    facts = newest(look, name)
    rows = (_part(one, _is_there(facts, one), keys) for one in noted_parts(facts, facts.faults))
    return Document("parts", facts.faults, name, int(facts.known().seqno), rows=rows)


def _is_there(facts: ShardFacts, named: NamedPart) -> bool | None:
    part = named.part
    if part.key is None:
        return None
    stat = facts.stat(part.key)
    if stat is None and not facts.is_named((named.within or part).key or ""):
        return False
    if stat is None:
        facts.faults.note(FaultKind.MISSING, f"the blob {part.key} {NOT_THERE}", part.key)
        return False
    if stat.size != part.blob_size:
        what = f"the blob {part.key} has {stat.size} bytes, not {part.blob_size}"
        facts.faults.note(FaultKind.SIZE, what, part.key)
    return stat.size == part.blob_size


def _part(one: NamedPart, there: bool | None, keys: KeyShower) -> PartRow:
    part = one.part
    return PartRow(
        batch=one.batch,
        run=one.run,
        lower=one.desc.lower.to_json(),
        upper=one.desc.upper.to_json(),
        id=str(part.id),
        key=part.key,
        bundle=None if one.within is None else str(one.within.id),
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
        there=there,
    )


# One part as it lies in the blob store: its footer, row groups and statistics, and whether checksums hold.


PIECE_BYTES = 8 * 1024 * 1024
SHOWN_MAX = 1_000  # updates of a part
UNNAMED_BYTES_MAX = 64 * 1024 * 1024  # of a blob that no State names, which is read whole


class PartFileSummary(JsonRecord, frozen=True):
    """A part's blob. `named`: whether the newest State names it; else nothing tells its checksums, and they are null.

    `whole`, `footer`: whether the checksum of all bytes, and that of the footer, hold. `shown`: its first updates as
    they lie there, as many as were asked for; what JSON has no value for is a text, bytes are in hex, and maps are
    lists of pairs. Where a clone alone names it, which borrowed it, the document is of that clone.
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
    """What Parquet tells of a column of a row group. Values of columns are data: `least` and `greatest` are hashed."""

    column: str
    bytes: int
    nulls: int | None
    least: str | None
    greatest: str | None


class RowGroupSummary(JsonRecord, frozen=True):
    """A row group: its rows, its bytes in memory, and whether the checksums of its column chunks hold (None: none)."""

    row_group: int
    updates: int
    memory_bytes: int | None
    key_lower: str | None
    key_upper: str | None
    chunks: int
    sound: bool | None
    statistics: list[ColumnStatistics]


def part_document(look: ReadOnlyLocation, key: str, keys: KeyShower, rows: int = 0) -> Document:
    """The blob of a part by its key, with so many of its updates.

    Raises InvalidUsage: it is none, or nothing names it and it is not there, or its updates are asked for.
    """
    if not belongs_to(key, shard_of(key)) or not (is_part_key(key) or is_bundle_key(key)):
        raise InvalidUsage(f"{key!r:.120} is no key of a part's blob; `persist inspect parts NAME` lists them")
    if is_bundle_key(key):
        raise InvalidUsage(f"{key} is a bundle, a list of parts: `persist inspect parts NAME` shows what it lists")
    name = _shard_of(look, key)
    faults = Faults(name)
    with translated():
        stat = look.blob.stat(key)
    found: tuple[Part, State] | None = None
    if name is not None:
        facts = newest(look, name)
        faults = facts.faults
        if facts.state is not None:
            found = _named(facts, key, faults) or _borrowed(look, facts.state, key)
        if found is not None and found[1].name != name:
            name = look.shown_name(found[1].name)
            faults = Faults(name)
    if found is None:
        if stat is None:
            raise InvalidUsage(f"there is no blob {key}, and nothing names it")
        if rows:
            raise InvalidUsage(f"nothing names {key}, so that its updates cannot be shown")
        return _unnamed(look, key, stat.size, name, faults, keys)
    if stat is None:
        faults.note(FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
        part, state = found
        return Document("part", faults, name, int(state.seqno), _summary(key, 0, None, part))
    return _as_named(look, found, stat.size, faults, keys, rows)


def _shard_of(look: ReadOnlyLocation, key: str) -> str | None:
    """The name of the shard to which a well-formed blob key belongs, in whichever life. None: no log has it."""
    family = family_of(shard_of(key))
    return next((name for name in look.names() if family_of(shard_id_of(name)) == family), None)


def _named(facts: ShardFacts, key: str, faults: Faults) -> tuple[Part, State] | None:
    state = facts.known()
    for one in noted_parts(facts, faults):
        if one.part.key == key:
            return one.part, state
    done = (part for claim in state.claims.values() for part in claim.done)
    return next(((part, state) for part in done if part.key == key), None)


def _borrowed(look: ReadOnlyLocation, owner: State, key: str) -> tuple[Part, State] | None:
    """The part as a clone has it that borrowed it, where it left the State of its owner."""
    for borrower in sorted({loan.borrower for loan in owner.loans.values()}):
        with suppress(UnknownShard):
            facts = newest(look, borrower)
            found = None if facts.state is None else _named(facts, key, Faults(borrower))
            if found is not None:
                return found
    return None


def _summary(
    key: str, size: int, metadata: Any, part: Part | None, whole: bool | None = None, shown: Sequence[Any] = ()
) -> PartFileSummary:
    """What the State says of a part (None: it names none), and Parquet's metadata (None: it cannot be read).

    `whole` None: the bytes were not compared, so nothing is known of the footer either.
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


def _as_named(
    look: ReadOnlyLocation, found: tuple[Part, State], size: int, faults: Faults, keys: KeyShower, shown: int
) -> Document:
    part, state = found
    key = part.key or ""
    if size != part.size:
        faults.note(FaultKind.SIZE, f"the blob {key} has {size} bytes, not {part.size}", key)
    whole = _holds_whole(look, part, size)
    if not whole:
        faults.note(FaultKind.PART, f"the bytes of part {part.id} do not match its checksum", key)
    file: PartFile | None = None
    try:
        with translated_but_missing():
            file = _Ranged(look.blob, valid_schemas(state.schemas)).open(part)
    except BlobNotFound:
        faults.note(FaultKind.MISSING, f"the blob {key} is not there any more", key)
    except (Corruption, UpgradeNeeded) as error:
        faults.note(FaultKind.PART, error.message, key)
    if file is None:
        about, groups = _summary(key, size, None, part, whole), []
    else:
        about = _summary(key, size, file.metadata, part, whole, _shown(file, shown, faults))
        groups = list(_groups(look, file, faults, keys))
    return Document("part", faults, look.shown_name(state.name), int(state.seqno), about, groups)


def _shown(file: PartFile, rows: int, faults: Faults) -> list[dict[str, Any]]:
    groups, before = [], 0
    for number, group in enumerate(file.groups):
        if before < rows:
            groups.append(number)
        before += group.rows
    if not groups:
        return []
    try:
        table = file.read(groups, [*file.schema.arrow.names, TIME, DIFF])
    except Corruption as error:
        faults.note(FaultKind.PART, error.message, file.part.key)
        return []
    return [
        {name: _of_scalar(column[row]) for name, column in zip(table.column_names, table.columns, strict=True)}
        for row in range(min(rows, table.num_rows))
    ]


def _of_scalar(scalar: Any) -> Any:
    """A value of a row as JSON. A time that Python has no value for is its count of units, as in `persist cat`."""
    if not scalar.is_valid:
        return None
    kind, types = scalar.type, pa.types
    if types.is_map(kind):
        return [[_of_scalar(pair[0]), _of_scalar(pair[1])] for pair in scalar.values]
    if types.is_struct(kind):
        return {kind.field(place).name: _of_scalar(scalar[place]) for place in range(kind.num_fields)}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_of_scalar(one) for one in scalar.values]
    try:
        return _plain(scalar.as_py())
    except (OverflowError, ValueError):
        return f"@{scalar.value}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


class _Ranged(PartFiles):
    """Reads ranges, so that a footer is read also where other bytes of a small part are damaged."""

    def is_small(self, part: Part) -> bool:
        return False


def _holds_whole(look: ReadOnlyLocation, part: Part, size: int) -> bool:
    checksum = 0
    for start in range(0, size, PIECE_BYTES):
        with translated():
            checksum = zlib.crc32(look.blob.get_range(part.key or "", start, min(PIECE_BYTES, size - start)), checksum)
    return checksum == part.checksum and size == part.size


def _groups(look: ReadOnlyLocation, file: PartFile, faults: Faults, keys: KeyShower) -> Iterator[RowGroupSummary]:
    part = file.part
    for number, group in enumerate(file.groups):
        chunks = [*group.chunks, *(() if group.twins is None else (group.twins,))]
        sound = True
        for chunk in chunks:
            try:
                with translated():
                    data = look.blob.get_range(part.key or "", chunk.start, chunk.size)
            except Corruption:
                data = b""
            if len(data) != chunk.size or zlib.crc32(data) != chunk.checksum:
                ends = chunk.start + chunk.size
                what = f"bytes {chunk.start} to {ends} of part {part.id} do not match their checksum"
                faults.note(FaultKind.PART, what, part.key)
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


def _statistics(metadata: Any, number: int, keys: KeyShower) -> list[ColumnStatistics]:
    group, told = metadata.row_group(number), []
    for position in range(group.num_columns):
        column = group.column(position)
        held, name = column.statistics, column.path_in_schema
        show = KeyShower(True) if name in (TIME, DIFF) else keys
        bounds = (None, None) if held is None or not held.has_min_max else _bounds(held)
        nulls = held.null_count if held is not None and held.has_null_count else None
        told.append(ColumnStatistics(name, column.total_compressed_size, nulls, *map(show.value, bounds)))
    return told


def _bounds(held: Any) -> tuple[Any, Any]:
    """The least and the greatest value; times that Python has no value for as their count of units."""
    try:
        return held.min, held.max
    except (OverflowError, ValueError):
        return f"@{held.min_raw}", f"@{held.max_raw}"


def _unnamed(
    look: ReadOnlyLocation, key: str, size: int, name: str | None, faults: Faults, keys: KeyShower
) -> Document:
    """A blob that the newest State does not name: an orphan, or one that left the State. Its own footer is read."""
    if size > UNNAMED_BYTES_MAX:
        raise InvalidUsage(f"{key} has {size} bytes and nothing names it; at most {UNNAMED_BYTES_MAX} are read of such")
    metadata: Any = None
    try:
        with translated():
            metadata = pq.read_metadata(pa.BufferReader(look.blob.get(key)))
    except (pa.ArrowException, OSError, ValueError) as error:
        faults.note(FaultKind.PART, f"the blob {key} is no Parquet file: {error}", key)
    about = _summary(key, size, metadata, None)
    rows = []
    for number in range(0 if metadata is None else metadata.num_row_groups):
        group = metadata.row_group(number)
        told = _statistics(metadata, number, keys)
        rows.append(RowGroupSummary(number, group.num_rows, None, None, None, group.num_columns, None, told))
    return Document("part", faults, name, None, about, rows)
