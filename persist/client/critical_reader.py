"""Holds on since that never expire, which a name identifies and a token fences."""

from __future__ import annotations

from persist.client.arguments import checked
from persist.client.shard_base import ShardBase
from persist.client.write import Time
from persist.core import commands as c
from persist.core.errors import Unavailable
from persist.core.frontier import Antichain, frontier
from persist.core.ids import CriticalReaderId, SeqNo, critical_reader_id_of

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
        """Whether the shard has a hold of this name. Changes nothing.

        Args:
            shard: which one.
            cursor: the name.
        Raises: what every call may.
        """
        return critical_reader_id_of(cursor) in shard._details().cursors

    def __repr__(self) -> str:
        return f"CriticalReaderHandle({self._shard.name!r}, cursor={self.cursor!r}, since={self.since})"

    def downgrade_since(
        self, since: Time, *, expected: str | None = None, opaque: str | None = None, force: bool = False
    ) -> Antichain:
        """Move the hold to `since`, and perhaps its token.

        Args:
            since: the earliest time to keep; None closes the shard to reads for ever, whatever its history setting.
            expected: the token that the hold must have; None is the one that this handle knows.
            opaque: the token that it has afterwards, which fences all other holders; None keeps it.
            force: also beyond the shard's upper, so that nothing can be read until a write reaches it.
        Returns: the shard's since afterwards.
        Raises: InvalidUsage (no such time, or beyond the upper), OpaqueMismatch (another holder has changed the token),
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
