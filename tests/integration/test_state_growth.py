"""No caller makes a State grow without end: readers, cursors and writers of a shard have bounds with names.

Cursors had none, and 100,000 readers were possible: 6,400 of them and 2,400 cursors made each insert six times as slow.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from compactor.embedded import maintain
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.core import commands as c
from persist.core.errors import InvalidUsage, Overloaded, PersistError
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, ReaderId, WriterId
from persist.core.record import replace
from persist.core.state import Policy
from tests.support.location import memory_location
from tests.support.shard import Shard, numbered

LEASE_MS = 60_000

BOUNDS: list[tuple[str, Callable[[int], c.Command], type[PersistError], str]] = [
    (
        "readers_max",
        lambda n: c.RegisterReader(ReaderId(numbered("r", n)), Antichain(0), LEASE_MS, "test"),
        Overloaded,
        "has 3 readers; expire some",
    ),
    (
        "cursors_max",
        lambda n: c.RegisterCriticalReader(CriticalReaderId(numbered("c", n)), "", "test"),
        InvalidUsage,
        "has 3 cursors, which is the most; give one up first",
    ),
    (
        "writers_max",
        lambda n: c.RegisterWriter(WriterId(numbered("w", n)), LEASE_MS),
        Overloaded,
        "has 3 writers; expire some",
    ),
]


@pytest.mark.parametrize(("bound", "made", "kind", "said"), BOUNDS)
def test_one_more_is_refused(bound: str, made: Callable[[int], c.Command], kind: type[PersistError], said: str) -> None:
    shard = Shard(replace(Policy(), **{bound: 3}))
    for number in range(3):
        shard.one(made(number))
    with pytest.raises(kind, match=said) as refused:
        shard.one(made(3))
    assert type(refused.value) is kind
    shard.one(made(1))  # the same again is no new one


def test_a_cursor_that_is_given_up_makes_room() -> None:
    shard = Shard(replace(Policy(), cursors_max=1))
    first, second = (CriticalReaderId(numbered("c", n)) for n in (1, 2))
    shard.one(c.RegisterCriticalReader(first, "", "one"))
    shard.one(c.ExpireCriticalReader(first, ""))
    shard.one(c.RegisterCriticalReader(second, "", "two"))


def test_the_bounds_are_such_that_a_commit_stays_small() -> None:
    policy = Policy()
    assert (policy.readers_max, policy.cursors_max) == (10_000, 1_000)


def test_callers_without_a_server_are_bounded_alike() -> None:
    location = memory_location(policy=Policy(cursors_max=2))
    client = Client(EmbeddedTransport(location, maintain), HandleSettings())
    shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
    for name in ("a", "b", "a"):
        shard.critical_reader(name)
    with pytest.raises(InvalidUsage, match="shard 'orders' has 2 cursors, which is the most"):
        shard.critical_reader("c")
