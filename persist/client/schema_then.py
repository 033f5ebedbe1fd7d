"""Which schema a shard had as of a time."""

from __future__ import annotations

from persist.client.retry import send
from persist.client.transport import Transport
from persist.core import commands as c
from persist.core.errors import Unavailable
from persist.core.view import ShardView
from persist.parts.evolution import sound_schemas
from persist.parts.then import schema_at

TRIES_MAX = 10  # where somebody is asked who has not seen yet what the view shows


def schema_then(transport: Transport, view: ShardView, as_of: int, retry_s: float) -> int:
    """The id of the newest schema that the shard had when a complete time was written. It never changes.

    Raises Unavailable, and what every call may.
    """
    for _ in range(TRIES_MAX):
        found = send(transport, view.name, c.ReadSchemaTimes(), retry_s)
        assert isinstance(found, c.SchemaTimes)
        if found.newest >= view.schema_id:
            return schema_at(sound_schemas(view.schemas), found.times, as_of)
    raise Unavailable(f"what columns shard {view.name!r} had at {as_of} is not known yet where it was asked; retry")
