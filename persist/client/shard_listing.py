"""Many shards at once: what they hold, page by page, and dropping them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from persist.client.arguments import checked
from persist.client.history_api import HandleSettings
from persist.client.idempotency import send
from persist.client.row_retention import policy_json
from persist.client.stream_cuts import each, error_json
from persist.client.timestamps import datetime_text, instant_of
from persist.client.transport import OneShard, Transport
from persist.commit.location import all_names
from persist.core import commands as c
from persist.core.errors import InvalidUsage, NotReadable, PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.core.shard_view import ViewRequest

PAGE_MAX = 100  # shards with details on one page
DROPPED_MAX = 1_000  # by one call
AT_ONCE = 8


@dataclass(frozen=True)
class ShardSummary:
    """What a shard holds; `Client.summaries` gives it.

    `rows` are there now (None: not known), `bytes` are stored, with all history. `oldest` is the wall clock from which
    on its earliest readable time is shown (None: not known). `policy` is that of its rows, as `Shard.retain` takes it.
    """

    name: str
    since: Antichain
    upper: Antichain
    rows: int | None
    bytes: int
    oldest: datetime | None
    policy: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown = {"since": self.since.to_json(), "upper": self.upper.to_json(), "oldest": datetime_text(self.oldest)}
        return {**told, **shown}


@dataclass(frozen=True)
class ShardDropped:
    """What became of one shard: `error` is what refused it (None: it was dropped, or would be)."""

    shard: str
    error: PersistError | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"shard": self.shard, "error": None if self.error is None else error_json(self.error)}


@dataclass(frozen=True)
class ShardsDropped:
    """The result of `Client.drop_shards`. `done` is false if it only listed the shards that it would drop."""

    done: bool
    outcomes: tuple[ShardDropped, ...]

    @property
    def complete(self) -> bool:
        """Whether all of them were dropped. Otherwise look at the errors, and repeat it."""
        return self.done and all(outcome.error is None for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        shards = [outcome.to_json() for outcome in self.outcomes]
        return {"done": self.done, "complete": self.complete, "count": len(shards), "shards": shards}


@dataclass(frozen=True)
class Chosen:
    """The shards that are meant: `names`, or those whose names begin with `prefix`."""

    names: tuple[str, ...] | None
    prefix: str | None
    confirm: int | None = None
    force: bool = False

    def check(self) -> None:
        """Raises InvalidUsage where that makes no sense."""
        if (self.names is None) == (self.prefix is None):
            raise InvalidUsage("give either the names of the shards to drop, or a prefix of names")
        checked("prefix", self.prefix, str, type(None))
        checked("confirm", self.confirm, int, type(None))
        checked("force", self.force, bool)
        if self.prefix == "":
            raise InvalidUsage("the prefix of shards to drop must not be empty")
        for name in self.names or ():
            check_shard_name(name)


def page(
    transport: Transport, settings: HandleSettings, prefix: str, after: str, limit: int
) -> tuple[list[ShardSummary], str | None]:
    """Some shards beyond `after`, ascending, and the name after which the next page begins (None: no more)."""
    names = transport.names(prefix, after, limit)
    found = each(lambda name: _summary(transport, name, settings.read.retry_s), names, AT_ONCE)
    return [one for one in found if one is not None], names[-1] if len(names) == limit else None


def drop_all(transport: Transport, settings: HandleSettings, chosen: Chosen) -> ShardsDropped:
    """Drop the shards. Raises what `Client.drop_shards` says."""
    chosen.check()
    if chosen.names is not None:
        names = tuple(sorted(set(chosen.names)))
    else:
        names = tuple(islice(all_names(transport.names, chosen.prefix or ""), DROPPED_MAX + 1))
    if len(names) > DROPPED_MAX:
        raise InvalidUsage(f"one call drops at most {DROPPED_MAX} shards; give fewer names, or a longer prefix")
    if chosen.confirm is None:
        return ShardsDropped(False, tuple(ShardDropped(name, None) for name in names))
    if chosen.confirm != len(names):
        raise InvalidUsage(
            f"confirm is {chosen.confirm}, and {len(names)} shards are meant: look at them, then confirm that many",
            count=len(names),
        )

    def one(name: str) -> ShardDropped:
        try:
            view = transport.view(name, ViewRequest(with_batches=False))
            if not view.is_dropped:
                send(OneShard(transport, view.shard_id), name, c.Drop(chosen.force), settings.write.retry_s)
        except PersistError as error:
            return ShardDropped(name, error)
        return ShardDropped(name, None)

    return ShardsDropped(True, tuple(each(one, names, AT_ONCE)))


def _summary(transport: Transport, name: str, retry_s: float) -> ShardSummary | None:
    """None: it was dropped since it was listed."""
    try:
        found = send(transport, name, c.ReadRetention(), retry_s)
    except UnknownShard:
        return None
    assert isinstance(found, c.RetentionIs)
    facts = found.facts
    policy = None if facts.policy is None else policy_json(facts.policy)
    oldest = _oldest(transport, name, facts.since, retry_s)
    return ShardSummary(name, facts.since, facts.upper, found.rows, facts.stored_bytes, oldest, policy)


def _oldest(transport: Transport, name: str, since: Antichain, retry_s: float) -> datetime | None:
    if since.element is None:
        return None
    try:
        return instant_of(transport, name, since.element, retry_s)
    except (InvalidUsage, NotReadable):  # nothing was written there yet, or the location knows no wall clocks
        return None
