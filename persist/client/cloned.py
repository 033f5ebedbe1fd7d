"""Clones: a shard under a new name with the contents of another one, without a look at a row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from persist.client.arguments import checked
from persist.client.changes import Named
from persist.client.restore import Restoring
from persist.client.rewriting import check_complete
from persist.client.shard import HandleSettings, Shard
from persist.client.transport import OneShard, Transport
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.phases import dropped
from persist.core.view import ViewRequest


@dataclass(frozen=True)
class Asked:
    """What is to be cloned: `source` as of a time or a tag, or as of now."""

    source: str
    name: str
    as_of: int | datetime | None
    tag: str | None
    keep_policies: bool

    def check(self) -> None:
        """Raises InvalidUsage where that makes no sense."""
        checked("as_of", self.as_of, int, datetime, type(None))
        checked("tag", self.tag, str, type(None))
        checked("keep_policies", self.keep_policies, bool)
        check_shard_name(self.source)
        check_shard_name(self.name)
        if self.as_of is not None and self.tag is not None:
            raise InvalidUsage("give a time or a tag, not both")


def clone(transport: Transport, settings: HandleSettings, asked: Asked) -> Shard:
    """Raises what `Client.clone` says."""
    asked.check()
    time = None if asked.as_of is None and asked.tag is None else _readable(transport, settings, asked)
    made = Shard(transport, asked.name, transport.clone(asked.source, asked.name, asked.keep_policies), settings)
    if time is not None:
        made.restore(time)
    return made


def _readable(transport: Transport, settings: HandleSettings, asked: Asked) -> int:
    """The time that is asked for. Raises what is wrong with it, before anything is lent."""
    name, as_of = asked.source, asked.as_of
    view = transport.view(name, ViewRequest(with_batches=False))
    if view.is_dropped:
        raise UnknownShard(dropped(name))
    found = Shard(transport, name, view, settings)
    if asked.tag is not None:
        tags = found.tags()
        if asked.tag not in tags:
            raise InvalidUsage(f"shard {name!r} has no tag {asked.tag!r:.300}; `persist tag {name}` shows them")
        as_of = tags[asked.tag].time
    assert as_of is not None
    to = Named.of("as_of", as_of, transport, name, (0.0, settings.read.retry_s))
    check_complete(name, to.time, view, "cloned")
    assert to.time is not None
    found.snapshot(to.time).close()
    Restoring.of(OneShard(transport, view.shard_id), name, to, settings.write, settings.read).check()
    return to.time
