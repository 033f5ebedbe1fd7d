"""Tags as callers set them: at a time, a wall clock, or the latest time, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from persist.client.retry import send
from persist.client.snapshot import LATEST_TRIES_MAX, latest
from persist.client.transport import Transport
from persist.client.wall_clock import kept_ms, shown_instant
from persist.core import commands as c
from persist.core.antichain import frontier
from persist.core.errors import NotReadable
from persist.core.tags import Tag, check_tag_name
from persist.core.view import ViewRequest


@dataclass(frozen=True, slots=True)
class ShardTag:
    """A time of a shard that stays readable, at least up to the instant `until`, in UTC; None: until it is taken away.

    `Shard.tag` and `Shard.tags` give it.
    """

    name: str
    time: int
    until: datetime | None

    @classmethod
    def of(cls, name: str, tag: Tag) -> ShardTag:
        """The tag of this name as callers see it."""
        return cls(name, tag.time, None if tag.until_ms is None else shown_instant(tag.until_ms))


def keep_ms(keep: timedelta | str | None) -> int | None:
    """For how long a tag is meant to be kept, in milliseconds; None: until it is taken away. Raises InvalidUsage."""
    return None if keep is None else kept_ms(keep, "keep", takes_none=False)


def set_tag(transport: Transport, name: str, tag: str, at: int | None, kept: int | None, retry_s: float) -> ShardTag:
    """Set the tag at a time; None: the latest complete one. Since may pass that one at once; then there is a later one.

    Raises InvalidUsage, NotReadable, Conflict, Unavailable.
    """
    check_tag_name(tag)
    tries = 0
    while True:
        time = latest(transport.view(name, ViewRequest(with_batches=False))) if at is None else at
        try:
            found = send(transport, name, c.SetTag(tag, frontier(time).element or 0, kept), retry_s)
        except NotReadable:
            tries += 1
            if at is not None or tries == LATEST_TRIES_MAX:
                raise
            continue
        assert isinstance(found, c.TagsAre)
        return ShardTag.of(tag, found.tags[tag])


def read_tags(transport: Transport, name: str, retry_s: float) -> dict[str, ShardTag]:
    """The tags of a shard, by name. Raises what every call may."""
    found = send(transport, name, c.ReadTags(), retry_s)
    assert isinstance(found, c.TagsAre)
    return {tag: ShardTag.of(tag, found.tags[tag]) for tag in sorted(found.tags)}


def remove_tag(transport: Transport, name: str, tag: str, retry_s: float) -> bool:
    """Take a tag away; whether there was one. Raises InvalidUsage (no tag can have this name)."""
    found = send(transport, name, c.RemoveTag(check_tag_name(tag)), retry_s)
    assert isinstance(found, c.TagRemoved)
    return found.tag is not None
