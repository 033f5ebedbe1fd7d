"""Edit verbs: updates computed from the contents, and committed by one command.

If others wrote meanwhile, the plan checks whether their changes concern it. If not, its updates are still exact. So
every verb takes effect as if it had run alone at the time of its commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa

from persist.client.contents_diff import may_replace_all, runs_in_interval, runs_of, try_drop
from persist.client.dml_plans import Contents, Count, VerbBinding
from persist.client.idempotency import landed_or_none, send_for
from persist.client.optimistic_loop import CommitResult, RewriteOperation, Step, check_open, find_landed_rewrite
from persist.client.shared_lease_reads import hold_for_block
from persist.client.snapshot import Held, part_reader, with_renewal
from persist.client.timestamps import check_readable, latest_of
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import DIGEST_BYTES
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, PersistError, SchemaMismatch, TokenReused, UnknownShard, UpperMismatch
from persist.core.frontier import EMPTY, MINIMUM, Antichain
from persist.core.ids import Token, mint, writer_of
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import current_schema

RACES_MAX = 1_000  # lost by one call; each means that another writer made progress
REDONE_MAX = 100  # times that the updates are computed anew


@dataclass(frozen=True)
class Edited(CommitResult):
    """The result of an edit verb.

    `lower` and `upper` are the interval that it took, as for an insert; they are equal if nothing changed, so that
    nothing was committed. `as_of` is the time whose contents it read; -1: the shard was empty; None: it read none.
    `added` and `removed` are how many rows it wrote and retracted: a changed row counts in both. They are None if it
    has landed and its rows cannot be read any more; `removed` is None if all rows were removed without being read.
    `retries` is how often it was computed anew because others had changed what it had read.
    """

    verb: str
    as_of: int | None
    lower: Antichain
    upper: Antichain
    added: int | None
    removed: int | None
    retries: int = 0


@dataclass(frozen=True, kw_only=True)
class EditOperation(RewriteOperation):
    """One verb on one shard. `to` is the latest time."""

    what: ClassVar[str] = "edit"
    done: ClassVar[str] = "edited"

    plan: VerbBinding
    expected: Antichain | None = None  # the upper that the shard must have; None: any
    attributes: tuple[AttributeUpdate, ...] = ()
    question: bytes = b""

    @property
    def purpose(self) -> str:
        return self.plan.verb

    def run(self, token: Token | None) -> Edited:
        """Raises what `Shard.upsert` says."""
        if token is None:
            return self._attempt(None)
        with unless_landed(self._writer(None), token):
            view = self.transport.last_view(self.name, ViewRequest(with_batches=False))
            question: list[object] = [self.plan.verb, *self.plan.to(view).question]
        question.append(None if self.expected is None else self.expected.to_json())
        question.append([(update.key, update.verb, update.value, update.expected) for update in self.attributes])
        digest = hashlib.blake2b(json.dumps(question).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
        digested = replace(self, question=digest.digest())
        return digested._settled(token, lambda: digested._attempt(token), digested._landed_outcome)

    def _attempt(self, token: Token | None) -> Edited:
        for tries in range(1, REDONE_MAX + 1):
            view = self.transport.view(self.name, ViewRequest())
            self._check_expected(view)
            try:
                if (blind := self._blind(view, token)) is not None:
                    return blind
                break
            except SchemaMismatch:  # the constraints have changed since the view
                if tries == REDONE_MAX:
                    raise
        check_readable(self.name, view)
        with hold_for_block(self.transport, self.name, None, self.purpose, self.read) as held:
            self._check_expected(held.view)
            attempt = self._rewrite(held, token, RACES_MAX, REDONE_MAX)
        assert attempt.done is not None
        return self._outcome(attempt.done, attempt.draft.held.view, attempt.draft.count, attempt.replans)

    def _blind(self, view: ShardView, token: Token | None) -> Edited | None:
        """The result of a commit that reads no rows; None: rows have to be read. Raises SchemaMismatch: plan anew."""
        rows = self.plan.to(view).replacement
        if rows is not None and (dropped := self._dropped(rows, view, token)) is not None:
            return dropped
        return self._first(view, token) if view.upper == MINIMUM else None

    def _check_expected(self, view: ShardView) -> None:
        check_open(self.name, view, self.done)
        if self.expected is not None and view.upper != self.expected:
            why = "it was written to after that" if self.expected < view.upper else "that time has not come yet"
            raise UpperMismatch(
                f"shard {self.name!r} has upper {view.upper}, not the expected {self.expected}: {why}; nothing was "
                "changed: read it and decide anew",
                expected=self.expected.to_json(),
                actual=view.upper.to_json(),
            )

    def _first(self, view: ShardView, token: Token | None) -> Edited | None:
        """The first write to a shard, which needs no hold; None: another writer was first."""
        plan, count = self.plan.to(view), Count()
        runs = self._staged(view, count.of(self._writable(-1, plan.updates(Contents(plan.schema, None, -1)))))
        try:
            done = self._commit(runs, view, token)
        except UpperMismatch as error:
            if self._is_conditional or error.details.get("expected") is None:
                raise
            return None
        return self._outcome(done, view, count, 0)

    def _commit(self, runs: tuple[Run, ...], view: ShardView, token: Token | None) -> c.Appended:
        if token or runs or self.attributes:
            return super()._commit(runs, view, token)
        return self._writer(view).commit_rewrite(runs, view.upper, **self._parts(view))  # no outcome to remember

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        return self.plan.to(held.view).updates(self._contents(held))

    def _refreshed(self, held: Held) -> Held:
        now = super()._refreshed(held)
        self._check_expected(now.view)
        return now

    def _step(self, before: Held, now: Held) -> Step:
        is_concerned = self.plan.to(now.view).concerns(self._contents(now), latest_of(before.view))
        return Step.REPLAN if is_concerned else Step.KEEP

    @property
    def _is_conditional(self) -> bool:
        return self.expected is not None

    def _dropped(self, rows: pa.Table, view: ShardView, token: Token | None) -> Edited | None:
        """Remove all rows by a drop, and add the new ones; None: this shard does not allow it."""
        if not may_replace_all(view):
            return None
        count = Count()
        runs = self._staged(view, count.of(self._writable(-1, iter((rows,)))))
        expected = self.expected or EMPTY
        parts = {**self._parts(view), "tombstone": EMPTY}
        own = token or mint(Token, self.transport.ids)
        done = try_drop(lambda: self._writer(view).commit_rewrite(runs, expected, token=own, **parts))
        return None if done is None else Edited(self.plan.verb, None, done.lower, done.upper, count.added, None)

    def _contents(self, held: Held) -> Contents:
        """The contents as of the latest time of the view."""
        time = latest_of(held.view)
        return Contents(current_schema(held.view.schemas)[1], replace(held, as_of=time), time)

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        parts = edit_parts(self.plan.verb, self.question)
        if view is None:
            return parts
        if "cut" in parts:
            parts["cut"] = self.plan.cut
        return {**parts, "attributes": self.attributes}

    def _outcome(self, done: c.Appended, view: ShardView, count: Count, replans: int) -> Edited:
        if done.lower != done.upper and done.lower != view.upper:  # another try of the token
            return self._landed_outcome(done)
        added, removed = (count.added, count.removed) if done.lower != done.upper else (0, 0)
        as_of = (done.lower.element or 0) - 1
        return Edited(self.plan.verb, as_of, done.lower, done.upper, added, removed, replans)

    def _landed_outcome(self, done: c.Appended) -> Edited:
        """The result of another try that has landed; its rows are read to count them."""
        verb, lower = self.plan.verb, done.lower
        as_of = (lower.element or 0) - 1
        if lower == done.upper:
            return Edited(verb, as_of, lower, done.upper, 0, 0)
        try:
            drops = self.transport.last_view(self.name, ViewRequest(with_batches=False)).drops
        except PersistError:  # it has landed, whether or not its rows can be read
            drops = ()
        if any(drop.at == lower.element for drop in drops):  # all rows were removed by a drop, which counts nothing
            count = self._written_at(as_of + 1)
            return Edited(verb, None, lower, done.upper, None if count is None else count.added, None)
        count = self._counted(done)
        added, removed = (None, None) if count is None else (count.added, count.removed)
        return Edited(verb, as_of, lower, done.upper, added, removed)

    def _written_at(self, time: int) -> Count | None:
        """Count the rows that were written at this time, without drops. None: they cannot be read any more."""
        count = Count()
        try:
            with hold_for_block(self.transport, self.name, time, self.purpose, self.read) as held:
                _, reader = part_reader(held.transport, held.view, held.settings)
                written = reader.read_changes(runs_in_interval(runs_of(held.view), time - 1, time), time - 1, time)
                count.read(with_renewal(written, held.lease))
        except PersistError:  # it has landed, whether or not its rows can be read
            return None
        return count

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        return UpperMismatch(
            f"others wrote to shard {self.name!r} before each commit of {self.plan.verb}, or changed what it reads; "
            "nothing was changed: try again, or let fewer programs write to the same rows",
            **{**error.details, "stays": False},
        )


@contextmanager
def unless_landed(handle: WriteHandle, token: Token | None) -> Iterator[None]:
    """Raise TokenReused in place of a refusal of rows if a write with the token has landed.

    It may be the same write: if the columns have changed since, its rows are not recognised.
    """
    try:
        yield
    except (TokenReused, UnknownShard):
        raise
    except InvalidUsage:
        if token is not None:
            find_landed_edit(handle, "insert", token)
        raise


def find_landed_edit(handle: WriteHandle, verb: str, token: Token) -> c.Appended | None:
    """The interval of the edit of this token, if it has landed. Changes nothing. Raises what every write may."""
    return find_landed_rewrite(handle, token, **edit_parts(verb))


def edit_parts(verb: str, question: bytes = b"") -> dict[str, Any]:
    """The parts of the command that identify an edit."""
    return {"operation": verb, "question": question, **({"cut": 0} if verb == c.INSERT else {})}


def find_landed_write(transport: OneShard, name: str, token: Token, retry_s: float) -> c.Appended | None:
    """The interval of the write of this token, whatever it wrote, if it has landed. Changes nothing.

    A command without a digest matches every command of its token. Raises what every write may.
    """
    command = c.Rewrite(writer_of(token), token, MINIMUM, c.NEVER, c.INSERT, cut=0)
    return landed_or_none(lambda: send_for(c.Appended, transport, name, command, retry_s))
