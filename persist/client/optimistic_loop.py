"""One optimistic loop: rows are worked out from the contents of a shard, and committed if nothing changed that matters.

A plan says what it makes of the contents as of the latest time. The commit asks for the upper that was looked at. Where
others wrote meanwhile, the plan says what becomes of the rows (`Step`): so each lost race costs a commit, and only
what concerns the plan costs more than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import DiffRequest, Named, between
from persist.client.dml_plans import GainedKeys
from persist.client.idempotency import send
from persist.client.snapshot import Held, ReadSettings, check_lease
from persist.client.timestamps import instant_of
from persist.client.transport import OneShard
from persist.client.write import WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.audit_log import Caller
from persist.core.batch import Run
from persist.core.errors import (
    Expired,
    Indeterminate,
    InvalidUsage,
    NotReadable,
    PersistError,
    SchemaMismatch,
    UpperMismatch,
)
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import Token, mint
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.transitions.part_admission import DIFF_MAX
from persist.parts import DIFF, ShardSchema, current_schema

RETRIES_MAX = 1_000
READ_BYTES = 64 * 1024 * 1024  # memory of the reads: it writes at the same time
BUFFER_BYTES = 32 * 1024 * 1024  # rows that it buffers for a part

# These tell that nothing was changed, and are not told where another try of the token has landed.
REFUSED = (Expired, InvalidUsage, NotReadable, UpperMismatch)
_Told = TypeVar("_Told")


class Count:
    """How many rows are added and removed, and, where they are looked at, the keys that get some."""

    def __init__(self, gained: GainedKeys | None = None) -> None:
        self.added = self.removed = 0
        self.gained = gained

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        """The rows, which are counted as they pass."""
        for table in tables:
            diffs = table.column(DIFF)
            added = pc.sum(pc.max_element_wise(diffs, 0)).as_py() or 0
            self.added += added
            self.removed += added - (pc.sum(diffs).as_py() or 0)
            yield from table.to_batches()


class Step(Enum):
    """What becomes of rows that were worked out, where others wrote before they were committed."""

    KEEP = "keep"  # nothing that concerns them: the same rows are committed at the new time
    EXTEND = "extend"  # what the changes add is staged, too
    REPLAN = "replan"


@dataclass(frozen=True)
class Draft:
    """Rows that were worked out as of the latest time of `held`, and staged. `is_extended`: by several looks."""

    held: Held
    runs: tuple[Run, ...]
    count: Count
    is_extended: bool = False


@dataclass(frozen=True)
class Attempt:
    """What a loop came to: the commit, if there was one, the draft, and how often that was worked out anew."""

    done: c.Appended | None
    draft: Draft
    replans: int

    @property
    def is_fresh(self) -> bool:
        """Whether the commit is of the rows of this draft, and not of another try of its token."""
        return self.done is not None and self.done.lower == self.draft.held.view.upper


@dataclass(frozen=True)
class Rewriting(ABC):
    """A plan. `to` is the time that it is about."""

    what: ClassVar[str]  # "restore to 7"
    done: ClassVar[str]  # "restored to 7"

    transport: OneShard
    name: str
    to: Named
    write: WriteSettings
    read: ReadSettings
    info: bytes = b""  # what the commit history is to tell of it
    passes: c.PassedCut | None = None  # the cut of a policy

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
    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        """The operation, and the parts of the command that make it what it is. None: it asks for an outcome alone."""

    def _begin(self, view: ShardView) -> Count:
        """What is counted and noted while rows are worked out."""
        return Count()

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """The rows to write, as of the latest time of the view. With `low`: what to add to those as of that time."""
        raise AssertionError(f"{self.what} works out no rows")

    def _step(self, before: Held, now: Held) -> Step:
        """What becomes of the rows that were worked out before, where others have written."""
        return Step.EXTEND

    def _is_cancelled(self, count: Count, added: int) -> bool:
        """Whether an extension, before which `added` rows were added, takes back what is staged.

        Rows that cancel out would be written once more, maybe after all that shows them was rewritten for an erasure.
        """
        return count.added > added

    @property
    def _commits_nothing(self) -> bool:
        """Whether the command is sent where there is no row to write."""
        return True

    @property
    def _is_conditional(self) -> bool:
        """Whether the caller expects an upper, so that no lost race is tried again."""
        return False

    @contextmanager
    def _held(self, start: int, settings: ReadSettings | None = None) -> Iterator[Held]:
        """A lease on all times from `start` on, for the block."""
        asked = DiffRequest(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, start, None, asked, settings or self.read) as found:
            try:
                yield found.held
            finally:
                found.held.lease.close()

    def _rewrite(self, held: Held, token: Token | None, tries: int, replans_max: int = RETRIES_MAX) -> Attempt:
        """Work out the rows and commit them, in at most `tries` commits.

        Raises UpperMismatch: others wrote before each of them, or the plan was worked out anew `replans_max` times.
        """
        draft, lost, replans = self._drafted(held, None), 0, 0
        while draft.runs or self._commits_nothing:
            try:
                return Attempt(self._commit(draft.runs, draft.held.view, token), draft, replans)
            except (UpperMismatch, SchemaMismatch) as error:
                refused = error
            is_overtaken = isinstance(refused, UpperMismatch)
            if is_overtaken and (refused.details.get("expected") is None or self._is_conditional):
                raise refused  # no time is left, or none but the expected one
            lost += 1
            if lost < tries:
                now = self._refreshed(draft.held)
                is_kept = is_overtaken and not is_recast(draft.held.view, now.view)
                step = self._step(draft.held, now) if is_kept else Step.REPLAN
                replans += step is Step.REPLAN
            if lost == tries or replans > replans_max:
                if isinstance(refused, UpperMismatch):
                    raise self._overtaken(refused) from refused
                raise refused
            if step is Step.KEEP:
                draft = replace(draft, held=now)
            else:
                draft = self._drafted(now, draft if step is Step.EXTEND else None)
        return Attempt(None, draft, replans)

    def _drafted(self, held: Held, before: Draft | None) -> Draft:
        """The rows as of the latest time of the view; where there is a draft before, its rows and what came since."""
        low = None if before is None else latest_of(before.held.view)
        count, runs = (self._begin(held.view), ()) if before is None else (before.count, before.runs)
        added = count.added
        rows = self._writable(latest_of(held.view), self._rows(held, count, low))
        more = self._staged(held.view, count.of(rows))
        if before is not None and self._is_cancelled(count, added):
            return self._drafted(held, None)
        return Draft(held, (*runs, *more), count, is_extended=before is not None)

    def _refreshed(self, held: Held) -> Held:
        """The shard as it is now. Raises what refuses to go on: UpperMismatch, and Expired where the lease is gone."""
        view = self.transport.view(self.name, ViewRequest())
        check_open(self.name, view, self.done.split()[0])
        check_lease(view, held.as_of, held.lease)
        held.lease.keep()
        return replace(held, view=view)

    def _commit(self, runs: tuple[Run, ...], view: ShardView, token: Token | None) -> c.Appended:
        """Commit the staged rows, which were worked out from the view. Without a token it has its own.

        A token is remembered without a writer, which would have to be registered and retired.
        """
        own = token or mint(Token, self.transport.ids)
        return self._writer(view).commit_rewrite(runs, view.upper, token=own, **self._parts(view))

    def _writable(self, as_of: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The rows. Raises InvalidUsage where one commit cannot write a multiplicity."""
        for table in tables:
            found = pc.min_max(table.column(DIFF)).as_py()
            if len(table) and (most := max(-found["min"], found["max"])) > DIFF_MAX:
                raise InvalidUsage(self._too_often(as_of, most))
            yield table

    def _too_often(self, as_of: int, most: int) -> str:
        """Why a row that is there so often cannot be written by one commit."""
        return (
            f"a row of shard {self.name!r} is there {most} times at time {as_of}, and one commit can change at most "
            f"{DIFF_MAX} of it; take some away by inserts with a negative __diff first"
        )

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

    def _settled(self, token: Token | None, tried: Callable[[], _Told], told: Callable[[c.Appended], _Told]) -> _Told:
        """What a try comes to, or what is told of the commit of another try of the token."""
        if token is None:
            return tried()
        if (landed := self._landed(token)) is not None:
            return told(landed)
        try:
            return tried()
        except REFUSED:
            if (landed := self._landed(token)) is None:  # another try of the token may have landed meanwhile
                raise
            return told(landed)

    def _landed(self, token: Token) -> c.Appended | None:
        """Where it has happened already, the interval that it took. A dropped shard tells it too.

        It asks for a time that precedes no upper: so this changes nothing.
        """
        handle, parts = self._writer(None), self._parts(None)
        return unless_overtaken(lambda: handle.commit_rewrite((), MINIMUM, c.NEVER, token=token, **parts))

    def _counted(self, done: c.Appended) -> Count | None:
        """The rows of the commit that it was, where that was written. None: they cannot be read any more."""
        count, time = Count(), done.lower.element or 0
        try:
            with between(self.transport, self.name, time - 1, time, DiffRequest(wait_s=0.0), self.read) as found:
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
            return instant_of(self.transport, self.name, as_of, self.read.retry_s)
        except PersistError:  # it has happened, whatever cannot be told of it
            return None

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        """What is raised where the last try was refused."""
        return UpperMismatch(
            f"somebody else wrote to shard {self.name!r} while it was {self.done} {self.to.time}; nothing was changed: "
            f"look at the shard, then {self.what.split()[0]} it again, or give retries",
            **error.details,
        )


def unless_overtaken(ask: Callable[[], c.Appended]) -> c.Appended | None:
    """What a write that can never land is answered where its token has landed; None: it has not."""
    try:
        return ask()
    except UpperMismatch:
        return None
    except Indeterminate as error:  # of a try that was not answered, which changes nothing either
        if error.details.get("refused") != UpperMismatch.kind:
            raise
        return None


def latest_of(view: ShardView) -> int:
    """The latest complete time of a view; -1: nothing was written."""
    return (view.upper.element or 0) - 1


def is_recast(before: ShardView, now: ShardView) -> bool:
    """Whether something came between that no change of rows shows, or these were forgotten.

    That is a drop, or an erasure that is or was pending. A lease on a tag holds one time alone.
    """
    is_other = (before.drops, before.erasing, before.retracting) != (now.drops, now.erasing, now.retracting)
    return is_other or not now.since.less_equal(latest_of(before))


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
