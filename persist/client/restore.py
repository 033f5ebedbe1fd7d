"""Restore: one commit after which the contents of a shard are those of an earlier time.

The commit takes back what was written since. That is read and staged key range after key range, and committed on the
condition that the upper is still the one that was compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.changes import Asked, Between, Named, between
from persist.client.retry import send
from persist.client.snapshot import ReadSettings, check_lease
from persist.client.transport import OneShard
from persist.client.wall_clock import instant_ms, instant_text, shown_instant
from persist.client.write import WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.antichain import MINIMUM, TIME_MAX, Antichain
from persist.core.batch import Run
from persist.core.errors import (
    Expired,
    InvalidUsage,
    NotReadable,
    Overloaded,
    PersistError,
    Unavailable,
    UnknownShard,
    UpperMismatch,
)
from persist.core.ids import Token
from persist.core.recorded import Caller
from persist.core.transitions.naming import DIFF_MAX
from persist.core.view import ShardView, ViewRequest
from persist.parts import DIFF, ShardSchema, current_schema

RETRIES_MAX = 1_000
READ_BYTES = 64 * 1024 * 1024  # memory of a restore's reads: it writes at the same time
BUFFER_BYTES = 32 * 1024 * 1024  # rows that it buffers for a part
# Why what is only told of a restore may not be known. That it happened stays true.
UNTOLD = (Expired, NotReadable, Overloaded, Unavailable, UnknownShard)
# These tell that nothing was changed, and are not told where another try of the token has landed.
REFUSED = (Expired, NotReadable, UnknownShard, UpperMismatch)


@dataclass(frozen=True)
class Restored:
    """What a restore came to.

    `as_of` is the time whose contents the shard has again, and `timestamp` the first wall clock that shows it (None:
    not known). `lower` and `upper` are the interval that the restore took, as for an insert; they are equal where
    nothing differed, so that nothing was committed. `added` and `removed` are how many rows it wrote and took away;
    None where it happened, and what it wrote cannot be read any more: it was forgotten, or the shard was dropped.
    """

    as_of: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    added: int | None
    removed: int | None

    @property
    def changed(self) -> bool:
        """Whether anything differed."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        at = self.timestamp
        return {
            "as_of": self.as_of,
            "timestamp": None if at is None else instant_text(instant_ms("timestamp", at)),
            "lower": self.lower.to_json(),
            "upper": self.upper.to_json(),
            "added": self.added,
            "removed": self.removed,
        }


class _Count:
    """How many rows are added and removed."""

    def __init__(self) -> None:
        self.added = self.removed = 0

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        """The rows, which are counted as they pass."""
        for table in tables:
            diffs = table.column(DIFF)
            added = pc.sum(pc.max_element_wise(diffs, 0)).as_py() or 0
            self.added += added
            self.removed += added - (pc.sum(diffs).as_py() or 0)
            yield from table.to_batches()


@dataclass(frozen=True)
class Restoring:
    """One restore of a shard."""

    transport: OneShard
    name: str
    to: Named
    write: WriteSettings
    read: ReadSettings
    info: bytes = b""  # what the commit history is to tell of it

    @classmethod
    def of(cls, transport: OneShard, name: str, to: Named, write: WriteSettings, read: ReadSettings) -> Restoring:
        """With settings by which it holds a bounded amount of memory."""
        buffered = replace(write, part_bytes_target=min(BUFFER_BYTES, write.part_bytes_target))
        return cls(transport, name, to, buffered, replace(read, memory_bytes=min(READ_BYTES, read.memory_bytes)))

    def run(self, token: Token | None, retries: int) -> Restored:
        """Raises what `Shard.restore` says."""
        as_of = self.to.time
        assert as_of is not None
        if token is None:
            return self._tried(as_of, None, retries)
        if (landed := self._landed(as_of, token)) is not None:
            return self._counted(as_of, landed)
        try:
            return self._tried(as_of, token, retries)
        except REFUSED:
            if (landed := self._landed(as_of, token)) is None:  # another try of the token may have landed meanwhile
                raise
            return self._counted(as_of, landed)

    def _tried(self, as_of: int, token: Token | None, retries: int) -> Restored:
        check_complete(self.name, as_of, self.transport.view(self.name, ViewRequest(with_batches=False)))
        asked = Asked(wait_s=0.0, purpose=f"restore to {as_of}")
        with between(self.transport, self.name, as_of, None, asked, self.read) as found:
            try:
                return self._restored(found, token, retries)
            finally:
                found.held.lease.close()

    def _restored(self, found: Between, token: Token | None, retries: int) -> Restored:
        as_of, view, count = found.start, found.held.view, _Count()
        runs: tuple[Run, ...] = ()
        lead_to = as_of  # what is staged leads there, from the latest time that was looked at
        for left in range(retries, -1, -1):
            latest = found.end
            back = replace(found, start=latest, end=lead_to).splits(1, None)[0]
            runs = (*runs, *self._staged(view, count.of(self._writable(as_of, back.read(self.transport)))))
            first_try = lead_to == as_of
            if not runs or not (first_try or self._differs(found)):
                return self._unchanged(as_of, view, token)
            handle = self._writer(view)
            try:
                done = handle.commit_restore(runs, as_of, view.upper, token=token)
            except UpperMismatch as error:
                if error.details.get("expected") is None:  # no time is left
                    raise
                if not left:
                    raise _overtaken(self.name, as_of, error) from error
            else:
                with suppress(PersistError):
                    handle.close()
                if not first_try or done.lower != view.upper:  # other rows landed than those of one comparison
                    return self._counted(as_of, done)
                return Restored(as_of, self._timestamp(as_of), done.lower, done.upper, count.added, count.removed)
            lead_to, view = latest, self.transport.view(self.name, ViewRequest())
            check_complete(self.name, as_of, view)
            check_lease(view, as_of, found.held.lease)
            found = replace(found, held=replace(found.held, view=view), end=(view.upper.element or 0) - 1)
        raise AssertionError("the last try returns or raises")

    def _writable(self, as_of: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The rows. Raises InvalidUsage where one commit cannot write a multiplicity."""
        for table in tables:
            found = pc.min_max(table.column(DIFF)).as_py()
            if len(table) and (most := max(-found["min"], found["max"])) > DIFF_MAX:
                raise InvalidUsage(
                    f"a row of shard {self.name!r} was {most} times more or less there at time {as_of}, and one "
                    f"commit can write at most {DIFF_MAX} of it; restore in steps, to times between, or insert the "
                    "difference in several inserts"
                )
            yield table

    def _differs(self, found: Between) -> bool:
        """Whether the contents at the two times differ. What was staged in several tries may cancel out."""
        return any(table.num_rows for table in found.splits(1, None)[0].read(self.transport))

    def _unchanged(self, as_of: int, view: ShardView, token: Token | None) -> Restored:
        """What is told where nothing differs: maybe since another try of the token has landed meanwhile."""
        if token is not None and (landed := self._landed(as_of, token)) is not None:
            return self._counted(as_of, landed)
        return Restored(as_of, self._timestamp(as_of), view.upper, view.upper, 0, 0)

    def _staged(self, view: ShardView, batches: Iterator[pa.RecordBatch]) -> tuple[Run, ...]:
        return self._writer(view).stage_for_one_commit(batches, None)

    def _writer(self, view: ShardView | None) -> WriteHandle:
        """A writer of rows as the view has them; None: of no rows."""

        def schema() -> tuple[int, ShardSchema]:
            return current_schema((view or self.transport.view(self.name, ViewRequest(with_batches=False))).schemas)

        caller = Caller(purpose=f"restore to {self.to.time}", info=self.info)
        return WriteHandle(self.transport, self.name, schema, self.write, caller=caller)

    def _landed(self, as_of: int, token: Token) -> c.Appended | None:
        """Where the restore has happened already, the interval that it took. A dropped shard tells it too.

        The upper that it asks for is never that of a shard with a complete time: so this changes nothing.
        """
        try:
            return self._writer(None).commit_restore((), as_of, MINIMUM, token=token)
        except UpperMismatch:
            return None

    def _counted(self, as_of: int, done: c.Appended) -> Restored:
        """What is told of a restore that has happened. Its rows are counted where they were written."""
        count, time = _Count(), done.lower.element or 0
        try:
            with between(self.transport, self.name, time - 1, time, Asked(wait_s=0.0), self.read) as found:
                for _ in count.of(found.splits(1, None)[0].read(self.transport)):
                    pass
            found.held.lease.close()
        except UNTOLD:
            return Restored(as_of, self._timestamp(as_of), done.lower, done.upper, None, None)
        return Restored(as_of, self._timestamp(as_of), done.lower, done.upper, count.added, count.removed)

    def _timestamp(self, as_of: int) -> datetime | None:
        if self.to.timestamp is not None:
            return self.to.timestamp
        try:
            found = send(self.transport, self.name, c.TimeShown(as_of), self.read.retry_s)
        except UNTOLD:
            return None
        assert isinstance(found, c.ShownFrom)
        return None if found.at_ms is None else shown_instant(found.at_ms)


def check_complete(name: str, as_of: int | None, view: ShardView) -> int:
    """The upper of a shard that can be restored to `as_of`. Raises UpperMismatch, InvalidUsage."""
    if as_of is None:
        raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
    if view.upper.element is None:
        raise UpperMismatch(f"shard {name!r} is closed: nothing can be restored in it", expected=None, actual=[])
    if view.upper.element > TIME_MAX:
        raise UpperMismatch(
            f"shard {name!r} has no time left: its upper is {view.upper}", expected=None, actual=view.upper.to_json()
        )
    if view.upper.less_equal(as_of):
        raise InvalidUsage(
            f"time {as_of} of shard {name!r} is not complete: its upper is {view.upper}; give an earlier one"
        )
    return view.upper.element


def _overtaken(name: str, as_of: int, error: UpperMismatch) -> UpperMismatch:
    return UpperMismatch(
        f"somebody else wrote to shard {name!r} while it was restored to {as_of}; nothing was changed: look at the "
        "shard, then restore it again, or give retries",
        **error.details,
    )
