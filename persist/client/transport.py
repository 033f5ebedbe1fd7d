"""How a client reaches shards: embedded or through a server; and the proof that a store is the server's."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

from blob import Blob, BlobError
from persist.client.lease_pool import LeasePool
from persist.commit.location_identity import ID_KEY, ensure_id
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller, EntryPlace, HistoryPage
from persist.core.batch import Run
from persist.core.errors import UnknownShard
from persist.core.ids import IdSource, ShardId
from persist.core.phases import dropped, outlived
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy, SchemaRecord
from persist.formats.exposition import Family
from persist.telemetry.metrics import Storms

# How a client reaches shards: embedded (its own machines over the stores) or through a server.


# What these come to depends on who holds the shard: nobody may hear of a reader that has ended.
_WAITING_FOR_HOLDS = (c.Drop, c.CompareAndDowngradeSince, c.ForgetHistory, c.SetSettings)


def waits_for_holds(command: c.Command) -> bool:
    """Whether the outcome depends on who holds the shard, so that unused readers are given back before it."""
    erases = isinstance(command, c.Rewrite) and command.erasure is not None
    return erases or isinstance(command, _WAITING_FOR_HOLDS)


class Transport(Protocol):
    """Errors are those of the tree; calls are safe to repeat."""

    @property
    def blob(self) -> Blob:
        """Where this client reads and writes parts: the store itself, or the server's routes for blobs."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def ids(self) -> IdSource: ...

    @property
    def policy(self) -> Policy:
        """The inline limits that apply to parts of this client."""
        ...

    @property
    def proof(self) -> str:
        """Which blob store this is; `persist.client.transport` compares it."""
        ...

    @property
    def listening_moves_since(self) -> bool:
        """Whether the shard's since follows its listeners. It does not through a server that asks for no token."""
        ...

    @property
    def shows_copy(self) -> bool:
        """Whether it reads a copy of a blob store, in which blobs may be lacking: nothing holds them there."""
        ...

    @property
    def knows_regions(self) -> bool:
        """Whether its servers tell an index of regions: a shard with a slash in its name may be elsewhere."""
        ...

    @property
    def leases(self) -> LeasePool | None:
        """What small reads share; None: each has a lease of its own."""
        ...

    @property
    def storms(self) -> Storms:
        """Who counts what is tried again, and tells of storms."""
        ...

    def families(self) -> Iterator[Family]:
        """What this client has asked for so far, and what that took. Asks nobody."""
        ...

    def belongs(self) -> tuple[str, int]:
        """The id of the location, and its epoch as of now."""
        ...

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        """Create the shard unless it exists; its view either way (without batches).

        `follows` is the id of the dropped shard whose name it takes, "" where the caller knows of none. If the last
        shard of the name is another dropped one, nothing is created: the view is of that one, and says which it is.
        So a request that comes late begins no further life of the name. None: it follows whichever was the last.
        `settings` of a new one; None: those that new shards have there.
        """
        ...

    def clone(self, source: str, name: str, keep_policies: bool = False) -> ShardView:
        """Make the shard `name` with the contents of `source` as of now; its view. Indeterminate: it may be there."""
        ...

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Names of shards that were not dropped, ascending, beyond `after`. Fewer than `limit` only at the end."""
        ...

    def vouched(self, shard: ShardId, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The runs, which this client has just staged, with receipts if it may give them itself."""
        ...

    def receipted(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The staged runs with receipts, so that a later commit of many parts need not look at each.

        Raises what is wrong with a part (InvalidUsage, Expired), and what every call may.
        """
        ...

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Commit a command. The commit history keeps what `caller` says; a server knows itself who that is."""
        ...

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        """Some of the commit history before a place (None: its end), newest first, at most `limit` entries."""
        ...

    def view(self, name: str, request: ViewRequest) -> ShardView: ...

    def erased_before(self, name: str, before: int) -> dict[str, Any]:
        """What still shows rows that were gone before a time, by a scan of both stores: see `Shard.erased`."""
        ...

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        """A piece of `optimize` or `vacuum`: see `persist.client.maintaining`."""
        ...

    def close(self) -> None: ...


class ForwardingTransport:
    """A transport that does what the inner one does; those around it change what they need to."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def blob(self) -> Blob:
        return self.inner.blob

    @property
    def clock(self) -> Clock:
        return self.inner.clock

    @property
    def ids(self) -> IdSource:
        return self.inner.ids

    @property
    def policy(self) -> Policy:
        return self.inner.policy

    @property
    def proof(self) -> str:
        return self.inner.proof

    @property
    def listening_moves_since(self) -> bool:
        return self.inner.listening_moves_since

    @property
    def shows_copy(self) -> bool:
        return self.inner.shows_copy

    @property
    def knows_regions(self) -> bool:
        return self.inner.knows_regions

    @property
    def leases(self) -> LeasePool | None:
        return self.inner.leases

    @property
    def storms(self) -> Storms:
        return self.inner.storms

    def families(self) -> Iterator[Family]:
        return self.inner.families()

    def belongs(self) -> tuple[str, int]:
        return self.inner.belongs()

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        return self.inner.create(name, schema, follows, settings)

    def clone(self, source: str, name: str, keep_policies: bool = False) -> ShardView:
        return self.inner.clone(source, name, keep_policies)

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        return self.inner.names(prefix, after, limit)

    def vouched(self, shard: ShardId, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return self.inner.vouched(shard, runs)

    def receipted(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return self.inner.receipted(name, runs)

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        return self.inner.apply(name, command, caller)

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        return self.inner.history(name, before, limit, maintenance)

    def view(self, name: str, request: ViewRequest) -> ShardView:
        return self.inner.view(name, request)

    def erased_before(self, name: str, before: int) -> dict[str, Any]:
        return self.inner.erased_before(name, before)

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        return self.inner.maintain(name, verb)

    def close(self) -> None:
        """Nothing: the inner one is borrowed, and its owner closes it."""


class AsCaller(ForwardingTransport):
    """A transport for who asks through a server, of whom the commit history is told. What they say goes first."""

    def __init__(self, inner: Transport, caller: Caller) -> None:
        super().__init__(inner)
        self._caller = caller

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        asks = self._caller
        purpose, info = asks.purpose or caller.purpose, asks.info or caller.info
        return super().apply(name, command, Caller(asks.who, purpose, info))


class OneShard(ForwardingTransport):
    """A transport for the handles of one shard: another life of its name, after a drop, neither hears nor tells them.

    It borrows the transport of the client, and is not closed.
    """

    def __init__(self, inner: Transport, shard: ShardId) -> None:
        super().__init__(inner)
        self.shard = shard

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if waits_for_holds(command) and (leases := self.leases) is not None:
            leases.let_go(name)
        return super().apply(name, replace(command, shard=self.shard), caller)

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        if (leases := self.leases) is not None:
            leases.let_go(name)
        return super().maintain(name, verb)

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        found = super().history(name, before, limit, maintenance)
        if found.shard != self.shard:
            raise UnknownShard(outlived(name))
        return found

    def last_view(self, name: str, request: ViewRequest) -> ShardView:
        """As `view`, of a dropped shard too: it knows what became of its tokens. Raises UnknownShard."""
        found = super().view(name, request)
        if found.shard_id != self.shard:
            raise UnknownShard(outlived(name))
        return found

    def view(self, name: str, request: ViewRequest) -> ShardView:
        found = self.last_view(name, request)
        if found.is_dropped:
            raise UnknownShard(dropped(name))
        return found


# How a client learns that the blob store it opened itself is the server's.
#
# The store holds the id of its location (`persist.commit.location_identity`). The proof is that id, and for files also
# the blob's inode, so that a copy of a directory, at the same path on another machine, is not taken for the original.


def ensure(blob: Blob, ids: IdSource) -> str:
    """The proof of the store, whose id is written if it has none. Raises BlobError."""
    ensure_id(blob, ids)
    return proof(blob)


def proof(blob: Blob) -> str:
    """The proof of the store. Raises BlobNotFound if no server has ever used it, BlobError."""
    digest = hashlib.sha256(blob.get(ID_KEY))
    path = blob.local_path(ID_KEY)
    if path is not None:
        with contextlib.suppress(OSError):
            digest.update(f" inode {os.stat(path).st_ino}".encode())
    return digest.hexdigest()


def is_same(blob: Blob, expected: str) -> bool:
    """Whether the store is the one that the proof is of; also False when it cannot be read."""
    try:
        return proof(blob) == expected
    except BlobError:
        return False
