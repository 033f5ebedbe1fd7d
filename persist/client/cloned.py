"""Clones: a shard under a new name with the contents of another one, without a look at a row."""

from __future__ import annotations

from datetime import datetime

from persist.client.arguments import checked
from persist.client.shard import HandleSettings, Shard
from persist.client.transport import Transport
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.phases import dropped
from persist.core.view import ViewRequest


def clone(
    transport: Transport,
    settings: HandleSettings,
    source: str,
    name: str,
    as_of: int | datetime | None,
    tag: str | None,
    keep_policies: bool,
) -> Shard:
    """Raises what `Client.clone` says."""
    checked("tag", tag, str, type(None))
    checked("keep_policies", keep_policies, bool)
    check_shard_name(name)
    if as_of is not None and tag is not None:
        raise InvalidUsage("give a time or a tag, not both")
    if as_of is not None or tag is not None:
        view = transport.view(check_shard_name(source), ViewRequest(with_batches=False))
        if view.is_dropped:
            raise UnknownShard(dropped(source))
        found = Shard(transport, source, view, settings)
        if tag is not None:
            tags = found.tags()
            if tag not in tags:
                raise InvalidUsage(f"shard {source!r} has no tag {tag!r:.300}; `persist tags` shows them")
            as_of = tags[tag].time
        assert as_of is not None
        found.snapshot(as_of).close()  # else nothing is lent
    view = transport.clone(source, name, keep_policies)
    made = Shard(transport, name, view, settings)
    if as_of is not None:
        made.restore(as_of)
    return made
