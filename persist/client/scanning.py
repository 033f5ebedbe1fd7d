"""The rows of a time that is held, as scans of other engines ask for them: some columns, of rows that may match."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from persist.client.holding_on import Hold
from persist.client.part_reading import part_reader
from persist.client.snapshot import Held, kept, leased_blobs
from persist.core.batch import Part, Run
from persist.core.errors import Expired
from persist.core.record import replace as changed
from persist.parts import Selection, ShardSchema, newest, sound_schemas
from persist.parts.expressions import may_match
from persist.parts.files import Files, Keeps
from persist.parts.reader import Finish
from persist.parts.stretches import classify

FILES_MAX = 10_000  # that another engine is told to read by itself
_GLOBS = frozenset("*?[]{}\\")  # a path that has one of these is a pattern to other engines


@dataclass(frozen=True)
class HeldRows:
    """What is selected of a time that is held: rows in `runs`. Read it as often as wanted, on any thread."""

    held: Held
    hold: Hold
    selection: Selection
    runs: tuple[Run, ...]

    @property
    def schema(self) -> ShardSchema:
        return newest(sound_schemas(self.held.view.schemas))[1]

    @property
    def kinds(self) -> pa.Schema:
        """The columns that are selected."""
        schema = self.schema
        return pa.schema([schema.arrow.field(name) for name in schema.columns(self.selection.columns)])

    def tables(
        self, columns: Sequence[str], may: Keeps | None = None, finish: Finish | None = None
    ) -> Iterator[pa.Table]:
        """The rows in key order, table by table: `columns` and `__diff`. `may`: which row groups are wanted at all.

        `finish` makes of each table what is given in its place. Raises Expired, and what reading may.
        """
        self.check()
        held, runs = self.held, self.runs
        wanted = replace(self.selection, columns=tuple(columns)).on(self.schema)
        keeps = _both(wanted.keeps, may)
        schema, reader = part_reader(held.transport, held.view, held.settings, keeps)
        if may is not None:
            runs = tuple(may_match(runs, schema, may))

        def made(table: pa.Table) -> pa.Table:
            found = wanted.apply(table)
            return found if finish is None else finish(found)

        pieces = reader.read_range(runs, as_of=held.as_of, key_range=wanted.key_range, columns=wanted.read, finish=made)
        for piece in kept(pieces, held.lease):
            if len(piece):
                yield piece
            self.check_open()

    def check(self) -> None:
        """Raises Expired unless the time is still held."""
        self.check_open()
        self.held.lease.keep()

    def check_open(self) -> None:
        if self.hold.is_closed:
            raise Expired(
                f"the scan of shard {self.held.view.name!r} as of {self.held.as_of} is closed; call shard.scan() again"
            )

    def apart(self) -> tuple[list[str], HeldRows]:
        """The paths of files whose rows are these rows as they are, and the rows that are in none of them.

        A file is so where no row of it becomes one with another, each is there once, and it has the columns of now.
        Raises what reading may.
        """
        self.check()
        held = self.held
        root = _root_of(str(held.transport.blob.url))
        whole = Selection(columns=self.selection.columns)
        if root is None or self.selection != whole:
            return [], self
        schemas = sound_schemas(held.view.schemas)
        newest_id = newest(schemas)[0]
        _, reader = part_reader(held.transport, held.view, held.settings)
        with leased_blobs(held.lease):
            runs = reader.expanded(self.runs)
            straight, _ = classify(runs, held.as_of, Files(held.transport.blob, schemas, current=self.schema))
        plain = [part for part in straight if part.schema_id == newest_id and _is_plain(part, held.as_of)][:FILES_MAX]
        paths = {part.id: os.path.join(root, part.key or "") for part in plain}
        there = {part.id: path for part in plain if _is_there(path := paths[part.id], part.size)}
        rest = (tuple(part for part in run.parts if part.id not in there) for run in runs)
        left = tuple(changed(run, parts=parts) for run, parts in zip(runs, rest, strict=True) if parts)
        return list(there.values()), replace(self, runs=left)


def _both(one: Keeps | None, other: Keeps | None) -> Keeps | None:
    if one is None or other is None:
        return one or other
    return lambda statistics: one(statistics) and other(statistics)


def _is_plain(part: Part, as_of: int) -> bool:
    is_file = not part.is_inline and part.clip is None and part.bundle is None
    return is_file and part.rows > 0 and part.time_max <= as_of and part.diff_min == part.diff_max == 1


def _root_of(url: str) -> str | None:
    """The directory of the blobs; None: they are in none of this machine."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    return path if parts.scheme == "file" and not _GLOBS.intersection(path) else None


def _is_there(path: str, size: int) -> bool:
    """Whether it is seen here: a server may have a directory of the same name on another machine."""
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False
