"""`persist import NAME FILE...`: rows of files become rows of a shard, exactly once, and what undid it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from persist.cli import row_files
from persist.cli.connection_args import add_client_arguments, check_given, client_of
from persist.cli.long_running import ended_by_sigterm
from persist.cli.row_files import RowPiece, RowSource, first_bad
from persist.cli.schema import schema_of
from persist.cli.terminal import ProgressBar, Screen, plain
from persist.client.arguments import columns_of
from persist.client.commit_info import HistoryEntry
from persist.client.connect import Client
from persist.client.optimistic_edit import landed
from persist.client.shard import Shard
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteSettings
from persist.core.audit_log import PAGE_MAX
from persist.core.errors import InvalidUsage, NotReadable, TokenReused, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import Token, check_shard_name, parse, token_of_key
from persist.parts import DIFF, TIME, ShardSchema

# What later commits did to the rows of an import, as the commit history tells it.


INSERT, UPSERT, OVERWRITE = "insert", "upsert", "overwrite"
ENTRIES_MAX = 1_000_000  # that are read back; an import that lies further back counts as out of reach
TRUNCATIONS = ("truncate", "drop_before")
ADDING = ("insert", "append", "compare_and_append")
REPAIR = "repair"  # which may have lost rows
DIGEST = "digest"  # in what an overwrite by an import says of itself: stands for its files and how they are read
WITHOUT_COUNT = (OVERWRITE, "drop_before", REPAIR)  # operations that may change rows and add none


@dataclass(frozen=True)
class Fate:
    """What became of an import.

    `undone_by` is the commit that undid it as a whole. `removed_by` are commits that may have removed some of its rows,
    in their order. `is_known`: the history reaches back to the import. `overwrite` is the commit that put the rows of
    the same files in the place of everything, so that they are there since it.
    """

    undone_by: HistoryEntry | None = None
    removed_by: tuple[HistoryEntry, ...] = ()
    is_known: bool = True
    overwrite: HistoryEntry | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no row of it was removed."""
        return self.is_known and self.undone_by is None and not self.removed_by


WHOLE = Fate()


def fate_of(shard: Shard, verb: str, landed: int, digest: str | None = None) -> Fate:
    """What became of an import by `verb` that is there as of the time `landed`. Raises what `Shard.history` does.

    `digest` stands for its files: an overwrite by the same ones leaves its rows there.
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
    """What became of the import by these commits, which came after it, in their order. Pure."""
    times, fates = [landed], [WHOLE]

    def at(time: int) -> Fate:
        """What had become of it as of a time that is not before it."""
        return fates[bisect_right(times, time) - 1]

    for entry in later:
        if _changes_rows(entry) and not _is_until(entry, landed):
            times.append(times[-1] if entry.operation == REPAIR else entry.lower or 0)
            is_same = entry.operation == OVERWRITE and digest is not None and (entry.info or {}).get(DIGEST) == digest
            fates.append(Fate(overwrite=entry) if is_same else _following(verb, landed, entry, fates[-1], at))
    return fates[-1]


def _following(verb: str, landed: int, entry: HistoryEntry, now: Fate, at: Callable[[int], Fate]) -> Fate:
    """What became of the import by this commit. What had become of it before was `now`."""
    undone = now if now.undone_by is not None else replace(now, undone_by=entry, removed_by=())
    partly = now if now.undone_by is not None else replace(now, removed_by=(*now.removed_by, entry))
    if entry.operation == "restore" and entry.point is not None:
        return undone if entry.point < landed else at(entry.point)
    if verb == OVERWRITE or entry.operation == OVERWRITE:
        return undone
    if entry.operation in TRUNCATIONS and entry.point is not None and "retention" not in (entry.info or {}):
        is_beyond = entry.point > landed and at(entry.point - 1).undone_by is None
        return undone if is_beyond else partly  # rows equal to these may have been there before the cut
    if entry.operation in ADDING and entry.retractions == 0:
        return now
    return partly


def _is_until(entry: HistoryEntry, landed: int) -> bool:
    """Whether the entry is of rows that were written by that time. A repair is of batches from before it."""
    is_repair = entry.operation == REPAIR
    return _changes_rows(entry) and not is_repair and entry.lower is not None and entry.lower <= landed


def _changes_rows(entry: HistoryEntry) -> bool:
    return bool(entry.rows) or entry.operation in WITHOUT_COUNT


# `persist import NAME FILE...`: the rows of files become rows of a shard, exactly once however often it is run.
#
# One commit a file, or one for all. Its token follows from the bytes of the file and from what is done with them, so
# that a second run writes nothing. Where a later commit has undone the import as a whole, it is written again: by a
# token that also names that commit, so that this happens once too.


HELD_BYTES_MAX = 2 * 1024**3  # of rows of an upsert or an overwrite, which are held in memory
ALREADY = "already imported"
NAMES_TOLD = 20  # of files, in the commit history; of commits that removed rows
ROUNDS_MAX = 1_000  # imports of one file that were undone, each by another commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV, Parquet, NDJSON or Arrow; - is standard input")
    add_client_arguments(parser)
    parser.add_argument("--format", choices=row_files.FORMATS, help="if the names of the files do not tell")
    parser.add_argument("--columns", metavar="A,B", help="take these columns of the files; else all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--upsert", action="store_true", help="put rows by their keys, in the place of those of these keys"
    )
    how.add_argument("--overwrite", action="store_true", help="put rows in the place of everything that is there")
    parser.add_argument("--one-commit", action="store_true", help="all files at one time, or none; else one by one")
    parser.add_argument(
        "--create", action="store_true", help="make the shard if it is missing, with the file's columns"
    )
    parser.add_argument("--key", metavar="A,B", help="with --create: by which columns rows are ordered and found")
    parser.add_argument(
        "--null", metavar="TEXT", action="append", default=[], help="CSV: cells of this text without quotes are null"
    )
    parser.add_argument("--token", metavar="TEXT", help="what stands for this import; else what is in the files")
    parser.add_argument(
        "--again", action="store_true", help="load also what was imported before and may have lost rows since"
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    bar = ProgressBar(sys.stderr) if sys.stderr.isatty() else None
    try:
        with ended_by_sigterm(), row_files.opened(arguments.files, arguments.format, arguments.null) as sources:
            fresh = None
            if arguments.create:
                fresh = schema_of(sources[0].inferred(_progress(bar, sources[0])), columns_of(arguments.key))
            with client_of(arguments, must_exist=fresh is None) as client:
                _import(client, arguments, sources, fresh, bar)
    finally:
        if bar is not None:
            bar.clear()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    check_shard_name(arguments.name)
    check_given(arguments, "columns", "key", "token")
    if columns_of(arguments.columns) == []:
        raise InvalidUsage("--columns names none")
    if arguments.create != (arguments.key is not None):
        raise InvalidUsage("--create and --key go together: --create --key id makes the shard if it is missing")
    if len(arguments.files) > 1 and not arguments.one_commit:
        if arguments.overwrite:
            raise InvalidUsage("each file would take the place of the one before: give one file, or --one-commit")
        if arguments.token is not None:
            raise InvalidUsage("--token stands for one commit: give one file, or --one-commit")


def _import(
    client: Client,
    arguments: argparse.Namespace,
    sources: Sequence[RowSource],
    fresh: ShardSchema | None,
    bar: ProgressBar | None,
) -> None:
    verb = UPSERT if arguments.upsert else OVERWRITE if arguments.overwrite else INSERT
    asked = columns_of(arguments.columns)
    shard, schema = _opened(client, arguments.name, fresh)
    reads = [FileReading(source, schema, Taken.of(source, schema, asked, verb, bar), bar) for source in sources]
    if shard is None:
        checked = 1 if sources[0].is_inferred_by_all else 0
        for one in reads[checked:]:  # a shard is not made for rows that it cannot take
            for _ in one.tables():
                pass
        shard = client.create_shard(arguments.name, schema.arrow, schema.key)
    if verb == UPSERT and arguments.one_commit:
        _check_alike(reads)
    for group in [reads] if arguments.one_commit else [[one] for one in reads]:
        digest = str(_token(arguments, "", asked, group, is_given=False))
        by_overwrite = None
        if verb != OVERWRITE and arguments.token is None:
            by_overwrite = _token(arguments, OVERWRITE, asked, group)
        token = _token(arguments, verb, asked, group)
        importing = Import(client.transport, shard, verb, group, token, digest, by_overwrite, arguments.token is None)
        told = importing.run(again=arguments.again)
        if bar is not None:
            bar.clear()
        _tell(told)


def _check_alike(reads: Sequence[FileReading]) -> None:
    """Raise InvalidUsage where files whose rows are upserted by one commit differ in their columns."""
    names = reads[0].taken.given.arrow.names
    for one in reads[1:]:
        if (others := one.taken.given.arrow.names) != names:
            raise one.source.refused(
                f"it has the columns {', '.join(others)}, where {reads[0].source.name} has {', '.join(names)}: one "
                "upsert has one set of columns; import them without --one-commit, or say with --columns which are taken"
            )


def _opened(client: Client, name: str, fresh: ShardSchema | None) -> tuple[Shard | None, ShardSchema]:
    """The shard and its columns; without one, those that it will have. Raises UnknownShard, InvalidUsage."""
    try:
        shard = client.shard(name)
    except UnknownShard:
        if fresh is None:
            raise
        return None, fresh
    if fresh is not None and fresh.key != shard.schema.key:
        there = ",".join(shard.schema.key)
        raise InvalidUsage(
            f"shard {name!r} is there already, with the key {there}: give --key {there}, or another name"
        )
    return shard, shard.schema


@dataclass(frozen=True)
class Taken:
    """Which columns of a file are taken; `names` None: all of the shard's. `given`: the others keep their values."""

    names: tuple[str, ...] | None
    given: ShardSchema
    counts: bool  # whether rows may say how often they come

    @classmethod
    def of(
        cls, source: RowSource, schema: ShardSchema, asked: list[str] | None, verb: str, bar: ProgressBar | None
    ) -> Taken:
        """Raises InvalidUsage where the columns of the file are not those of the shard."""
        if asked is not None:
            schema.columns(asked)
        names = source.names
        if names is None and asked is None and verb == UPSERT:
            names = source.same_names(_progress(bar, source)) or tuple(schema.arrow.names)
        if names is None:
            taken = tuple(schema.arrow.names if asked is None else asked)
        else:
            for name in names if asked is None else ():
                if name == TIME:
                    raise source.refused(_HAS_TIME)
                if name != DIFF and name not in schema.arrow.names:
                    raise source.refused(
                        f"it has a column {name!r}, which the shard has not: its columns are "
                        f"{', '.join(schema.arrow.names)}; --columns says which are taken"
                    )
            for name in asked or ():
                if name not in names:
                    raise source.refused(f"it has no column {name!r}: its columns are {', '.join(names)}")
            taken = tuple(name for name in schema.arrow.names if name in (names if asked is None else asked))
        for one in schema.arrow:
            may_lack = one.nullable or one.name in schema.defaults or verb == UPSERT
            if one.name not in taken and (one.name in schema.key or not may_lack):
                raise source.refused(f"it lacks column {one.name!r}, which each row must have")
        if verb == UPSERT:
            given = ShardSchema(pa.schema([one for one in schema.arrow if one.name in taken]), schema.key)
        else:
            given = schema
        if names is None:
            return cls(None if asked is None else taken, given, verb == INSERT)
        return cls((*taken, DIFF) if DIFF in names else taken, given, verb == INSERT)


_HAS_TIME = f"it has a column {TIME}, but an import takes the next time: leave it out with --columns"


@dataclass(frozen=True)
class FileReading:
    """A file whose rows are read for a shard with this schema."""

    source: RowSource
    schema: ShardSchema
    taken: Taken
    bar: ProgressBar | None

    def tables(self) -> Iterator[pa.Table]:
        """The rows, in the columns that are given and perhaps `__diff`. Raises InvalidUsage, which tells the line."""
        for piece in self.source.pieces(self.schema, self.taken.names, _progress(self.bar, self.source)):
            yield self._conformed(piece)

    def _conformed(self, piece: RowPiece) -> pa.Table:
        given, table = self.taken.given, piece.table
        if TIME in table.column_names:
            raise self.source.refused(_HAS_TIME)
        if DIFF in table.column_names and not self.taken.counts:
            raise self.source.refused(f"it has a column {DIFF}: only rows that are added may say how often")
        for one in given.arrow:
            if one.name not in table.column_names:
                table = table.append_column(one, given.absent(one.name, len(table)))
        try:
            found = given.conform(table, 0)
        except InvalidUsage as error:
            if _refused(given, table.slice(0, 0)):
                raise self.source.refused(error.message) from error
            bad = first_bad(len(table), lambda count: _refused(given, table.slice(0, count)))
            raise self.source.refused(f"{piece.place(bad)}: {error.message}") from error
        return found.drop_columns([TIME] if DIFF in table.column_names else [TIME, DIFF])


def _progress(bar: ProgressBar | None, source: RowSource) -> Callable[[int], None]:
    """Is told how many bytes of a file were read."""

    def told(done: int) -> None:
        if bar is not None:
            bar(source.name, done, source.size)

    return told


def _refused(schema: ShardSchema, table: pa.Table) -> bool:
    try:
        schema.conform(table, 0)
    except InvalidUsage:
        return True
    return False


def _token(
    arguments: argparse.Namespace,
    verb: str,
    columns: list[str] | None,
    reads: Sequence[FileReading],
    *,
    is_given: bool = True,
) -> Token:
    """What stands for this commit: what was given, or what is read and what is done with it.

    `is_given` False leaves out what was given.
    """
    given = arguments.token if is_given else None
    if given is not None:
        try:
            return parse(Token, given)
        except InvalidUsage:
            return token_of_key(given)
    said = ["persist import", verb, columns, [(one.source.form, one.source.digest) for one in reads]]
    if arguments.null:
        said.append(sorted(arguments.null))
    return token_of_key(json.dumps(said))


@dataclass(frozen=True)
class Import:
    """Files whose rows are written by one commit. `token` stands for it.

    `digest` stands for the files and how they are read, whatever the verb. `by_overwrite` is the token of an overwrite
    by the same files, which is an import of them too (None: it is not looked for). `stands`: the token stands for the
    files, whatever columns the shard has by now.
    """

    transport: Transport
    shard: Shard
    verb: str
    reads: Sequence[FileReading]
    token: Token
    digest: str
    by_overwrite: Token | None
    stands: bool

    def run(self, *, again: bool) -> dict[str, Any]:
        """Write the rows, unless they were written and are not undone; what is told of it.

        `again`: also where some of them may be gone.
        """
        before = self.shard.upper()
        found = self._overwritten() or self._written(self.token)
        if not found.interval[0] < before:
            return self._told(found, "nothing to do" if found.is_empty else "imported")
        since: list[str] = []  # what the token names besides the import
        for _ in range(ROUNDS_MAX):
            landed = found.landed
            fate = fate_of(self.shard, self.verb, landed, self.digest)
            if fate.overwrite is not None:
                lower, upper = fate.overwrite.lower, fate.overwrite.upper
                found = replace(found, interval=(Antichain(lower), Antichain(upper)))
            if fate.is_whole:
                break
            since.append(_name_of(fate, found))
            token = token_of_key(json.dumps(["persist import again", self.token, since]))
            interval = self._landed(token)
            if interval is not None:
                found = replace(found, interval=interval)
                continue
            if fate.undone_by is None and not again:
                return {**self._told(found, ALREADY), "removed_by": _removed_by(fate)}
            if fate.undone_by is not None and self.verb == INSERT:
                was_whole = {landed, found.landed, (fate.undone_by.lower or 0) - 1}
                if any(map(self._is_as_of, was_whole)):
                    break
            found = self._written(token)
            return self._told(found, "nothing to do" if found.is_empty else "imported")
        return self._told(found, ALREADY)

    def _overwritten(self) -> ImportedRows | None:
        """What an overwrite by the same files has written, where that alone has loaded them."""
        if self.by_overwrite is None:
            return None
        interval = self._landed(self.by_overwrite)
        if interval is None or self._landed(self.token) is not None:
            return None
        return ImportedRows(interval, sum(len(table) for one in self.reads for table in one.tables()))

    def _is_as_of(self, time: int) -> bool:
        """Whether the contents are those of a time at which the import was whole, so that its rows are all there.

        A restore to such a time writes nothing then, and is not in the commit history.
        """
        with suppress(NotReadable), self.shard.changes(time) as changes:
            return not any(len(table) for table in changes.batches())
        return False

    def _landed(self, token: Token) -> tuple[Antichain, Antichain] | None:
        one = OneShard(self.transport, self.shard.view().shard_id)
        done = landed(one, self.shard.name, token, WriteSettings().retry_s)
        return None if done is None else (done.lower, done.upper)

    def _written(self, token: Token) -> ImportedRows:
        """Write the rows by one commit, or find that its token has landed."""
        count = 0

        def tables() -> Iterator[pa.Table]:
            nonlocal count
            for one in self.reads:
                for table in one.tables():
                    count += len(table)
                    yield table

        names = [one.source.given for one in self.reads]
        info: dict[str, Any] = {"imported": [os.path.basename(name)[:100] for name in names[:NAMES_TOLD]]}
        if self.verb == OVERWRITE:
            info[DIGEST] = self.digest
        try:
            if self.verb == INSERT:
                done = self.shard.insert(tables(), token=token, info=info)
                return ImportedRows((done.lower, done.upper), count)
            held = _held(tables(), self.reads)
            write = self.shard.upsert if self.verb == UPSERT else self.shard.overwrite
            edited = write(held, token=token, info=info)
        except TokenReused:  # the same files, of which the columns of now make other rows
            interval = self._landed(token) if self.stands else None
            if interval is None:
                raise
            return ImportedRows(interval, count)
        return ImportedRows((edited.lower, edited.upper), count, {"added": edited.added, "removed": edited.removed})

    def _told(self, found: ImportedRows, done: str) -> dict[str, Any]:
        names = [one.source.given for one in self.reads]
        which = {"file": names[0]} if len(names) == 1 else {"files": names}
        time = None if found.is_empty else found.interval[0].element
        return {"shard": self.shard.name, **which, "done": done, "rows": found.rows, "time": time, **found.counts}


@dataclass(frozen=True)
class ImportedRows:
    """The interval that a commit took, how many rows the files have, and what a verb added and removed."""

    interval: tuple[Antichain, Antichain]
    rows: int
    counts: dict[str, int | None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.interval[0] == self.interval[1]

    @property
    def landed(self) -> int:
        """A time as of which the import is there."""
        return (self.interval[0].element or 0) - self.is_empty


def _name_of(fate: Fate, found: ImportedRows) -> str:
    """What the token of the next try names: the commit that undid the import, or the first one that removed rows."""
    if fate.undone_by is not None:
        return f"undone at {fate.undone_by.lower}"
    return f"again after {fate.removed_by[0].lower}" if fate.removed_by else f"again from {found.landed}"


def _removed_by(fate: Fate) -> list[dict[str, Any]] | None:
    """The commits that may have removed rows; None: the history does not reach back."""
    if not fate.is_known:
        return None
    return [{"time": one.lower, "operation": one.operation} for one in fate.removed_by[:NAMES_TOLD]]


def _held(tables: Iterator[pa.Table], reads: Sequence[FileReading]) -> pa.Table:
    """The rows in memory. Raises InvalidUsage where they are too many."""
    found, size = [], 0
    for table in tables:
        size += table.nbytes
        if size > HELD_BYTES_MAX:
            raise reads[-1].source.refused(
                f"its rows take more than {HELD_BYTES_MAX} bytes of memory, as an upsert or an overwrite needs: "
                "cut it, or write it by PySpark"
            )
        found.append(table)
    return pa.concat_tables(found) if found else reads[0].taken.given.arrow.empty_table()


def _tell(told: dict[str, Any]) -> None:
    if not Screen.of(sys.stdout).is_terminal:
        print(json.dumps(told), flush=True)
        return
    at = f"at time {told['time']}"
    what = told["file"] if "file" in told else f"{len(told['files'])} files"
    rows = f"{told['rows']:,} row{'' if told['rows'] == 1 else 's'}"
    said = {"imported": f"{rows} {at}", ALREADY: f"{ALREADY}, {at}{_tell_removed(told)}"}.get(
        told["done"], f"{rows}, nothing to do"
    )
    print(f"{plain(what)}: {said}", flush=True)


def _tell_removed(told: dict[str, Any]) -> str:
    if "removed_by" not in told:
        return ""
    commits = told["removed_by"]
    if commits is None:
        return "; the commit history does not reach back, so rows may be gone: --again loads them again"
    by = ", ".join(f"{one['operation']} at time {one['time']}" for one in commits)
    return f"; rows may be gone by {by}: --again loads them again"
