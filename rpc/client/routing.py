"""Which servers to ask about a shard of another region: those near for reads, those at its home for writes.

Found by name from `persist.client.connect`, which lies below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from persist.client.connect import Connection
from persist.commit.system import SystemClock
from persist.core.errors import InvalidUsage, UnknownShard
from persist.regions.index import region_of
from rpc.client.calls import Call, HttpCalls, decoded_json
from rpc.client.servers import Servers

_REGIONS = Call("GET", "/v1/regions")


def routed(connection: Connection, name: str, *, writes: bool) -> Connection:
    """The connection by which this shard is read, or written (`writes`); the same where it is at home there.

    Raises InvalidUsage: the index does not have the region, or names no server for that. Unavailable.
    """
    region = region_of(name)
    if not region:
        return connection
    told = _told(connection)
    index = told.get("index")
    if not index or told.get("region") == region:
        return connection
    if region not in index:
        raise InvalidUsage(
            f"{connection.url} knows no region {region!r}, of shard {name!r}; its index has {', '.join(sorted(index))}"
        )
    if not writes and told.get("of") == region:
        return connection
    urls = index[region]["write" if writes else "read"]
    if not urls:
        what = "servers at home of" if writes else "server near here that reads"
        raise InvalidUsage(f"the index of {connection.url} names no {what} region {region!r}; see `persist regions`")
    return replace(connection, url=",".join(urls))


def _told(connection: Connection) -> dict[str, Any]:
    """What the near server says of regions; of an older server nothing."""
    clock = SystemClock()
    servers = Servers((connection.url or "").split(","), clock)
    calls = HttpCalls(
        servers,
        clock,
        token=connection.token,
        ca_file=connection.ca_file,
        timeout_s=connection.request_s,
        connect_s=connection.connect_s,
    )
    try:
        return decoded_json(calls.call(_REGIONS), dict[str, Any])
    except (InvalidUsage, UnknownShard):
        return {}
    finally:
        calls.close()
