"""Pipelined writers: small appends that do not wait for answers, and land exactly once and in order.

The shard keeps a number for every such writer: that of its last append. A command carries all appends that wait when
the previous one is answered, and is conditional on the number before its first; it moves the number to its last,
atomically with the rows. So a command that is sent again after any error lands once, whatever became of the earlier
tries and over any server: if the number is there already, it had landed.

A second attribute counts how often the writer was opened, and every command is conditional on that, too. So commands
that an earlier instance still has under way cannot land once a new one has read the number at which it continues.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from persist.attributes.attribute_handle import Attributes
from persist.client import deadlines
from persist.client.arguments import check_numbers
from persist.client.deadlines import Timeable
from persist.client.unique_insert import CheckedWriter, conform_rows
from persist.client.write import PinnedRows, Updates
from persist.commit.clocks_and_ids import OwnProcess
from persist.core import errors
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.batch import Run
from persist.core.errors import AttributeMismatch, Indeterminate, InvalidUsage, PersistError, Unavailable
from persist.core.transitions.part_admission import DIFF_MAX
from persist.parts import DIFF, TIME, ShardSchema, consolidate

OPEN_TRIES_MAX = 100  # each failed try means that another instance has been opened meanwhile
WINDOW_BYTES_MAX = 64 * 1024 * 1024  # unacknowledged
COMMAND_BYTES_TARGET = 4 * 1024 * 1024
BACKOFF_S = 0.05


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """At most `window_appends_max` appends and about 64 MiB are unacknowledged: then `append` waits.

    A command carries at most half as many appends and about 4 MiB. It is retried for up to `retry_s`; then the writer
    stops, and a new one of the same name continues from the number that the shard holds.
    """

    window_appends_max: int = 2_000
    retry_s: float = 600.0

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def command_appends_max(self) -> int:
        """The other half of the window fills while a command is under way."""
        return max(1, self.window_appends_max // 2)


class _Append(NamedTuple):
    """The rows of one call: a table without times. No multiplicity of equal rows among them exceeds `weight`."""

    pinned: PinnedRows
    weight: int

    @property
    def rows(self) -> pa.Table:
        return self.pinned.rows


class PipelinedWriter(Timeable):
    """One writer by its name; numbers its appends from 1. Thread-safe. Opened by `Shard.pipelined_writer`.

    Only one instance of a name writes at a time: opening another stops this one. After an error every call raises it;
    unacknowledged appends may have landed, and the `acknowledged` of a new instance shows how many have.
    """

    def __init__(
        self, name: str, shard: str, writer: CheckedWriter, attributes: Attributes, settings: PipelineSettings
    ) -> None:
        self.name = name
        self._number_key = named_key(f"pipelined writer {name}")
        self._epoch_key = named_key(f"pipelined writer's epoch {name}")
        self._shard = shard
        self._writer = writer
        self._transport = writer.transport
        self._attributes = attributes
        self._clock = writer.transport.clock
        self._settings = settings
        self._process = OwnProcess(f"the pipelined writer {name!r}")
        self._epoch = self._take_over()
        held = attributes.get(self._number_key)
        self._held = held  # the number in the shard, as far as answers show; None: none yet
        self._last = held or 0
        self._changed = threading.Condition()
        self._waiting: deque[_Append] = deque()  # numbers from `acknowledged + under way + 1` on
        self._bytes = 0
        self._error: PersistError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"persist-pipelined-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"PipelinedWriter({self.name!r}, last={self._last}, acknowledged={self.acknowledged})"

    @property
    def acknowledged(self) -> int:
        """Appends up to this number are durable; 0 if there is none. When just opened: where to continue."""
        return self._held or 0

    def append(self, updates: Updates) -> int:
        """Append rows, as for `Shard.insert`, at a time that the service chooses. Waits while the window is full.

        Returns: the number of this append; `acknowledged` reaches it later.
        Raises: InvalidUsage (the `updates` do not fit, or have times: nothing was appended; or the writer is closed),
            or the error that stopped the writer, such as AttributeMismatch (it was opened elsewhere).
        """
        self._process.check()
        append = self._writer.judged(updates, lambda rows: _conformed(rows, *self._writer.schema_of(rows)))
        rows = append.rows
        settings = self._settings
        with self._changed:
            while self._error is None and not self._closing and self._is_full(rows.nbytes):
                deadlines.check(f"an append of the pipelined writer {self.name!r}, whose window is full,")
                self._changed.wait(_left_s())
            self._check()
            if self._closing:
                raise InvalidUsage(f"the pipelined writer {self.name!r} is closed; open it anew")
            self._waiting.append(append)
            self._bytes += rows.nbytes
            self._last += 1
            if len(self._waiting) == 1 or len(self._waiting) == settings.command_appends_max:
                self._changed.notify_all()
            return self._last

    def flush(self) -> None:
        """Wait until every append is acknowledged.

        Raises: the error that stopped the writer; with a time-out also Indeterminate (the writer continues: flush
            again).
        """
        self._process.check()
        with self._changed:
            last = self._last
            while self._error is None and self.acknowledged < last:
                if deadlines.has_passed():
                    raise Indeterminate(
                        f"of the pipelined writer {self.name!r} appends up to {self.acknowledged} are acknowledged, "
                        f"those up to {last} not yet; it continues to send them: flush again"
                    )
                self._changed.wait(_left_s())
            self._check()

    def close(self) -> None:
        """Flush, and end. Raises the error that stopped the writer."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End without waiting for unsent appends; those under way may still land. Raises nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_left_s())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _is_full(self, more: int) -> bool:
        open_appends = self._last - self.acknowledged
        is_large = open_appends > 0 and self._bytes + more > WINDOW_BYTES_MAX
        return is_large or open_appends >= self._settings.window_appends_max

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_over(self) -> int:
        """Make this the only instance of the name; returns the count that identifies its commands."""
        for _ in range(OPEN_TRIES_MAX):
            before = self._attributes.get(self._epoch_key)
            epoch = (before or 0) + 1
            try:
                self._attributes.update(AttributeUpdate.replace_if_equals(self._epoch_key, epoch, before))
            except AttributeMismatch:
                continue
            except Indeterminate as error:  # a late command is fenced by the next number, as another instance is
                if error.details.get("refused") != AttributeMismatch.kind:
                    raise
                continue
            return epoch
        raise Unavailable(f"pipelined writer {self.name!r} is being opened by many at once; retry")

    # --- sending, on its own thread

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._send(batch)
            if self._waiting:  # for callers that wait for them
                raise InvalidUsage(
                    f"the pipelined writer {self.name!r} was abandoned with {len(self._waiting)} appends not sent; "
                    "open it anew and append them again"
                )
        except PersistError as error:
            self._stop(error)
        except BaseException as error:  # a bug: no caller may wait for ever
            self._stop(PersistError(f"the pipelined writer {self.name!r} failed: {error!r}"))
            raise

    def _stop(self, error: PersistError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _next(self) -> list[PinnedRows] | None:
        """The appends of the next command, in order; None if the writer ends."""
        settings = self._settings
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return None
            first = self._waiting.popleft()
            batch, size, weight = [first.pinned], first.rows.nbytes, first.weight
            while (
                self._waiting
                and len(batch) < settings.command_appends_max
                and size + self._waiting[0].rows.nbytes <= COMMAND_BYTES_TARGET
                and weight + self._waiting[0].weight <= DIFF_MAX  # otherwise equal rows might exceed it in one part
                and self._waiting[0].pinned.schema_id == first.pinned.schema_id
            ):
                append = self._waiting.popleft()
                batch.append(append.pinned)
                size, weight = size + append.rows.nbytes, weight + append.weight
            return batch

    def _send(self, batch: list[PinnedRows]) -> None:
        """Land the appends, which are by one schema, exactly once."""
        before = self._held
        number = (before or 0) + len(batch)
        conditions = (
            AttributeUpdate.replace_if_equals(self._epoch_key, self._epoch, self._epoch),
            AttributeUpdate.replace_if_equals(self._number_key, number, before),
        )
        deadline = self._clock.monotonic() + self._settings.retry_s
        runs: tuple[Run, ...] | None = None
        unknown: Indeterminate | None = None  # the outcome of the last try that was not answered
        size = sum(pinned.rows.nbytes for pinned in batch)
        rows = replace(batch[0], rows=pa.concat_tables([pinned.rows for pinned in batch]).combine_chunks())
        while True:
            try:
                if runs is None:
                    runs = self._writer.stage_for_one_commit(rows, None)
                self._writer.commit_insert(runs, attributes=conditions)
                break
            except AttributeMismatch as error:
                if self._landed(error, number):
                    break
                raise AttributeMismatch(
                    f"pipelined writer {self.name!r} was opened elsewhere, which ends this instance; open it anew to "
                    "continue",
                    **error.details,
                ) from error
            except errors.SchemaMismatch:  # the constraints are stricter by now: the rows are staged again under them
                later = rows.as_of_now(self._transport, self._shard)
                if later.schema_id == rows.schema_id:
                    raise
                self._writer.check(later)
                rows, runs = later, None
            except InvalidUsage as error:  # such as: the client was closed meanwhile
                if unknown is None:
                    raise
                raise unknown from error
            except (Unavailable, errors.Overloaded, Indeterminate, errors.Expired) as error:
                unknown = error if isinstance(error, Indeterminate) else unknown
                if self._closing or self._clock.monotonic() > deadline:
                    raise
                if isinstance(error, errors.Expired):  # the parts may have been swept meanwhile
                    runs = None
                self._clock.sleep(BACKOFF_S)
        with self._changed:
            self._held = number
            self._bytes -= size
            self._changed.notify_all()

    def _landed(self, error: AttributeMismatch, number: int) -> bool:
        """Whether an earlier try of this command has landed: no other writer moves the number in this epoch."""
        actual = error.details.get("actual", {})
        return self._epoch_key not in actual and actual.get(self._number_key) == number


def _left_s() -> float | None:
    """How long the current call may wait; None: for ever."""
    left_s = deadlines.at_most(math.inf)
    return None if left_s == math.inf else left_s


def _conformed(updates: Updates, schema_id: int, schema: ShardSchema) -> _Append:
    """One table with the columns of the schema, by whose names it is staged even if the writer learns others first."""
    rows = conform_rows(updates, schema, None)
    return _Append(PinnedRows(rows.drop_columns([TIME]), schema_id, schema), _weight(rows, schema))


def _weight(rows: pa.Table, schema: ShardSchema) -> int:
    bound: int = rows.num_rows * _largest(rows)
    if bound <= DIFF_MAX:
        return bound
    if _largest(consolidate([rows], schema)) > DIFF_MAX:
        raise InvalidUsage(f"equal rows of one append come to a multiplicity beyond {DIFF_MAX}, the most at once")
    return DIFF_MAX  # the append is sent alone


def _largest(rows: pa.Table) -> int:
    """The largest absolute multiplicity; 0 without rows."""
    diffs: dict[str, int | None] = pc.min_max(rows.column(DIFF)).as_py()
    return max(-(diffs["min"] or 0), diffs["max"] or 0)
