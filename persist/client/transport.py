"""How a client reaches shards, embedded or through a server, and the proof that a blob store is the server's."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

from blob import Blob, BlobError
from persist.client.lease_pool import LeasePool
from persist.commit.clocks_and_ids import Clock
from persist.commit.location_identity import ID_KEY, ensure_id
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller, EntryPlace, HistoryPage
from persist.core.batch import Run
from persist.core.errors import UnknownShard
from persist.core.ids import IdSource, ShardId
from persist.core.record import replace
from persist.core.shard_phases import dropped, outlived
from persist.core.shard_settings import ShardSettings
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import Policy, SchemaRecord
from persist.formats.exposition import Family
from persist.telemetry.metrics import Storms

# The outcome of these depends on the holds of the shard: unused readers are released first.
_WAITING_FOR_HOLDS = (c.Drop, c.CompareAndDowngradeSince, c.ForgetHistory, c.SetSettings)


def waits_for_holds(command: c.Command) -> bool:
    """Whether the outcome depends on holds, so that unused readers are released before it."""
    erases = isinstance(command, c.Rewrite) and command.erasure is not None
    return erases or isinstance(command, _WAITING_FOR_HOLDS)


class Transport(Protocol):
    """Errors are those of `persist.core.errors`; calls are safe to repeat."""

    @property
    def blob(self) -> Blob:
        """Where this client reads and writes parts: the store itself, or the server's routes for blobs."""

    @property
    def clock(self) -> Clock: ...

    @property
    def ids(self) -> IdSource: ...

    @property
    def policy(self) -> Policy:
        """The inline limits that apply to parts of this client."""

    @property
    def proof(self) -> str:
        """Which blob store this is, to be compared by `is_same`."""

    @property
    def listening_moves_since(self) -> bool:
        """Whether the shard's since follows its listeners. It does not with a server that asks for no token."""

    @property
    def shows_copy(self) -> bool:
        """Whether it reads a copy of a blob store, in which blobs may be missing and nothing can be held."""

    @property
    def knows_regions(self) -> bool:
        """Whether its servers publish an index of regions: a shard with a slash in its name may be elsewhere."""

    @property
    def leases(self) -> LeasePool | None:
        """The leases that small reads share; None: each read has its own lease."""

    @property
    def storms(self) -> Storms:
        """Counts retries and logs retry storms."""

    def families(self) -> Iterator[Family]:
        """The calls of this client so far, and their durations. Needs no request."""

    def belongs(self) -> tuple[str, int]:
        """The id of the location, and its current epoch."""

    def create(
        self, name: str, schema: SchemaRecord, follows: str | None = None, settings: ShardSettings | None = None
    ) -> ShardView:
        """Create the shard unless it exists; its view either way (without batches).

        `follows` is the id of the dropped shard whose name it takes, "" if the caller knows of none. If the last shard
        of the name is another dropped one, nothing is created, and the view is of that one. So a delayed request
        creates no further life of the name. None: it follows whatever shard was the last. `settings` of a new shard;
        None: the default of the location.
        """

    def clone(self, source: str, name: str, keep_policies: bool = False) -> ShardView:
        """Make the shard `name` with the current contents of `source`; its view. Indeterminate: it may exist."""

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Names of shards that were not dropped, ascending, beyond `after`. Fewer than `limit` only at the end."""

    def vouched(self, shard: ShardId, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The runs, which this client has just staged, with receipts if it may issue them itself."""

    def receipted(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The staged runs with receipts, so that a later commit of many parts need not validate each.

        Raises InvalidUsage or Expired for a part that cannot be committed, and what every call may.
        """

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Commit a command. The commit history keeps `caller`; a server identifies the caller itself."""

    def history(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        """A page of the commit history before a place (None: its end), newest first, at most `limit` entries."""

    def view(self, name: str, request: ViewRequest) -> ShardView: ...

    def erased_before(self, name: str, before: int) -> dict[str, Any]:
        """What still shows rows that were removed before a time, by a scan of both stores: see `Shard.erased`."""

    def maintain(self, name: str, verb: str) -> dict[str, Any]:
        """One step of `optimize` or `vacuum`: see `persist.client.embedded`."""

    def close(self) -> None: ...


def _of_inner(name: str) -> Any:
    """A property or a method that is that of the inner transport."""
    return property(lambda transport: getattr(transport.inner, name))


class ForwardingTransport:
    """A transport that forwards to the inner one; subclasses change single calls."""

    blob: Blob = _of_inner("blob")
    clock: Clock = _of_inner("clock")
    ids: IdSource = _of_inner("ids")
    policy: Policy = _of_inner("policy")
    proof: str = _of_inner("proof")
    listening_moves_since: bool = _of_inner("listening_moves_since")
    shows_copy: bool = _of_inner("shows_copy")
    knows_regions: bool = _of_inner("knows_regions")
    leases: LeasePool | None = _of_inner("leases")
    storms: Storms = _of_inner("storms")
    # Methods that subclasses leave as they are.
    families, belongs, create, clone, names = map(_of_inner, ("families", "belongs", "create", "clone", "names"))

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

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
        """Nothing: the inner transport is borrowed, and its owner closes it."""


class AsCaller(ForwardingTransport):
    """A transport for a caller behind a server, for the commit history. The caller's own purpose and info win."""

    def __init__(self, inner: Transport, caller: Caller) -> None:
        super().__init__(inner)
        self._caller = caller

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        own = self._caller
        purpose, info = own.purpose or caller.purpose, own.info or caller.info
        return super().apply(name, command, Caller(own.who, purpose, info))


class OneShard(ForwardingTransport):
    """A transport for the handles of one shard: they never reach a later shard of the same name.

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
        page = super().history(name, before, limit, maintenance)
        if page.shard != self.shard:
            raise UnknownShard(outlived(name))
        return page

    def last_view(self, name: str, request: ViewRequest) -> ShardView:
        """As `view`, also of a dropped shard, which remembers the outcomes of its tokens. Raises UnknownShard."""
        view = super().view(name, request)
        if view.shard_id != self.shard:
            raise UnknownShard(outlived(name))
        return view

    def view(self, name: str, request: ViewRequest) -> ShardView:
        view = self.last_view(name, request)
        if view.is_dropped:
            raise UnknownShard(dropped(name))
        return view


# How a client checks that the blob store it opened itself is the server's.
#
# The store holds the id of its location (`persist.commit.location_identity`). The proof is that id, and for files also
# the blob's inode, so that a copy of a directory at the same path on another machine is not mistaken for the original.


def ensure(blob: Blob, ids: IdSource) -> str:
    """The proof of the store, to which an id is written if it has none. Raises BlobError."""
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
    """Whether the proof is of this store; False if the store cannot be read."""
    try:
        return proof(blob) == expected
    except BlobError:
        return False
