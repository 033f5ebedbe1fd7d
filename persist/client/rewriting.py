"""What a restore and a truncation have in common: rows that are worked out from two times of a shard, and committed

at the next time on the condition that the upper is still the one that was looked at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.changes import Asked, Named, between
from persist.client.retry import send
from persist.client.snapshot import ReadSettings
from persist.client.transport import OneShard
from persist.client.wall_clock import shown_instant
from persist.client.write import WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.antichain import MINIMUM, TIME_MAX, Antichain
from persist.core.batch import Run
from persist.core.errors import (
    Expired,
    InvalidUsage,
    NotReadable,
    PersistError,
    UnknownShard,
    UpperMismatch,
)
from persist.core.ids import Token
from persist.core.recorded import Caller
from persist.core.transitions.naming import DIFF_MAX
from persist.core.view import ShardView, ViewRequest
from persist.parts import DIFF, ShardSchema, current_schema

RETRIES_MAX = 1_000
READ_BYTES = 64 * 1024 * 1024  # memory of the reads: it writes at the same time
BUFFER_BYTES = 32 * 1024 * 1024  # rows that it buffers for a part

# These tell that nothing was changed, and are not told where another try of the token has landed.
REFUSED = (Expired, NotReadable, UnknownShard, UpperMismatch)
_Told = TypeVar("_Told")


class Count:
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
class Rewriting(ABC):
    """One of them. `to` is the time that it is about."""

    what: ClassVar[str]  # "restore to 7"
    done: ClassVar[str]  # "restored to 7"

    transport: OneShard
    name: str
    to: Named
    write: WriteSettings
    read: ReadSettings
    info: bytes = b""  # what the commit history is to tell of it

    @classmethod
    def of(
        cls, transport: OneShard, name: str, to: Named, write: WriteSettings, read: ReadSettings, **more: Any
    ) -> Self:
        """With settings by which it holds a bounded amount of memory, and with `more` fields."""
        buffered = replace(write, part_bytes_target=min(BUFFER_BYTES, write.part_bytes_target))
        bounded = replace(read, memory_bytes=min(READ_BYTES, read.memory_bytes))
        return cls(transport, name, to, buffered, bounded, **more)

    @property
    def purpose(self) -> str:
        """What lists of readers and the commit history tell of it."""
        return f"{self.what} {self.to.time}"

    @abstractmethod
    def _commit(
        self, handle: WriteHandle, runs: tuple[Run, ...], as_of: int, expected: Antichain, token: Token | None
    ) -> c.Appended:
        """Commit the staged rows."""

    def _writable(self, as_of: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The rows. Raises InvalidUsage where one commit cannot write a multiplicity."""
        for table in tables:
            found = pc.min_max(table.column(DIFF)).as_py()
            if len(table) and (most := max(-found["min"], found["max"])) > DIFF_MAX:
                raise InvalidUsage(self._too_often(as_of, most))
            yield table

    def _committed(
        self, runs: tuple[Run, ...], as_of: int, view: ShardView, token: Token | None, left: int
    ) -> c.Appended | None:
        """The commit of the staged rows; None: somebody else wrote since the view, and tries are `left`.

        Raises UpperMismatch where none is, or no time.
        """
        handle = self._writer(view)
        try:
            done = self._commit(handle, runs, as_of, view.upper, token)
        except UpperMismatch as error:
            if error.details.get("expected") is None:  # no time is left
                raise
            if not left:
                raise self._overtaken(error) from error
            return None
        with suppress(PersistError):
            handle.close()
        return done

    @abstractmethod
    def _too_often(self, as_of: int, most: int) -> str:
        """Why a row that is there so often cannot be written by one commit."""

    def _writable_upper(self) -> Antichain:
        """Raises UpperMismatch where nothing can be written."""
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        check_open(self.name, view, self.done.split()[0])
        return view.upper

    def _staged(self, view: ShardView, batches: Iterator[pa.RecordBatch]) -> tuple[Run, ...]:
        return self._writer(view).stage_for_one_commit(batches, None)

    def _writer(self, view: ShardView | None) -> WriteHandle:
        """A writer of rows as the view has them; None: of no rows."""

        def schema() -> tuple[int, ShardSchema]:
            return current_schema((view or self.transport.view(self.name, ViewRequest(with_batches=False))).schemas)

        caller = Caller(purpose=self.purpose, info=self.info)
        return WriteHandle(self.transport, self.name, schema, self.write, caller=caller)

    def _settled(
        self, as_of: int, token: Token | None, tried: Callable[[], _Told], told: Callable[[c.Appended], _Told]
    ) -> _Told:
        """What a try comes to, or what is told of the commit of another try of the token."""
        if token is None:
            return tried()
        if (landed := self._landed(as_of, token)) is not None:
            return told(landed)
        try:
            return tried()
        except REFUSED:
            if (landed := self._landed(as_of, token)) is None:  # another try of the token may have landed meanwhile
                raise
            return told(landed)

    def _landed(self, as_of: int, token: Token) -> c.Appended | None:
        """Where it has happened already, the interval that it took. A dropped shard tells it too.

        The upper that it asks for is never that of a shard with a complete time: so this changes nothing.
        """
        try:
            return self._commit(self._writer(None), (), as_of, MINIMUM, token)
        except UpperMismatch:
            return None

    def _counted(self, done: c.Appended) -> Count | None:
        """The rows of the commit that it was, where that was written. None: they cannot be read any more."""
        count, time = Count(), done.lower.element or 0
        try:
            with between(self.transport, self.name, time - 1, time, Asked(wait_s=0.0), self.read) as found:
                for _ in count.of(found.splits(1, None)[0].read(self.transport)):
                    pass
            found.held.lease.close()
        except PersistError:  # it has happened, whatever cannot be told of it
            return None
        return count

    def _timestamp(self, as_of: int) -> datetime | None:
        if self.to.timestamp is not None:
            return self.to.timestamp
        try:
            found = send(self.transport, self.name, c.TimeShown(as_of), self.read.retry_s)
        except PersistError:  # it has happened, whatever cannot be told of it
            return None
        assert isinstance(found, c.ShownFrom)
        return None if found.at_ms is None else shown_instant(found.at_ms)

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        return UpperMismatch(
            f"somebody else wrote to shard {self.name!r} while it was {self.done} {self.to.time}; nothing was changed: "
            f"look at the shard, then {self.what.split()[0]} it again, or give retries",
            **error.details,
        )


def check_complete(name: str, as_of: int | None, view: ShardView, done: str = "restored") -> int:
    """The upper of a shard in which that can be `done` of a time. Raises UpperMismatch, InvalidUsage."""
    if as_of is None:
        raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
    upper = check_open(name, view, done)
    if view.upper.less_equal(as_of):
        raise InvalidUsage(
            f"time {as_of} of shard {name!r} is not complete: its upper is {view.upper}; give an earlier one"
        )
    return upper


def check_open(name: str, view: ShardView, done: str) -> int:
    """The upper of a shard in which something can be `done`. Raises UpperMismatch where no time is left."""
    if view.upper.element is None:
        raise UpperMismatch(f"shard {name!r} is closed: nothing can be {done} in it", expected=None, actual=[])
    if view.upper.element > TIME_MAX:
        raise UpperMismatch(
            f"shard {name!r} has no time left: its upper is {view.upper}", expected=None, actual=view.upper.to_json()
        )
    return view.upper.element


def check_readable(name: str, view: ShardView) -> None:
    """Raise NotReadable where the contents as of the latest complete time were forgotten: nothing follows from them."""
    last = (view.upper.element or 0) - 1
    if last >= 0 and not view.since.less_equal(last):
        raise NotReadable(
            f"shard {name!r} has forgotten the contents as of {last}, its latest complete time: its since is "
            f"{view.since}; nothing was changed: it can be read again once somebody has written",
            as_of=last,
            since=view.since.to_json(),
        )


def read_facts(transport: OneShard, name: str, retry_s: float, tried: c.ReadRetention | None = None) -> c.RetentionIs:
    """The policy of a shard and what it goes by. Raises what every call may."""
    found = send(transport, name, tried or c.ReadRetention(), retry_s)
    assert isinstance(found, c.RetentionIs)
    return found
