"""Operations on many shards: listing what they hold, page by page, and dropping them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from persist.client.arguments import checked
from persist.client.idempotency import send
from persist.client.optimistic_loop import read_facts
from persist.client.read_leases import HandleSettings
from persist.client.row_retention import policy_json
from persist.client.shard_cuts import check_names_or_prefix, chosen_names, error_json, map_names
from persist.client.timestamps import instant_of, record_json
from persist.client.transport import OneShard, Transport
from persist.core import commands as c
from persist.core.errors import InvalidUsage, NotReadable, PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.shard_view import ViewRequest

PAGE_MAX = 100  # shards with details on one page
DROPPED_MAX = 1_000  # by one call
AT_ONCE = 8


@dataclass(frozen=True)
class ShardSummary:
    """What a shard holds; `Client.summaries` returns it.

    `rows` exist now (None: not known), `bytes` are stored, with all history. `oldest` is the wall clock from which its
    earliest readable time is shown (None: not known). `policy` is its row policy, as `Shard.retain` takes it.
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
        return record_json(self)


@dataclass(frozen=True)
class ShardDropped:
    """The outcome for one shard: `error` is what refused it (None: it was dropped, or would be)."""

    shard: str
    error: PersistError | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"shard": self.shard, "error": None if self.error is None else error_json(self.error)}


@dataclass(frozen=True)
class ShardsDropped:
    """The result of `Client.drop_shards`. `done` is false if it only listed the shards of a prefix."""

    done: bool
    outcomes: tuple[ShardDropped, ...]

    @property
    def complete(self) -> bool:
        """Whether all of them were dropped. Otherwise look at the errors, and repeat the call."""
        return self.done and all(outcome.error is None for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        shards = [outcome.to_json() for outcome in self.outcomes]
        return {"done": self.done, "complete": self.complete, "count": len(shards), "shards": shards}


@dataclass(frozen=True)
class DropRequest:
    """The shards to drop: `names`, or those whose names begin with `prefix`."""

    names: tuple[str, ...] | None
    prefix: str | None
    confirm: int | None = None
    force: bool = False

    def check(self) -> None:
        """Raises InvalidUsage if arguments contradict each other, or one is invalid."""
        check_names_or_prefix(self.names, self.prefix, "drop")
        checked("confirm", self.confirm, int, type(None))
        checked("force", self.force, bool)
        if self.prefix == "":
            raise InvalidUsage("the prefix of shards to drop must not be empty")


def summary_page(
    transport: Transport, settings: HandleSettings, prefix: str, after: str, limit: int
) -> tuple[list[ShardSummary], str | None]:
    """A page of shards beyond `after`, ascending, and the name after which the next page begins (None: no more)."""
    names = transport.names(prefix, after, limit)
    summaries = map_names(lambda name: _summary(transport, name, settings.read.retry_s), names, AT_ONCE)
    existing = [summary for summary in summaries if summary is not None]
    return existing, names[-1] if len(names) == limit else None


def drop_shards(transport: Transport, settings: HandleSettings, chosen: DropRequest) -> ShardsDropped:
    """Drop the shards. Raises what `Client.drop_shards` says."""
    chosen.check()
    names = chosen_names(transport, chosen.names, chosen.prefix, DROPPED_MAX)
    if len(names) > DROPPED_MAX:
        raise InvalidUsage(f"one call drops at most {DROPPED_MAX} shards; give fewer names, or a longer prefix")
    if chosen.confirm is None and chosen.prefix is not None:
        return ShardsDropped(False, tuple(ShardDropped(name, None) for name in names))
    if chosen.confirm not in (None, len(names)):
        raise InvalidUsage(
            f"confirm is {chosen.confirm}, and {len(names)} shards are selected: look at them, then confirm that many",
            count=len(names),
        )

    def drop_one(name: str) -> ShardDropped:
        try:
            view = transport.view(name, ViewRequest(with_batches=False))
            if not view.is_dropped:
                send(OneShard(transport, view.shard_id), name, c.Drop(chosen.force), settings.write.retry_s)
        except PersistError as error:
            return ShardDropped(name, error)
        return ShardDropped(name, None)

    return ShardsDropped(True, tuple(map_names(drop_one, names, AT_ONCE)))


def _summary(transport: Transport, name: str, retry_s: float) -> ShardSummary | None:
    """The summary; None: the shard was dropped since it was listed."""
    try:
        answer = read_facts(transport, name, retry_s)
    except UnknownShard:
        return None
    facts = answer.facts
    policy = None if facts.policy is None else policy_json(facts.policy)
    oldest = _oldest(transport, name, facts.since, retry_s)
    return ShardSummary(name, facts.since, facts.upper, answer.rows, facts.stored_bytes, oldest, policy)


def _oldest(transport: Transport, name: str, since: Antichain, retry_s: float) -> datetime | None:
    if since.element is None:
        return None
    try:
        return instant_of(transport, name, since.element, retry_s)
    except (InvalidUsage, NotReadable):  # nothing was written yet, or the location knows no wall clocks
        return None
