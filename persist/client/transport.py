"""How a client reaches shards: embedded (its own machines over the stores) or through a server."""

from __future__ import annotations

from typing import Protocol

from blob import Blob
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.ids import IdSource
from persist.core.state import Policy, SchemaRecord
from persist.core.view import ShardView, ViewRequest


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
        """Which blob store this is; `persist.client.identity` compares it."""
        ...

    def create(self, name: str, schema: SchemaRecord) -> ShardView:
        """Create the shard unless it exists; its view either way (without batches)."""
        ...

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Names of shards, ascending, beyond `after`."""
        ...

    def vouched(self, name: str, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The runs, which this client has just staged, with receipts if it may give them itself. Calls nobody."""
        ...

    def apply(self, name: str, command: c.Command) -> c.Result: ...

    def view(self, name: str, request: ViewRequest) -> ShardView: ...

    def close(self) -> None: ...
