"""Clones: a shard under a new name with the contents of another one, without a look at a row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from persist.client.arguments import checked
from persist.client.shard import HandleSettings, Shard
from persist.client.transport import Transport
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.phases import dropped
from persist.core.view import ViewRequest


@dataclass(frozen=True)
class ToClone:
    """Of which time the clone is to be (neither: as of now), and whether its policy of rows goes on."""

    as_of: int | datetime | None = None
    tag: str | None = None
    keep_policies: bool = False


def clone(transport: Transport, settings: HandleSettings, source: str, name: str, wanted: ToClone) -> Shard:
    """Raises what `Client.clone` says."""
    as_of, tag = wanted.as_of, wanted.tag
    checked("tag", tag, str, type(None))
    checked("keep_policies", wanted.keep_policies, bool)
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
        found.snapshot(as_of, wait_s=0).close()  # else nothing is lent
    view = transport.clone(source, name, wanted.keep_policies)
    made = Shard(transport, name, view, settings)
    if as_of is not None:
        made.restore(as_of)
    return made
