"""`persist import NAME FILE...`: write the rows of files to a shard, exactly once."""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.cli import row_files
from persist.cli.connection_args import add_shard_arguments, check_given, client_of
from persist.cli.long_running import ended_by_sigterm
from persist.cli.row_files import RowPiece, RowSource, first_bad
from persist.cli.schema import schema_of
from persist.cli.terminal import ProgressBar, Screen, columns, print_line
from persist.client.arguments import columns_of
from persist.client.client import Client
from persist.client.commit_info import HistoryEntry
from persist.client.dml_plans import Overwrite, Upsert
from persist.client.optimistic_edit import find_landed_write
from persist.client.shard import Shard
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteSettings
from persist.core.audit_log import PAGE_MAX
from persist.core.errors import InvalidUsage, NotReadable, TokenReused, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import Token, check_shard_name, given_token, token_of_key
from persist.core.transitions.part_admission import DIFF_MAX
from persist.parts import DIFF, TIME, ShardSchema, consolidate

# What later commits did to the rows of an import, according to the commit history.

INSERT, UPSERT, OVERWRITE = "insert", "upsert", "overwrite"
ENTRIES_MAX = 1_000_000  # that are read back; an older import counts as unknown
TRUNCATIONS = ("truncate", "drop_before")
ADDING = ("insert", "append", "compare_and_append")
REPAIR = "repair"  # which may have lost rows
DIGEST = "digest"  # a field of the commit info of an overwrite: identifies its files and how they are read
WITHOUT_COUNT = (OVERWRITE, "drop_before", REPAIR)  # operations that may change rows although they add none


@dataclass(frozen=True)
class Fate:
    """What became of an import.

    `undone_by` is the commit that undid it as a whole. `removed_by` are commits that may have removed some of its rows,
    in order. `is_known`: the history reaches back to the import. `overwrite` is the commit that replaced all contents
    by the rows of the same files, so that the rows are there since that commit.
    """

    undone_by: HistoryEntry | None = None
    removed_by: tuple[HistoryEntry, ...] = ()
    is_known: bool = True
    overwrite: HistoryEntry | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no row of it was removed."""
        return self.is_known and self.undone_by is None and not self.removed_by


def fate_of(shard: Shard, verb: str, landed: int, digest: str | None = None) -> Fate:
    """Find what became of an import by `verb` whose rows are there as of the time `landed`.

    `digest` identifies its files: an overwrite by the same files keeps its rows. Raises what `Shard.history` raises.
    """
    later: list[HistoryEntry] = []
    before: HistoryEntry | None = None
    for _ in range(0, ENTRIES_MAX, PAGE_MAX):
        page = shard.history(PAGE_MAX, before=before)
        for entry in page:
            if entry.operation == "create" or _is_until(entry, landed):
                return after(verb, landed, reversed(later), digest)
            if _changes_rows(entry):
                later.append(entry)
        if len(page) < PAGE_MAX:
            break
        before = page[-1]
    return Fate(is_known=False)


def after(verb: str, landed: int, later: Iterable[HistoryEntry], digest: str | None = None) -> Fate:
    """Compute what the later commits, in their order, did to the import. Pure."""
    times, fates = [landed], [Fate()]

    def at(time: int) -> Fate:
        """The fate as of a time that is not before the import."""
        return fates[bisect_right(times, time) - 1]

    for entry in later:
        if _changes_rows(entry) and not _is_until(entry, landed):
            times.append(times[-1] if entry.operation == REPAIR else entry.lower or 0)
            is_same = entry.operation == OVERWRITE and digest is not None and (entry.info or {}).get(DIGEST) == digest
            fates.append(Fate(overwrite=entry) if is_same else _following(verb, landed, entry, fates[-1], at))
    return fates[-1]


def _following(verb: str, landed: int, entry: HistoryEntry, before: Fate, at: Callable[[int], Fate]) -> Fate:
    """The fate after this commit. It was `before` until then."""
    undone_wholly = before if before.undone_by is not None else replace(before, undone_by=entry, removed_by=())
    undone_partly = before if before.undone_by is not None else replace(before, removed_by=(*before.removed_by, entry))
    if entry.operation == "restore" and entry.point is not None:
        return undone_wholly if entry.point < landed else at(entry.point)
    if verb == OVERWRITE or entry.operation == OVERWRITE:
        return undone_wholly
    if entry.operation in TRUNCATIONS and entry.point is not None and "retention" not in (entry.info or {}):
        is_beyond = entry.point > landed and at(entry.point - 1).undone_by is None
        return undone_wholly if is_beyond else undone_partly  # equal rows may have been there before the cut
    return before if entry.operation in ADDING and entry.retractions == 0 else undone_partly


def _is_until(entry: HistoryEntry, landed: int) -> bool:
    """Whether the entry is of rows written by that time. A repair is of earlier batches."""
    is_repair = entry.operation == REPAIR
    return _changes_rows(entry) and not is_repair and entry.lower is not None and entry.lower <= landed


def _changes_rows(entry: HistoryEntry) -> bool:
    is_pending = entry.lower == entry.upper and entry.operation in TRUNCATIONS  # it may yet be withdrawn
    return bool(entry.rows) or (entry.operation in WITHOUT_COUNT and not is_pending)


# The import: one commit for each file, or one for all. Its idempotency token follows from the bytes of the files and
# from the operation, so that a second run writes nothing. After a later commit undid the import as a whole, it is
# written again, with a token that also names that commit, so that this happens once too.

HELD_BYTES_MAX = 2 * 1024**3  # of rows of an upsert or an overwrite, which are held in memory
ALREADY = "already imported"
NAMES_SHOWN_MAX = 20  # of files in the commit info; of commits that removed rows
ROUNDS_MAX = 1_000  # how often the import of one file can have been undone, each time by another commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV, Parquet, NDJSON or Arrow; -: standard input")
    parser.add_argument("--format", choices=row_files.FORMATS, help="default: by the names of the files")
    parser.add_argument("--columns", metavar="A,B", help="only these columns of the files")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--upsert", action="store_true", help="insert rows, and replace those with the same keys")
    how.add_argument("--overwrite", action="store_true", help="replace all rows of the shard")
    parser.add_argument(
        "--one-commit",
        action="store_true",
        help="all files in one commit, recognised only as a whole; default: one for each file",
    )
    parser.add_argument("--create", action="store_true", help="create a missing shard with the columns of the file")
    parser.add_argument("--key", metavar="A,B", help="with --create: the key columns, by which rows are ordered")
    parser.add_argument("--null", metavar="TEXT", action="append", default=[], help="CSV: this unquoted cell is null")
    parser.add_argument("--token", metavar="TEXT", help="identifies this import; default: the contents of the files")
    parser.add_argument("--again", action="store_true", help="also import files whose rows may have been removed since")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    bar = ProgressBar(sys.stderr)
    try:
        with ended_by_sigterm(), row_files.opened(arguments.files, arguments.format, arguments.null, bar) as sources:
            new_schema = schema_of(sources[0].inferred(), columns_of(arguments.key)) if arguments.create else None
            with client_of(arguments, must_exist=new_schema is None) as client:
                _import(client, arguments, sources, new_schema, bar)
    finally:
        bar.clear()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_shard_name(arguments.name)
    check_given(arguments, "columns", "key", "token")
    columns(arguments)
    if arguments.create != (arguments.key is not None):
        raise InvalidUsage("--create and --key go together: --create --key id creates the shard if it is missing")
    if len(arguments.files) > 1 and not arguments.one_commit:
        if arguments.overwrite:
            raise InvalidUsage("each file would replace the one before: give one file, or --one-commit")
        if arguments.token is not None:
            raise InvalidUsage("--token identifies one commit: give one file, or --one-commit")


def _import(
    client: Client, arguments: argparse.Namespace, sources: list[RowSource], new: ShardSchema | None, bar: ProgressBar
) -> None:
    verb = UPSERT if arguments.upsert else OVERWRITE if arguments.overwrite else INSERT
    column_names = columns(arguments)
    shard, schema = _open_shard(client, arguments.name, new)
    reads = [FileReading.of(source, schema, column_names, verb) for source in sources]
    groups = [reads] if arguments.one_commit else [[read] for read in reads]
    custom = given_token(arguments.token)
    if verb == UPSERT and arguments.one_commit:
        _check_alike(reads)
    if shard is None:
        sources[0].check_typed()
        for group in groups:  # a refused import creates no shard
            is_fitting = verb == INSERT and group[0] is reads[0] and group[0].is_plain_csv  # by its inferred types
            _check_rows(group[is_fitting:], schema, verb)
        shard = client.create_shard(arguments.name, schema.arrow, schema.key)
    for group in groups:
        identify = partial(_identity, column_names, arguments.null, group)
        by_overwrite = None if verb == OVERWRITE or custom is not None else identify(OVERWRITE)
        token, digest = custom or identify(verb), str(identify(""))
        import_ = Import(client.transport, shard, verb, group, token, digest, by_overwrite, custom is None)
        result = import_.run(again=arguments.again)
        bar.clear()
        _print_result(result)


def _check_rows(reads: Sequence[FileReading], schema: ShardSchema, verb: str) -> None:
    """Raise InvalidUsage if the rows of one commit cannot be the first of a shard with this schema."""
    if verb != INSERT:
        tables = (table for read in reads for table in read.tables())
        (Upsert if verb == UPSERT else Overwrite)(_concatenate(tables, reads)).bound(schema)
        return
    for read in reads:
        for table in read.tables():
            if DIFF in table.column_names:
                _check_diffs(consolidate([schema.conform(table, 0)], schema).column(DIFF), read.source)


def _check_diffs(diffs: pa.ChunkedArray, source: RowSource) -> None:
    """Raise InvalidUsage if one of the sums of the `__diff` of equal rows is too large for a commit."""
    extremes = pc.min_max(diffs)
    for sum_ in (extremes["min"].as_py(), extremes["max"].as_py()):
        if sum_ is not None and abs(sum_) > DIFF_MAX:
            raise source.refused(f"the {DIFF} of equal rows sum to {sum_}; at most {DIFF_MAX} can be written at once")


def _check_alike(reads: Sequence[FileReading]) -> None:
    """Raise InvalidUsage if files whose rows are upserted by one commit have different columns."""
    names = reads[0].written.arrow.names
    for read in reads[1:]:
        if (names_here := read.written.arrow.names) != names:
            raise read.source.refused(
                f"it has the columns {', '.join(names_here)}, where {reads[0].source.name} has {', '.join(names)}: one "
                "upsert has one set of columns; leave out --one-commit, or select the columns by --columns"
            )


def _open_shard(client: Client, name: str, new_schema: ShardSchema | None) -> tuple[Shard | None, ShardSchema]:
    """Return the shard and its schema; if it is missing, the new schema. Raises UnknownShard, InvalidUsage."""
    try:
        shard = client.shard(name)
    except UnknownShard:
        if new_schema is None:
            raise
        return None, new_schema
    if new_schema is not None and new_schema.key != shard.schema.key:
        key = ",".join(shard.schema.key)
        raise InvalidUsage(f"shard {name!r} exists already, with the key {key}: give --key {key}, or another name")
    return shard, shard.schema


_HAS_TIME = f"it has a column {TIME}, but an import is written at the next time: exclude it by --columns"


@dataclass(frozen=True)
class FileReading:
    """A file whose rows are read for a shard with this schema.

    `names`: the columns of the file that are imported; None: all of the shard's. `written`: the schema of the rows that
    are written; an upsert keeps the values of other columns. `counts`: whether rows may have a column `__diff`.
    """

    source: RowSource
    schema: ShardSchema
    names: tuple[str, ...] | None
    written: ShardSchema
    counts: bool

    @classmethod
    def of(cls, source: RowSource, schema: ShardSchema, requested: list[str] | None, verb: str) -> FileReading:
        """Match the columns of a file with those of the shard. Raises InvalidUsage if they do not match."""
        if requested is not None:
            schema.columns(requested)
        file_names = source.names
        if file_names is None and requested is None and verb == UPSERT:
            file_names = source.same_names() or tuple(schema.arrow.names)
        if file_names is None:
            columns = tuple(schema.arrow.names if requested is None else requested)
        else:
            for name in file_names if requested is None else ():
                if name == TIME:
                    raise source.refused(_HAS_TIME)
                if name != DIFF and name not in schema.arrow.names:
                    raise source.refused(
                        f"it has a column {name!r}, which the shard does not have: its columns are "
                        f"{', '.join(schema.arrow.names)}; select columns by --columns"
                    )
            for name in requested or ():
                if name not in file_names:
                    raise source.refused(f"it has no column {name!r}: its columns are {', '.join(file_names)}")
            columns = tuple(n for n in schema.arrow.names if n in (file_names if requested is None else requested))
        for column in schema.arrow:
            may_lack = column.nullable or column.name in schema.defaults or verb == UPSERT
            if column.name not in columns and (column.name in schema.key or not may_lack):
                raise source.refused(f"it lacks column {column.name!r}, which is required")
        if verb == UPSERT:
            written = ShardSchema(pa.schema([column for column in schema.arrow if column.name in columns]), schema.key)
        else:
            written = schema
        names = (*columns, DIFF) if file_names is not None and DIFF in file_names else columns
        is_open = file_names is None and requested is None
        return cls(source, schema, None if is_open else names, written, verb == INSERT)

    @property
    def is_plain_csv(self) -> bool:
        return self.source.form == "csv" and not {TIME, DIFF} & set(self.source.names or ())

    def tables(self) -> Iterator[pa.Table]:
        """The rows, in the columns that are written and perhaps `__diff`. Raises InvalidUsage, which names the line."""
        for piece in self.source.pieces(self.schema, self.names):
            yield self._conformed(piece)

    def _conformed(self, piece: RowPiece) -> pa.Table:
        written, table = self.written, piece.table
        if TIME in table.column_names:
            raise self.source.refused(_HAS_TIME)
        if DIFF in table.column_names and not self.counts:
            raise self.source.refused(f"it has a column {DIFF}, which is only allowed in rows that are inserted")
        for column in written.arrow:
            if column.name not in table.column_names:
                table = table.append_column(column, written.absent(column.name, len(table)))
        try:
            rows = written.conform(table, 0)
        except InvalidUsage as error:
            place = ""
            with suppress(InvalidUsage):  # which no row causes
                written.conform(table.slice(0, 0), 0)
                bad = first_bad(len(table), lambda count: written.conform(table.slice(0, count), 0))
                place = f"{piece.place(bad)}: "
            raise self.source.refused(f"{place}{error.message}") from error
        return rows.drop_columns([TIME] if DIFF in table.column_names else [TIME, DIFF])


def _identity(names: list[str] | None, nulls: Sequence[str], reads: Sequence[FileReading], verb: str) -> Token:
    """The idempotency token of a commit: a digest of what is read and of the operation."""
    identity = ["persist import", verb, names, [(read.source.form, read.source.digest) for read in reads]]
    if nulls:
        identity.append(sorted(nulls))
    return token_of_key(json.dumps(identity))


@dataclass(frozen=True)
class Import:
    """Files whose rows are written by one commit, which `token` identifies.

    `digest` identifies the files and how they are read, for every verb. `by_overwrite` is the token of an overwrite by
    the same files, which counts as an import of them (None: ignore those). `identifies_files`: the token identifies the
    files, also after the columns of the shard have changed.
    """

    transport: Transport
    shard: Shard
    verb: str
    reads: Sequence[FileReading]
    token: Token
    digest: str
    by_overwrite: Token | None
    identifies_files: bool

    def run(self, *, again: bool) -> dict[str, Any]:
        """Write the rows, unless they were written and have not been undone. Returns a JSON object for the user.

        `again`: also if some of them may have been removed.
        """
        before = self.shard.upper()
        rows = self._find_overwrite() or self._write(self.token)
        if not rows.interval[0] < before:
            return self._result(rows, "nothing to do" if rows.is_empty else "imported")
        attempts: list[str] = []  # which the token of the next attempt names
        for _ in range(ROUNDS_MAX):
            landed = rows.landed
            fate = fate_of(self.shard, self.verb, landed, self.digest)
            if fate.overwrite is not None:
                lower, upper = fate.overwrite.lower, fate.overwrite.upper
                rows = replace(rows, interval=(Antichain(lower), Antichain(upper)))
            if fate.is_whole:
                break
            attempts.append(_reason(fate, rows))
            token = token_of_key(json.dumps(["persist import again", self.token, attempts]))
            interval = self._landed_interval(token)
            if interval is not None:
                rows = replace(rows, interval=interval)
                continue
            if fate.undone_by is None and not again:
                by = [{"time": entry.lower, "operation": entry.operation} for entry in _latest(fate.removed_by)]
                # None: the history does not reach back to the import.
                return {**self._result(rows, ALREADY), "removed_by": by if fate.is_known else None}
            if fate.undone_by is not None and self.verb == INSERT:
                whole_times = {landed, rows.landed, (fate.undone_by.lower or 0) - 1}
                if any(map(self._is_as_of, whole_times)):
                    break
            rows = self._write(token)
            return self._result(rows, "nothing to do" if rows.is_empty else "imported")
        return self._result(rows, ALREADY)

    def _find_overwrite(self) -> ImportedRows | None:
        """Find an overwrite by the same files, if they were not imported otherwise."""
        if self.by_overwrite is None:
            return None
        interval = self._landed_interval(self.by_overwrite)
        if interval is None or self._landed_interval(self.token) is not None:
            return None
        return ImportedRows(interval, sum(len(table) for read in self.reads for table in read.tables()))

    def _is_as_of(self, time: int) -> bool:
        """Whether the contents equal those as of `time`, when the import was whole, so that all its rows are there.

        A restore to such a time writes nothing, and is not in the commit history.
        """
        with suppress(NotReadable), self.shard.changes(time) as changes:
            return not any(len(table) for table in changes.batches())
        return False

    def _landed_interval(self, token: Token) -> tuple[Antichain, Antichain] | None:
        one_shard = OneShard(self.transport, self.shard.view().shard_id)
        outcome = find_landed_write(one_shard, self.shard.name, token, WriteSettings().retry_s)
        return None if outcome is None else (outcome.lower, outcome.upper)

    def _write(self, token: Token) -> ImportedRows:
        """Write the rows by one commit, or find that its token has landed before."""
        count = 0

        def tables() -> Iterator[pa.Table]:
            nonlocal count
            for read in self.reads:
                for table in read.tables():
                    count += len(table)
                    yield table

        names = [read.source.argument for read in self.reads]
        info: dict[str, Any] = {"imported": [os.path.basename(name)[:100] for name in names[:NAMES_SHOWN_MAX]]}
        if self.verb == OVERWRITE:
            info[DIGEST] = self.digest
        try:
            if self.verb == INSERT:
                outcome = self.shard.insert(tables(), token=token, info=info)
                return ImportedRows((outcome.lower, outcome.upper), count)
            table = _concatenate(tables(), self.reads)
            write = self.shard.upsert if self.verb == UPSERT else self.shard.overwrite
            edited = write(table, token=token, info=info)
        except TokenReused:  # the same files, converted to columns that have changed since
            interval = self._landed_interval(token) if self.identifies_files else None
            if interval is None:
                raise
            return ImportedRows(interval, count)
        return ImportedRows((edited.lower, edited.upper), count, {"added": edited.added, "removed": edited.removed})

    def _result(self, rows: ImportedRows, outcome: str) -> dict[str, Any]:
        names = [read.source.argument for read in self.reads]
        which = {"file": names[0]} if len(names) == 1 else {"files": names}
        time = None if rows.is_empty else rows.interval[0].element
        return {"shard": self.shard.name, **which, "done": outcome, "rows": rows.rows, "time": time, **rows.counts}


@dataclass(frozen=True)
class ImportedRows:
    """The interval that a commit took, how many rows the files have, and how many rows a verb added and removed."""

    interval: tuple[Antichain, Antichain]
    rows: int
    counts: dict[str, int | None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.interval[0] == self.interval[1]

    @property
    def landed(self) -> int:
        """A time as of which the rows are there."""
        return (self.interval[0].element or 0) - self.is_empty


def _latest(commits: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """The latest commits, and the latest of each operation, in order."""
    last = {entry.operation: number for number, entry in enumerate(commits)}
    recent = range(max(0, len(commits) - NAMES_SHOWN_MAX), len(commits))
    return [commits[number] for number in sorted({*last.values(), *recent})]


def _reason(fate: Fate, rows: ImportedRows) -> str:
    """What the token of the next attempt names: the commit that undid the import, or the first that removed rows."""
    if fate.undone_by is not None:
        return f"undone at {fate.undone_by.lower}"
    return f"again after {fate.removed_by[0].lower}" if fate.removed_by else f"again from {rows.landed}"


def _concatenate(tables: Iterator[pa.Table], reads: Sequence[FileReading]) -> pa.Table:
    """Return all rows in one table. Raises InvalidUsage if they are too large for memory."""
    kept, size = [], 0
    for table in tables:
        size += table.nbytes
        if size > HELD_BYTES_MAX:
            raise reads[-1].source.refused(
                f"its rows take more than {HELD_BYTES_MAX} bytes of memory, which an upsert or an overwrite needs: "
                "split it, or write it with PySpark"
            )
        kept.append(table)
    return pa.concat_tables(kept) if kept else reads[0].written.arrow.empty_table()


def _print_result(result: dict[str, Any]) -> None:
    if not Screen.of(sys.stdout).is_terminal:
        print(json.dumps(result), flush=True)
        return
    at = f"at time {result['time']}"
    label = result["file"] if "file" in result else f"{len(result['files'])} files"
    text = f"{result['rows']:,} row{'' if result['rows'] == 1 else 's'}"
    if result["done"] == ALREADY:
        text, commits = f"{ALREADY}, {at}", result.get("removed_by", [])
        if commits is None:
            text += "; the commit history does not reach back to it, so rows may be missing: --again imports them again"
        elif commits:
            by = ", ".join(f"{entry['operation']} at time {entry['time']}" for entry in commits)
            text += f"; rows may have been removed by {by}: --again imports them again"
    else:
        text += f" {at}" if result["done"] == "imported" else ", nothing to do"
    print_line(f"{label}: {text}")
    sys.stdout.flush()
