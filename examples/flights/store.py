"""What a shard takes up: its batches as its State has them, its blobs as the store lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist.cli.connection_args import Where
from persist.cli.shards import summary
from persist.commit.location import Location
from persist.core.blob_keys import shard_prefix

NAMES_MAX = 10_000  # shards of earlier runs
VARIABLES = ("PERSIST_DIRECTORY", "PERSIST_BLOB", "PERSIST_CONSENSUS")


@dataclass(frozen=True)
class Stored:
    """One look at a shard. `live_bytes` are those of its batches, `blob_bytes` all that lie in the store."""

    batches: int
    parts: int
    updates: int
    live_bytes: int
    blobs: int
    blob_bytes: int


def look(location: Location, shard: str) -> Stored:
    state = location.machine(shard).refresh()
    found = summary(state)
    sizes = [stat.size for stat in location.blob.list(shard_prefix(state.shard_id))]
    return Stored(found["batches"], found["parts"], found["updates"], found["bytes"], len(sizes), sum(sizes))


def free_name(location: Location, wanted: str) -> str:
    """`wanted`, or with a number after it that no shard has yet, so that nobody's rows are in the way."""
    taken = frozenset(location.names(wanted, limit=NAMES_MAX, with_dropped=True))
    candidates = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, NAMES_MAX + 2))
    return next(name for name in candidates if name not in taken)


def environment_of(where: Where, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that tells children where the shards are: a URL may hold a password."""
    given = dict(zip(VARIABLES, (where.directory, where.blob, where.consensus), strict=True))
    kept = {name: value for name, value in environment.items() if name not in VARIABLES}
    return {**kept, **{name: value for name, value in given.items() if value}}


__all__ = ["Stored", "environment_of", "free_name", "look"]
