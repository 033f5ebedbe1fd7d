"""Transports that commit here, and merge and collect a shard when asked to: what `persist.connect` opens for stores."""

from __future__ import annotations

from typing import Any

from persist.client.embedded import EmbeddedTransport
from persist.client.maintaining import OPTIMIZE, VERBS
from persist.client.row_retention import kept_by_itself
from persist.commit.location import Location
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name


def open_transport(location: Location) -> EmbeddedTransport:
    """The transport of an embedded program. Its users close it, and the location with it."""
    return kept_by_itself(location, maintain)


def maintain(location: Location, name: str, verb: str) -> dict[str, Any]:
    """One piece of it, as JSON; `more` says whether to ask again. Raises InvalidUsage, UnknownShard, Unavailable."""
    if verb not in VERBS:
        raise InvalidUsage(f"maintenance is {' or '.join(VERBS)}, not {verb!r:.100}")
    from compactor import on_demand  # most programs never ask for it

    work = on_demand.optimize if verb == OPTIMIZE else on_demand.vacuum
    return work(location, check_shard_name(name))
