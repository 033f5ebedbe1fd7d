"""The class `Shard`: a shard as its users see it, its critical readers, and maintenance on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from persist.attributes import Attributes
from persist.attributes.attribute_handle import AttributeUpdates
from persist.client.arguments import NUMBER_MAX, check_int, checked, html_table
from persist.client.commit_info import checked_purpose
from persist.client.edit_verbs import EditMethods
from persist.client.embedded import OPTIMIZE, VACUUM
from persist.client.erasure_api import ErasureMethods
from persist.client.pipelined import PipelinedWriter, PipelineSettings
from persist.client.read_api import ReadMethods
from persist.client.read_leases import HandleSettings as HandleSettings
from persist.client.row_retention import RetentionMethods
from persist.client.schema_api import SchemaMethods
from persist.client.shard_base import ShardBase
from persist.client.snapshot import ReadLease
from persist.client.timestamps import period_ms, retention_ms
from persist.client.transport import OneShard, Transport
from persist.client.unique_insert import CheckedWriter
from persist.client.write import Time, WriteHandle, WriteMethods
from persist.core import commands as c
from persist.core.audit_log import PURPOSE_CHARS_MAX, Caller
from persist.core.errors import Conflict, InvalidUsage, Unavailable
from persist.core.frontier import Antichain, frontier
from persist.core.ids import CriticalReaderId, SeqNo, critical_reader_id_of
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView

IDLE_WRITERS_MAX = 64  # writers kept for reuse by one Shard object


REGISTER_TRIES_MAX = 100  # each means that another critical reader was given up meanwhile


class CriticalReaderHandle:
    """A hold on since that never expires, fenced by an opaque token: changing the token fences all other holders."""

    def __init__(self, shard: ShardBase, cursor: str, reader: CriticalReaderId, state: c.CriticalReaderState) -> None:
        self._shard = shard
        self._reader = reader
        self.cursor = cursor
        self.opaque = state.opaque
        self.since = state.since
        self._registered = state.registered

    @classmethod
    def take(
        cls, shard: ShardBase, cursor: str, opaque: str = "", *, since: Antichain | None = None, force: bool = False
    ) -> CriticalReaderHandle:
        """The hold called `cursor` of `shard`; users call `Shard.critical_reader`, which documents `opaque`.

        A new hold begins at `since` (None: the shard's own), also beyond the upper with `force`. An invalid one is
        refused before it holds anything. Raises InvalidUsage (as `downgrade_since`).
        """
        checked("cursor", cursor, str)
        checked("opaque", opaque, str)
        checked("force", force, bool)
        reader = critical_reader_id_of(cursor)
        seen = SeqNo(0)
        for _ in range(REGISTER_TRIES_MAX):
            answer = shard._send(c.RegisterCriticalReader(reader, opaque, cursor, since, force, seen))
            if isinstance(answer, c.CriticalReaderState):
                return cls(shard, cursor, reader, answer)
            assert isinstance(answer, c.HoldGivenUp)
            seen = answer.seqno
        raise Unavailable(f"critical readers of shard {shard.name!r} are given up all the time; retry")

    @classmethod
    def is_taken(cls, shard: ShardBase, cursor: str) -> bool:
        """Whether `shard` has a hold of the name `cursor`. Changes nothing. Raises what every call may."""
        return critical_reader_id_of(cursor) in shard._details().cursors

    def __repr__(self) -> str:
        return f"CriticalReaderHandle({self._shard.name!r}, cursor={self.cursor!r}, since={self.since})"

    def downgrade_since(
        self, since: Time, *, expected: str | None = None, opaque: str | None = None, force: bool = False
    ) -> Antichain:
        """Move the hold to `since`, and perhaps its token. Returns the shard's since afterwards.

        `since` is the earliest time to keep. The hold must have the token `expected` (None: the one that this handle
        knows), and has `opaque` afterwards, which fences all other holders (None: it keeps its own). `force`: also
        beyond the shard's upper, so that nothing can be read until a write reaches it, and to None, which closes the
        shard to reads for ever, whatever its history setting, once no other reader and no tag holds it.

        Raises: InvalidUsage (no such time, or it needs `force`), OpaqueMismatch (another holder has changed the token),
            Expired (the hold was given up), Indeterminate (it may have happened: open the hold anew and look).
        """
        before = self.opaque if expected is None else expected
        after = before if opaque is None else opaque
        checked("expected", before, str)
        checked("opaque", after, str)
        checked("force", force, bool)
        command = c.CompareAndDowngradeSince(self._reader, before, after, frontier(since), force, self._registered)
        result = self._shard._send(command)
        assert isinstance(result, c.CriticalReaderState)
        self.opaque, self.since = result.opaque, result.since
        return result.shard_since

    def expire(self) -> None:
        """Give the hold up for good. Repeating it is safe: a later hold of this name stays.

        Raises: OpaqueMismatch (another holder has changed the token), Indeterminate (it may have happened: repeat it).
        """
        self._shard._send(c.ExpireCriticalReader(self._reader, self.opaque, self._registered))


PIECES_MAX: Final = 1_000  # of one call


@dataclass(frozen=True)
class Size:
    """How much a shard holds, with all history: `updates` are stored rows, `bytes` those of its parts."""

    batches: int
    parts: int
    updates: int
    bytes: int


@dataclass(frozen=True)
class Optimized:
    """The result of `Shard.optimize`. `complete`: no merge is due any more; False: other workers do the rest."""

    merges: int
    before: Size
    after: Size
    complete: bool


@dataclass(frozen=True)
class Vacuumed:
    """The result of `Shard.vacuum`: deleted blobs and log entries. `complete`: nothing else can be deleted now."""

    blobs: int
    entries: int
    complete: bool


def _pieces(transport: OneShard, name: str, verb: str) -> list[dict[str, Any]]:
    pieces = [transport.maintain(name, verb)]
    while pieces[-1]["more"] and len(pieces) < PIECES_MAX:
        pieces.append(transport.maintain(name, verb))
    return pieces


class Shard(WriteMethods, ReadMethods, EditMethods, RetentionMethods, ErasureMethods, SchemaMethods):
    """A shard by its name; `Client.create_shard` and `Client.shard` give one. Thread-safe.

    Times are integers. An interval `[lower, upper)` holds `lower` and not `upper`; an upper of None closes the shard.
    Beside what its docstring names, every call may raise Unavailable (it did not happen), Overloaded (likewise; slow
    down), Unauthorized, Forbidden and UnknownShard. A call is retried for up to `WriteSettings.retry_s` seconds.
    """

    def __init__(self, transport: Transport, name: str, view: ShardView, settings: HandleSettings) -> None:
        super().__init__(transport, name, view, settings)
        self._idle_writers: list[WriteHandle] = []

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, key={list(self._schema.key)}, columns={self._schema.arrow.names})"

    def _repr_html_(self) -> str:
        fields = [(f.name, f"{f.type}{', key' if f.name in self._schema.key else ''}") for f in self._schema.arrow]
        return html_table(f"Shard {self.name}", fields)

    # --- frontiers

    def upper(self) -> Antichain:
        """The frontier before which every time is complete; `upper().element` is None once the shard is closed.

        Raises what every call may.
        """
        return self.view().upper

    def since(self) -> Antichain:
        """The frontier from which every time can be read. Raises what every call may."""
        return self.view().since

    # --- writing

    def open_writer(self, *, purpose: str = "") -> CheckedWriter:
        """A separate writer: use one for each thread that writes much. Close it when done.

        It keeps the columns that this handle knows now, even if the handle learns of later ones. `history` shows its
        `purpose`. Raises InvalidUsage (`purpose` is not text, or has more than 256 characters).
        """
        caller, known = Caller(purpose=checked_purpose("purpose", purpose)), self._current_schema()
        return CheckedWriter(self._transport, self.name, lambda: known, self._settings.write, caller=caller)

    def pipelined_writer(self, name: str, settings: PipelineSettings | None = None) -> PipelinedWriter:
        """The writer called `name`, which sends small appends without waiting, and continues where it last ended.

        Opening it again, anywhere, ends the open writer of this name. By default (`settings`) 2,000 appends and 64 MiB
        may be without an answer, then `append` waits. Raises Unavailable (many open it at once; retry).
        """
        checked("name", name, str)
        checked("settings", settings, PipelineSettings, type(None))
        return PipelinedWriter(
            name,
            self.name,
            self.open_writer(purpose=f"pipelined writer {name}"[:PURPOSE_CHARS_MAX]),
            self.attributes,
            settings or PipelineSettings(),
        )

    @property
    def attributes(self) -> Attributes:
        """The shard's attributes: read them, or change them without rows."""
        return Attributes(self.name, self._send, self._update_attributes)

    def _update_attributes(self, updates: AttributeUpdates, *, token: str | None = None) -> None:
        with self._writer() as writer:
            writer.update_attributes(updates, token=token)

    # --- settings and holds

    @property
    def settings(self) -> ShardSettings:
        """The shard's settings as of now. Raises what every call may."""
        return self._details().settings

    def configure(
        self,
        *,
        history: timedelta | str | None = None,
        mark_every: timedelta | str | None = None,
        expected_version: int | None = None,
    ) -> ShardSettings:
        """Change settings of the shard; what is None stays. Needs the scope `manage`.

        Args:
            history: for how long every time stays readable: a timedelta, or text such as `7d`, `none` (as long as
                readers need it) or `forever`. Forgotten history does not come back.
            mark_every: the granularity of wall clocks: a timedelta, or text such as `10s`.
            expected_version: the version that the settings must have now; None: any.
        Returns: the settings afterwards.
        Raises: InvalidUsage (no such age, a part of a millisecond, no such version), Conflict (others changed them:
            read them, then decide anew).
        """
        known = self.settings
        if history is None and not known.version:
            raise InvalidUsage(f"shard {self.name!r} has no settings yet: say how much history it is to keep")
        history_ms = known.history_ms if history is None else retention_ms(history)
        checked("expected_version", expected_version, int, type(None))
        every_ms = known.mark_every_ms if mark_every is None else period_ms(mark_every, "mark_every", "10s")
        version = known.version if expected_version is None else expected_version
        check_int("expected_version", version, 0, NUMBER_MAX)
        return self._send_for(c.SettingsAre, c.SetSettings(version, history_ms, every_ms, known.rows)).settings

    def open_reader(self, since: int | None = None, *, purpose: str = "reader") -> ReadLease:
        """A hold on history from the time `since` on (None: the shard's own), which lasts as long as it is renewed.

        Lists of readers show its `purpose`. Raises InvalidUsage (no such time), NotReadable (the shard's since is
        beyond it).
        """
        checked("purpose", purpose, str)
        since_frontier = None if since is None else frontier(since)
        return ReadLease.open(self._transport, self.name, since_frontier, purpose, self._settings.read)

    def critical_reader(self, cursor: str, opaque: str = "") -> CriticalReaderHandle:
        """The hold called `cursor`, which never expires; a new one is taken at the shard's since.

        `opaque` is the token of a new hold; an existing one keeps its own. Raises InvalidUsage (`cursor` or `opaque` is
        not text, or has more than 256 characters), Unavailable (others give up critical readers all the time; retry).
        """
        return CriticalReaderHandle.take(self, cursor, opaque)

    def downgrade_since(self, since: Time, cursor: str = "default", *, force: bool = False) -> Antichain:
        """Forget history before `since`, as far as other readers allow. Repeating it is safe.

        It moves the hold of the critical reader `cursor`. `force`: also beyond the shard's upper, so that nothing can
        be read until a write reaches it, and to None, which closes the shard to reads for ever, whatever its history
        setting, once no other reader and no tag holds it. Returns the shard's since afterwards.

        Raises: InvalidUsage (no such time, it needs `force`, or None if the shard is closed to writes: only `drop`
            closes both), OpaqueMismatch (another holder moves this hold).
        """
        handle = CriticalReaderHandle.take(self, cursor, since=frontier(since), force=force)
        return handle.downgrade_since(since, force=force)

    # --- maintenance, which does both anyway, and closing

    def optimize(self) -> Optimized:
        """Run the merges that are worth it now; maintenance runs them automatically on an idle shard. Scope `maintain`.

        No row is changed, and no reader or writer is affected. It takes as long as the merges do. Repeating it is safe.

        Returns: how many merges there were, and how much the shard holds before and after.
        Raises: UnknownShard, Unavailable, and what every call may. Completed merges stay.
        """
        pieces = _pieces(self._transport, self.name, OPTIMIZE)
        merges = sum(piece["merges"] for piece in pieces)
        before, after = Size(**pieces[0]["before"]), Size(**pieces[-1]["after"])
        return Optimized(merges, before, after, pieces[-1]["complete"])

    def vacuum(self) -> Vacuumed:
        """Delete now what can no longer be read; maintenance does that automatically. Scope `maintain`.

        It deletes nothing that history keeps (`configure`, `forget`), nor what a reader holds. Repeating it is safe.

        Returns: how many blobs and entries of the log were deleted.
        Raises: UnknownShard, Unavailable, and what every call may. Completed deletions stay.
        """
        pieces = _pieces(self._transport, self.name, VACUUM)
        blobs, entries = (sum(piece[what] for piece in pieces) for what in ("blobs", "entries"))
        return Vacuumed(blobs, entries, pieces[-1]["complete"])

    def drop(self, *, force: bool = False) -> None:
        """Close the shard to writes and reads; maintenance then deletes its data. Repeating it is safe.

        `Client.create_shard` may use the name again at once. That is another shard: handles of this one raise
        UnknownShard. `force`: also while readers hold it.

        Raises: Conflict (readers hold it), UnknownShard (its name belongs to another shard by now), Indeterminate (it
            may have happened, or may yet: look at the shard before you write more to it).
        """
        checked("force", force, bool)
        self._send(c.Drop(force))

    def close(self) -> None:
        """Retire the writers that this handle opened for itself. Raises what every call may."""
        with self._lock:
            idle, self._idle_writers = self._idle_writers, []
        for writer in idle:
            writer.close()

    @contextmanager
    def _writer(self) -> Iterator[WriteHandle]:
        """A writer that no other thread uses meanwhile."""
        with self._lock:
            writer = self._idle_writers.pop() if self._idle_writers else None
        writer = writer or CheckedWriter(self._transport, self.name, self._current_schema, self._settings.write)
        is_known = False  # after another error its last outcome may be unknown: it is left to expire
        try:
            yield writer
            is_known = True
        except (Conflict, InvalidUsage):  # nothing happened, so the writer can be reused
            is_known = True
            raise
        finally:
            with self._lock:
                if is_known and len(self._idle_writers) < IDLE_WRITERS_MAX:
                    self._idle_writers.append(writer)
