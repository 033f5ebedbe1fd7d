"""`connect()`: one client, whether the shards live in a directory, in stores, or behind a server."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from blob import without_secrets
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.transport import Transport
from persist.commit.location import LocationSettings, all_names, open_location, open_stores
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.core.view import ViewRequest
from persist.parts import ShardSchema

# Where transports of other schemes live: found by name when asked for, since the service depends on us, not we on it.
_TRANSPORT_MODULES = {"http": "rpc.client.transport", "https": "rpc.client.transport"}


@dataclass(frozen=True)
class Connection:
    """Plain settings of a connection; pickle it to connect elsewhere.

    Either `url` (`persist:///dir`, or one or more `http(s)://host:port` with commas), or both `blob` and `consensus`.
    """

    url: str | None = None
    blob: str | None = None
    consensus: str | None = None
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    timeout_s: float = 60.0
    handles: HandleSettings = field(default_factory=HandleSettings)
    location: LocationSettings = field(default_factory=LocationSettings)

    def transport(self) -> Transport:
        """Open the transport that these settings ask for. Raises InvalidUsage naming what is wrong with them."""
        if self.url is not None and (self.blob or self.consensus):
            raise InvalidUsage("give either a url, or a blob and a consensus location, not both")
        if self.url is None:
            if not self.blob or not self.consensus:
                raise InvalidUsage("give a url, or both a blob and a consensus location")
            return EmbeddedTransport(open_stores(self.blob, self.consensus, settings=self.location))
        scheme = self.url.partition(":")[0].lower()
        if scheme == "persist":
            return EmbeddedTransport(open_location(self.url, settings=self.location))
        if scheme in _TRANSPORT_MODULES:
            module: Any = importlib.import_module(_TRANSPORT_MODULES[scheme])
            return module.open_transport(self)  # type: ignore[no-any-return]
        raise InvalidUsage(f"{without_secrets(self.url)!r} is neither persist:///directory nor http(s)://host:port")


class Client:
    """Opens shards. Thread-safe; close it to release connections."""

    def __init__(self, transport: Transport, settings: HandleSettings | None = None) -> None:
        self.transport = transport
        self._settings = settings or HandleSettings()

    def create_shard(self, name: str, schema: pa.Schema, key: Sequence[str]) -> Shard:
        """Create a shard with these columns and key columns; if it exists with the same schema, open it.

        Raises ShardExists when it has another schema, InvalidUsage when the schema cannot be stored.
        """
        check_shard_name(name)
        view = self.transport.create(name, ShardSchema(schema, tuple(key)).to_record())
        return Shard(self.transport, name, view, self._settings)

    def shard(self, name: str) -> Shard:
        """Open an existing shard. Raises UnknownShard."""
        check_shard_name(name)
        view = self.transport.view(name, ViewRequest(with_batches=False))
        return Shard(self.transport, name, view, self._settings)

    def shards(self, prefix: str = "") -> list[str]:
        """The names of all shards that begin with `prefix`, ascending."""
        return list(all_names(self.transport.names, prefix))

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def connect(url: str | None = None, **settings: Any) -> Client:
    """A client of the shards at `url`: `connect("persist:///path")`, `connect("http://host:8787")`,

    or `connect(blob="s3://bucket", consensus="postgresql://host/db")`. Further settings: see `Connection`.
    """
    connection = Connection(url, **settings)
    return Client(connection.transport(), connection.handles)
