"""Erasure: one commit that removes rows and lets earlier history go. Maintenance does the rest, and proves it.

The rows are found in the contents as of the latest time, by keys or by a predicate, and staged in bounded memory. If
others write meanwhile, their changes are added, so the erasure never has to start again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, overload

import pyarrow as pa

from persist.client.arguments import checked, key_values
from persist.client.dml_plans import Count
from persist.client.idempotency import after_commit, send, send_for
from persist.client.optimistic_edit import unless_landed
from persist.client.optimistic_loop import RewriteOperation, check_complete
from persist.client.shard_base import ShardBase
from persist.client.snapshot import Held, part_reader, with_renewal
from persist.client.timestamps import datetime_text, instant_text, latest_of, period_ms, to_datetime
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.erasure import DEADLINE_MS_MAX, REASON_CHARS_MAX, Doomed, Erasure, Proof, Wait
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import Token, given_token, mint
from persist.core.shard_view import ShardView
from persist.parts import KeyRange, ShardSchema, encode_key, negated, valid_schemas
from persist.parts.filter_eval import Filter
from persist.parts.python_values import parse_key_value
from persist.parts.schema_evolution import current_for_names

KEYS_MAX = 1_000  # of one erasure
RETRIES = 100  # how often it continues after others have written


@dataclass(frozen=True)
class Question:
    """Which rows to erase: those with these `keys` (tuples in key order), or those for which `where` is true.

    With neither, no row is removed, and rows that were retracted before are erased.
    """

    keys: tuple[tuple[Any, ...], ...] = ()
    where: str | None = None

    @classmethod
    def of(cls, keys: Sequence[Any] | None, where: str | None, *, gone: bool) -> Question:
        """Raises InvalidUsage, which never shows the arguments."""
        if (keys is not None) + (where is not None) + gone != 1:
            raise InvalidUsage("give one of keys, where, and gone, which erases what was retracted or truncated before")
        if where is not None and (not isinstance(where, str) or not where.strip()):
            raise InvalidUsage("where is not text, or empty; it must be a predicate such as \"customer = 'x'\"")
        if keys is None:
            return cls((), where)
        if isinstance(keys, (str, bytes, Mapping)) or not isinstance(keys, Sequence) or not keys:
            raise InvalidUsage("keys must be a non-empty list of keys")
        if len(keys) > KEYS_MAX:
            raise InvalidUsage(f"there are {len(keys)} keys; one erasure takes at most {KEYS_MAX}: use where")
        return cls(tuple(map(key_values, keys)))

    def digest(self, erasure: str, reason: str) -> bytes:
        """The digest that the State keeps. It includes the id, so that equal questions have different digests.

        Raises InvalidUsage, without the value, for an integer of thousands of digits.
        """
        try:
            keys = [list(map(repr, key)) for key in self.keys]
        except ValueError:
            raise InvalidUsage("a key has a number of too many digits, which no key column can hold") from None
        question = json.dumps([erasure, reason, self.where, keys])
        return hashlib.sha256(question.encode()).digest()

    def key_ranges(self, schema: ShardSchema) -> tuple[list[KeyRange], Filter | None]:
        """The key ranges to search, ascending, and the predicate (None: all of their rows are selected).

        Raises InvalidUsage if the shard has no such column or key.
        """
        if self.where is not None:
            predicate = Filter.of(self.where, schema)
            return [predicate.key_range()], predicate
        ranges: dict[bytes, KeyRange] = {}  # without repeated keys
        for key in self.keys:
            if len(key) != len(schema.key):
                wanted = ", ".join(schema.key)
                raise InvalidUsage(f"a key does not have the right number of values: one for each of {wanted}")
            encoded = encode_key(schema, tuple(map(partial(_key_value, schema), schema.key, key)))
            ranges[encoded] = KeyRange(encoded, encoded + b"\x00")
        return [ranges[encoded] for encoded in sorted(ranges)], None


def _key_value(schema: ShardSchema, column: str, value: Any) -> pa.Scalar:
    """The value as the column holds it. Errors never show it."""
    try:
        return parse_key_value(schema, column, value)
    except InvalidUsage:
        kind = schema.arrow.field(column).type
        raise InvalidUsage(
            f"a key has a value that its key column {column!r} cannot hold: it must be a {kind}, exactly"
        ) from None


@dataclass(frozen=True)
class ErasureStatus:
    """The progress of an erasure; `Shard.erase` and `Shard.erased` return it.

    `phase` is `pending` (the shard is fed by `append`: the rows go at the time `at`, with the next commit of its
    writer), `retracted` (no read of the latest time shows the rows), `rewritten` (no part of the shard does) or
    `erased` (nothing in either store does). `waits` are what the next phase waits for; empty: for maintenance. `at` is
    its time: earlier contents can no longer be read. `removed` is the sum of `__diff` of the rows that the call of
    `erase` removed. The shard does not keep it: it is None in what `erased` returns, and for a retry. `question_sha256`
    is the digest of what was asked for (hex). `doomed` are the blobs that showed the rows. `proof` is the result of the
    last scan of both stores. `pending_s`: how many seconds ago it was requested, while it is pending.
    """

    id: str
    phase: str
    at: int
    question_sha256: str
    reason: str
    requested: datetime
    deadline: datetime | None
    removed: int | None
    waits: tuple[Wait, ...] = ()
    doomed: Doomed = field(default_factory=Doomed)
    rewritten: int = 0
    proof: Proof | None = None
    pending_s: float | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left that shows the rows."""
        return self.phase == "erased"

    def to_json(self) -> dict[str, Any]:
        """The same for JSON, which is the receipt once it is done; wall clocks in RFC 3339. Raises nothing."""
        body: dict[str, Any] = {
            "id": self.id,
            "phase": self.phase,
            "at": self.at,
            "question_sha256": self.question_sha256,
            "reason": self.reason,
            "requested": datetime_text(self.requested),
            "deadline": datetime_text(self.deadline),
            "removed": self.removed,
            "waits": [wait_json(wait) for wait in self.waits],
        }
        if self.pending_s is not None:
            body["pending_s"] = self.pending_s
        if self.rewritten:
            doomed = self.doomed
            body["rewritten"] = {"seqno": self.rewritten}
            body["blobs_deleted" if self.done else "blobs_to_delete"] = {
                "count": doomed.blobs, "bytes": doomed.size, "sha256": doomed.digest.hex(),
            }  # fmt: skip
        if self.proof is not None:
            proof = self.proof
            body["proof"] = {
                "erased": instant_text(proof.at_ms),
                "horizon_seqno": proof.horizon,
                "log_entries_gone_before": proof.horizon,
                "rollups_gone_before": proof.horizon,
                "scanned": {"log_entries": proof.entries, "blobs": proof.blobs, "bytes": proof.size},
                "left_by_the_consensus_store": proof.left,
            }
        return body


def wait_json(wait: Wait) -> dict[str, Any]:
    """What an erasure waits for, for JSON. Raises nothing."""
    until = None if wait.until_ms is None else instant_text(wait.until_ms)
    return {"kind": wait.kind, "name": wait.name, "time": wait.time, "until": until}


@dataclass(frozen=True)
class EraseOperation(RewriteOperation):
    """One erasure of rows of a shard. `to` is the latest time."""

    what: ClassVar[str] = "erase"
    done: ClassVar[str] = "erased"

    question: Question = field(default_factory=Question)
    known: int | None = None  # the id of the schema that names its columns; None: the current one
    deadline_ms: int | None = None
    reason: str = ""
    tags: bool = False
    force: bool = False
    erasure: str = ""  # its id

    @property
    def purpose(self) -> str:
        return self.what

    def run(self, token: Token | None) -> ErasureStatus:
        """Raises what `Shard.erase` says."""
        token = mint(Token, self.transport.ids) if token is None else token
        erasure = "e" + token[1:]  # the id that the token stands for
        operation = replace(self, erasure=erasure)
        with unless_landed(self._writer(None), token):
            removed = operation._settled(token, lambda: operation._attempt(token), lambda _: None)
        with after_commit(f"erasure {erasure} of shard {self.name!r}"):
            return status_of(self.transport, self.name, erasure, self.read.retry_s, removed)

    def _attempt(self, token: Token) -> int | None:
        upper = check_complete(self.name, 0, self._view(), "erased")
        with self._held(upper - 1) as held:
            attempt = self._rewrite(held, token, RETRIES + 1)
        done, count = attempt.done, attempt.draft.count
        assert done is not None
        if done.lower != done.upper:  # else it is pending
            with suppress(PersistError):  # its own hold is gone by now; otherwise maintenance does it
                send(self.transport, self.name, c.ForgetHistory(done.lower), self.read.retry_s)
        return count.removed - count.added if attempt.is_fresh else None

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        schemas = valid_schemas(held.view.schemas)
        # Raises InvalidUsage if a name means another column by now; without a question none is used.
        schema = current_for_names(schemas, self.known, () if self.question == Question() else None)
        ranges, predicate = self.question.key_ranges(schema)
        high = latest_of(held.view)
        held = replace(held, as_of=high)
        _, reader = part_reader(held.transport, held.view, held.settings)
        for key_range in ranges:
            if low is not None:
                tables = reader.read_changes(held.runs, low, high, key_range=key_range)
            else:  # rows that other pending erasures retract at the next time are left to them
                runs, time = held.with_pending()
                tables = reader.read_range(runs, as_of=time, key_range=key_range)
            for table in with_renewal(tables, held.lease):
                rows = negated(table if predicate is None else predicate.apply(table))
                if len(rows):
                    yield rows

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        pending = 0 if view is None else view.erasing
        new = c.NewErasure(self.erasure, self.deadline_ms, self.reason, self.tags, pending, self.force)
        return {"operation": c.ERASE, "question": self.question.digest(self.erasure, self.reason), "erasure": new}


def checked_reason(reason: Any) -> str:
    """Return the reason. Raises InvalidUsage if it is not text, or too long."""
    if not isinstance(reason, str) or len(reason) > REASON_CHARS_MAX:
        raise InvalidUsage(f"reason must be text of at most {REASON_CHARS_MAX} characters")
    try:
        reason.encode()
    except UnicodeEncodeError as error:
        raise InvalidUsage("reason contains a lone surrogate, which is not text") from error
    return reason


def status_of(transport: OneShard, name: str, erasure: str, wait_s: float, removed: int | None = None) -> ErasureStatus:
    """The progress of an erasure. Raises InvalidUsage if the shard has none of this id, or not any more."""
    status = read_erasures(transport, name, wait_s).get(erasure)
    if status is None:
        raise InvalidUsage(f"shard {name!r} has no erasure {erasure!r:.80}")
    return replace(status, removed=removed)


def read_erasures(transport: OneShard, name: str, retry_s: float) -> dict[str, ErasureStatus]:
    """The erasures of a shard by id, the oldest first. Raises what every call may."""
    answer = send_for(c.ErasuresAre, transport, name, c.ReadErasures(), retry_s)
    ordered = sorted(answer.erasures.items(), key=lambda item: (item[1].at, item[0]))
    return {key: _status(key, erasure, answer.waits.get(key, ()), answer.now_ms) for key, erasure in ordered}


def _status(key: str, erasure: Erasure, waits: tuple[Wait, ...], now_ms: int) -> ErasureStatus:
    return ErasureStatus(
        id=key,
        phase=erasure.phase,
        at=erasure.at,
        question_sha256=erasure.question.hex(),
        reason=erasure.reason,
        requested=to_datetime(erasure.requested_ms),
        deadline=None if erasure.deadline_ms is None else to_datetime(erasure.deadline_ms),
        removed=None,
        waits=waits,
        doomed=erasure.doomed,
        rewritten=int(erasure.rewritten),
        proof=erasure.proof,
        pending_s=None if erasure.pending is None else max(0, now_ms - erasure.requested_ms) / 1000,
    )


class ErasureMethods(ShardBase):
    """The methods of `Shard` for erasure."""

    def erase(  # noqa: PLR0913 - each argument by its name
        self,
        *,
        keys: Sequence[Any] | None = None,
        where: str | None = None,
        gone: bool = False,
        deadline: timedelta | str | None = None,
        reason: str = "",
        tags: bool = False,
        token: str | None = None,
        force: bool = False,
    ) -> ErasureStatus:
        """Remove rows for good: by one commit at the next time, and then from every byte of both stores.

        The latest contents are without them at once. The shard forgets the history before that commit, including its
        commit history; it waits for readers and tags that hold it. Maintenance (`persist maintain run`) rewrites and
        deletes what showed the rows, and proves it: `erased` returns the progress and the receipt. Scope `admin`. A
        shard that is fed by `append` has no time for that commit: there the erasure is `pending` until the next commit
        of the writer, which also retracts the rows. `erased` reports for how long it has been.

        Args:
            keys: up to 1,000 keys: tuples in key order, or the values themselves if there is one key column.
            where: a predicate, as the Spark option `where` says.
            gone: remove no row of the latest contents, and erase what was retracted or truncated before. Exactly one of
                `keys`, `where` and `gone` is given.
            deadline: when it should have ended, such as `30d`; it is only reported.
            reason: the reason for the receipt, up to 256 characters. It must not identify the rows.
            tags: also remove all tags of earlier times; otherwise it waits for them.
            token: as `insert` says; it stands for this erasure, and determines its id.
            force: take a time at once, even if the shard is fed by `append`. What its writer appends there is refused,
                and it has to continue after that time.
        Returns: the progress: see `ErasureStatus`.
        Raises: UpperMismatch (others wrote all the time, or the shard is closed, or no time is left: nothing was
            changed), InvalidUsage (no such key or column, nothing was written yet, or a row has a multiplicity beyond
            2**32), TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not happen), Indeterminate (it may
            have happened: repeat it with the token).
        """
        checked("tags", tags, bool)
        checked("force", force, bool)
        checked("gone", gone, bool)
        question = Question.of(keys, where, gone=gone)
        own = given_token(token)
        deadline_ms = None if deadline is None else period_ms(deadline, "deadline", "30d")
        if deadline_ms is not None and deadline_ms > DEADLINE_MS_MAX:
            raise InvalidUsage("deadline must be an age of at most ten years, such as '30d'")
        return EraseOperation.of(
            self._transport,
            self.name,
            self._settings,
            question=question,
            known=self._current_schema()[0],
            deadline_ms=deadline_ms,
            reason=checked_reason(reason),
            tags=tags,
            force=force,
        ).run(own)

    @overload
    def erased(self, erasure: str) -> ErasureStatus: ...

    @overload
    def erased(self, *, before: int) -> dict[str, Any]: ...

    def erased(self, erasure: str | None = None, *, before: int | None = None) -> ErasureStatus | dict[str, Any]:
        """The progress of an erasure, what it waits for, and, once nothing is left, the receipt. Scope `admin`.

        With `before`: what still shows rows that were retracted before that time, or by a truncation before it, by a
        scan of both stores that changes nothing. Either call may be repeated.

        Args:
            erasure: the id of an erasure.
            before: a time in `[0, upper]`.
        Returns: with `before` the answer of `GET .../erasures?before=`: its `phase` is "erased" once nothing is left.
        Raises: InvalidUsage (the shard has no erasure of this id, or has forgotten it: it keeps the last 100; or
            `before` is no such time), Unavailable (a store does not answer).
        """
        if (erasure is None) == (before is None):
            raise InvalidUsage("give either the id of an erasure, or before")
        if erasure is None:
            checked("before", before, int)
            return self._transport.erased_before(self.name, before or 0)
        checked("erasure", erasure, str)
        return status_of(self._transport, self.name, erasure, self._settings.read.retry_s)

    def erasures(self) -> dict[str, ErasureStatus]:
        """The shard's erasures by id, the oldest first. Scope `admin`. Raises what every call may."""
        return read_erasures(self._transport, self.name, self._settings.read.retry_s)
