"""Our reader's contents of a shard against those of a naive one, and the order of the rows in its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from blob import Blob
from persist.commit.examine import all_parts
from persist.copies.found import Kind
from persist.copies.naive import Contents, NaiveReader
from persist.copies.row_order import RowOrder
from persist.core.batch import Part, Run
from persist.core.drops import contents
from persist.core.errors import Corruption, PersistError, Unavailable
from persist.core.state import State, latest_time
from persist.formats.store_errors import translated_but_missing
from persist.parts import DIFF, PartReader, ShardSchema, at_time, newest, sound_schemas
from persist.parts.bundles import expanded
from persist.parts.consolidate import sort_groups

MEMORY_BYTES = 64 * 1024 * 1024  # of our reader
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)

Note = Callable[[Kind, str, str], None]  # what is wrong, and the key of the blob


@dataclass(frozen=True)
class Comparison:
    """Compares the parts of a State that `takes` names by their ids. What is wrong is noted.

    Every method raises BlobNotFound where a part is not there, which may have been collected, and Unavailable. Memory:
    `MEMORY_BYTES`, a row group of a part, and what the State has of its parts.
    """

    state: State
    blob: Blob
    takes: Callable[[str], bool]
    note: Note

    def run(self) -> bool:
        """Whether there was something to compare."""
        order = RowOrder(self.blob, sound_schemas(self.state.schemas))
        sound = [(part, clip) for part, clip in self._parts() if self._is_in_order(part, order)]
        if not sound:
            return False
        naive, ours = self._both(sound)
        if naive == ours:
            return True
        before = [naive, ours]
        blamed = [(one, found) for one in sound if (found := self._both([one]))[0] != found[1]]
        for (part, _), found in blamed:
            self.note(Kind.CONTENTS, f"{_named(part)}: {_differing(*found)}", part.key or "")
        if not blamed:
            self.note(Kind.CONTENTS, f"all parts together: {_differing(*before)}", "")
        return True

    def _parts(self) -> Iterator[tuple[Part, int]]:
        """The parts that hold rows, each with the time before which its rows are hidden."""
        for named in all_parts(self.state, self.blob):
            if named.part.bundle is None and self.takes(str(named.part.id)):
                hidden = 0 if named.within is None else named.within.clip or 0
                yield named.part, max(named.part.clip or 0, hidden)

    def _is_in_order(self, part: Part, order: RowOrder) -> bool:
        if part.schema_id not in order.schemas:
            return False  # the State tells it
        try:
            with translated_but_missing():
                order.check(part)
        except Corruption as error:
            self.note(Kind.ORDER, error.message, part.key or "")
            return False
        return True

    def _both(self, parts: list[tuple[Part, int]]) -> tuple[Contents | str, Contents | str]:
        """What the naive reader and ours find in these parts; why, where one cannot read them."""
        schemas = sound_schemas(self.state.schemas)
        current = newest(schemas)[1]
        at, since = latest_time(self.state).element, self.state.merge_since.element
        found = [Contents.of(at or 0, since or 0) for _ in range(2)]
        naive: Contents | str = found[0]
        ours: Contents | str = found[1]
        try:
            with translated_but_missing():
                NaiveReader(self.blob, schemas, current).read(parts, self.state.drops, found[0])
        except Unavailable:
            raise
        except (PersistError, *_UNREADABLE) as error:
            naive = f"the naive reader fails: {error}"
        try:
            with translated_but_missing():
                reader = PartReader(self.blob, schemas, current, use_threads=False, memory_bytes=MEMORY_BYTES)
                self._read(reader, parts, found[1])
        except Unavailable:
            raise
        except PersistError as error:
            ours = f"our reader fails: {error.message}"
        return naive, ours

    def _read(self, reader: PartReader, parts: list[tuple[Part, int]], found: Contents) -> None:
        wanted = {str(part.id) for part, _ in parts}
        runs = list(self._runs(wanted))
        tidy = _Tidy(reader.schema)
        for table in reader.read_range(contents(runs, self.state.drops, found.as_of), as_of=found.as_of):
            tidy.check(at_time(table, found.as_of))
            found.snapshot.add(table)
        tidy = _Tidy(reader.schema)
        for table in reader.read_range(runs, since=found.since):
            tidy.check(table)
            found.updates.add(table)

    def _runs(self, wanted: set[str]) -> Iterator[Run]:
        """The runs of the State, bundles expanded, with these parts only."""
        readable = {named.part.id for named in all_parts(self.state, self.blob) if named.failed is None}
        for batch in self.state.trace.batches:
            there = [Run(tuple(part for part in run.parts if part.id in readable)) for run in batch.runs]
            for run in expanded([run for run in there if run.parts], self.blob):
                kept = tuple(part for part in run.parts if str(part.id) in wanted)
                if kept:
                    yield Run(kept)


class _Tidy:
    """That what our reader gives is added up and in order, which a digest does not tell."""

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._last: pa.Table | None = None

    def check(self, table: pa.Table) -> None:
        """Raises Corruption."""
        table = table.select(self._schema.updates_schema.names)
        table = table.cast(pa.schema([table.schema.field(name).with_nullable(True) for name in table.column_names]))
        order, firsts = sort_groups(
            table if self._last is None else pa.concat_tables([self._last, table]), self._schema
        )
        if order is not None or not firsts.all():
            raise Corruption("it gives a row twice, or rows out of order")
        if not pc.all(pc.not_equal(table.column(DIFF), 0)).as_py():
            raise Corruption("it gives a row no times")
        self._last = table.slice(table.num_rows - 1)


def _named(part: Part) -> str:
    return f"inline part {part.id}" if part.key is None else f"part {part.id}"


def _differing(naive: Contents | str, ours: Contents | str) -> str:
    if isinstance(naive, str):
        return naive
    if isinstance(ours, str):
        return ours
    if naive.snapshot != ours.snapshot:
        return (
            f"as of {naive.as_of} a naive reader finds {naive.snapshot.rows} rows with the digest "
            f"{naive.snapshot.digest:016x}, and ours {ours.snapshot.rows} with {ours.snapshot.digest:016x}"
        )
    return (
        f"from the time {naive.since} on a naive reader finds other updates than ours: the digests are "
        f"{naive.updates.digest:016x} and {ours.updates.digest:016x}"
    )
