"""The contents of a shard by the reader of the product, compared with those by a naive reader: an oracle for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from blob import Blob
from persist.commit.location import Location
from persist.copies.shard_facts import all_parts
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, PersistError
from persist.core.readable_times import latest_time
from persist.core.state import State
from persist.core.truncations_and_drops import contents
from persist.parts import DIFF, PartReader, ShardSchema, at_time, newest, valid_schemas
from persist.parts.consolidate import sort_groups
from persist.parts.read_plan import expand_bundles
from tests.support.naive_reader import Contents, NaiveReader

MEMORY_BYTES = 64 * 1024 * 1024  # of the reader of the product


def reader_differences(location: Location) -> list[str]:
    """One sentence for each part, of any shard, in which the two readers differ. No shard may change meanwhile."""
    differences = []
    for name in location.all_names(with_dropped=False):
        state = location.versions.load(name)
        if state is not None and not state.is_closed:
            differences += [f"{name}: {what}" for what in Comparison(state, location.blob).run()]
    return differences


@dataclass(frozen=True)
class Comparison:
    """Compares the sound parts of a State: first all together, and if they differ each by itself."""

    state: State
    blob: Blob

    def run(self) -> Iterator[str]:
        """What differs, one sentence for each part."""
        parts = list(self._parts())
        naive, ours = self._both(parts)
        if naive == ours:
            return
        blamed = [(part, both) for part in parts if (both := self._both([part]))[0] != both[1]]
        for (part, _), both in blamed:
            yield f"{part.key or 'inline part'}: {_difference(*both)}"
        if not blamed:
            yield f"all parts together: {_difference(naive, ours)}"

    def _parts(self) -> Iterator[tuple[Part, int]]:
        """The parts that hold rows, each with the time before which its rows are hidden."""
        for named in all_parts(self.state, self.blob):
            if named.part.bundle is None:
                hidden = 0 if named.within is None else named.within.clip or 0
                yield named.part, max(named.part.clip or 0, hidden)

    def _both(self, parts: list[tuple[Part, int]]) -> tuple[Contents, Contents | str]:
        """The contents of these parts by the naive reader and by ours, or why ours fails."""
        schemas = valid_schemas(self.state.schemas)
        current = newest(schemas)[1]
        at, since = latest_time(self.state).element, self.state.merge_since.element
        found = [Contents.of(at or 0, since or 0) for _ in range(2)]
        ours: Contents | str = found[1]
        NaiveReader(self.blob, schemas, current).read(parts, self.state.drops, found[0])
        try:
            reader = PartReader(self.blob, schemas, current, use_threads=False, memory_bytes=MEMORY_BYTES)
            self._read(reader, parts, found[1])
        except PersistError as error:
            ours = f"our reader fails: {error.message}"
        return found[0], ours

    def _read(self, reader: PartReader, parts: list[tuple[Part, int]], found: Contents) -> None:
        wanted = {str(part.id) for part, _ in parts}
        runs = list(self._runs(wanted))
        tidy = _ConsolidationCheck(reader.schema)
        for table in reader.read_range(contents(runs, self.state.drops, found.as_of), as_of=found.as_of):
            tidy.check(at_time(table, found.as_of))
            found.snapshot.add(table)
        tidy = _ConsolidationCheck(reader.schema)
        for table in reader.read_range(runs, since=found.since):
            tidy.check(table)
            found.updates.add(table)

    def _runs(self, wanted: set[str]) -> Iterator[Run]:
        """The runs of the State, bundles expanded, with these parts only."""
        readable = {named.part.id for named in all_parts(self.state, self.blob) if named.error is None}
        for batch in self.state.trace.batches:
            there = [Run(tuple(part for part in run.parts if part.id in readable)) for run in batch.runs]
            for run in expand_bundles([run for run in there if run.parts], self.blob):
                kept = tuple(part for part in run.parts if str(part.id) in wanted)
                if kept:
                    yield Run(kept)


class _ConsolidationCheck:
    """Checks that what our reader yields is consolidated and in order, which a digest does not show."""

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


def _difference(naive: Contents, ours: Contents | str) -> str:
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
