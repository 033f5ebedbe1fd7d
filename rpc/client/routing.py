"""Which servers to ask about a shard of another region: those near for reads, those at its home for writes.

`persist.client.connect`, which is below, finds it beside `open_transport`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from persist.client.connect import Connection
from persist.commit.system import SystemClock
from persist.core.errors import InvalidUsage, UnknownShard
from persist.http_client.calls import Call, calls_of, decoded_json
from persist.regions.index import region_of

_REGIONS = Call("GET", "/v1/regions")


def routed(connection: Connection, name: str, *, writes: bool) -> Connection:
    """The connection by which this shard is read, or written (`writes`); the same where it is at home there.

    A server whose own index has a later epoch of its region is home no more: it only reads what it had.

    Raises InvalidUsage: the index does not have the region, or names no server for that. Unavailable.
    """
    region = region_of(name)
    if not region:
        return connection
    told = _told(connection)
    index = told.get("index")
    if not index or (told.get("region") == region and _is_home(told, index.get(region))):
        return connection
    if region not in index:
        raise InvalidUsage(
            f"{connection.url} knows no region {region!r}, of shard {name!r}; its index has {', '.join(sorted(index))}"
        )
    if not writes and told.get("of") == region:
        return connection
    urls = index[region]["write" if writes else "read"]
    if told.get("region") == region and not writes:
        # A home of before shows no more than it had: another server near here reads, else the home of now.
        urls = [url for url in urls if url not in (connection.url or "").split(",")] or index[region]["write"]
    if not urls:
        what = "servers at home of" if writes else "server near here that reads"
        raise InvalidUsage(f"the index of {connection.url} names no {what} region {region!r}; see `persist regions`")
    return replace(connection, url=",".join(urls))


def _is_home(told: dict[str, Any], entry: dict[str, Any] | None) -> bool:
    """Whether this server of the region is its home, as far as its own index tells: no other one has a later epoch."""
    later = (entry or {}).get("epoch") or 0
    return told.get("role") != "copy" and later <= told.get("epoch", later)


def _told(connection: Connection) -> dict[str, Any]:
    """What the near server says of regions; of an older server nothing."""
    calls = calls_of(connection, SystemClock())
    try:
        return decoded_json(calls.call(_REGIONS), dict[str, Any])
    except (InvalidUsage, UnknownShard):
        return {}
    finally:
        calls.close()
