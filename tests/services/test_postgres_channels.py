"""A process is notified of the keys that it follows, on the channels of those keys."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from consensus import Consensus, open_consensus
from consensus.postgres import (
    ALL_CHANNELS,
    CHANNELS,
    LINGER_S,
    FollowedKeys,
    channel_of,
)
from tests.services.postgres import Postgres
from tests.support.waiting import LOOK_S, WAIT_S

TRIES = 10_000


def test_channels_of_keys_are_the_same_in_every_build() -> None:
    assert [channel_of(key) for key in ("orders", "eu/orders")] == ["consensus_moved_238", "consensus_moved_137"]
    assert len(ALL_CHANNELS) == CHANNELS
    assert len({channel_of(f"s{n}") for n in range(20 * CHANNELS)}) == CHANNELS


def test_what_is_followed_tells_the_channels_and_one_that_was_left_lingers() -> None:
    followed, pokes = FollowedKeys(), list[int]()
    followed.changed = lambda: pokes.append(1)
    first, second = followed.follow("a"), followed.follow("a")
    assert (followed.wanted((), 0.0), followed.keys_of([channel_of("a")]), len(pokes)) == ({channel_of("a")}, ["a"], 1)
    first()
    first()
    listening = followed.wanted((), 1.0)
    second()
    assert followed.keys_of(ALL_CHANNELS) == []
    assert followed.wanted(listening, 2.0) == listening
    assert followed.wanted(listening, 1.9 + LINGER_S) == listening
    assert followed.wanted(listening, 2.0 + LINGER_S) == frozenset()
    every = followed.follow("")
    assert followed.wanted((), 0.0) == ALL_CHANNELS
    every()
    assert followed.wanted((), 0.0) == frozenset()


pytest_services = pytest.mark.services


@pytest.fixture
def url(postgres_server: Postgres, request: pytest.FixtureRequest) -> str:
    return postgres_server.create_database(f"channels_{abs(hash(request.node.name)) % 10**9}")


@contextmanager
def listening(url: str, channel: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that listens to one channel."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"LISTEN {channel}")
        yield connection


def announced(connection: psycopg.Connection[Any]) -> set[str]:
    return {notice.payload for notice in connection.notifies(timeout=LOOK_S)}


def until_heard(store: Consensus, key: str, heard: Callable[[], set[str]]) -> None:
    """Commit until the news of it has come: hints may be lost."""
    head = store.head(key)
    first = 1 if head is None else head.seqno + 1
    for seqno in range(first, first + TRIES):
        assert store.compare_and_set(key, seqno, b"")
        if key in heard():
            return
    raise AssertionError(f"nobody heard of {key}")


@pytest_services
def test_a_commit_is_announced_only_on_the_channel_of_its_key(url: str) -> None:
    with (
        closing(open_consensus(url)) as store,
        listening(url, channel_of("k")) as own,
        listening(url, channel_of("another")) as other,
    ):
        store.check()
        until_heard(store, "k", lambda: announced(own))
        assert announced(other) == set()


@pytest_services
def test_who_begins_to_follow_a_key_is_told_of_it_once_it_listens(url: str) -> None:
    with closing(open_consensus(url)) as mine, closing(open_consensus(url)) as other:
        mine.check()
        heard: queue.Queue[str] = queue.Queue()
        unsubscribe = mine.subscribe(heard.put, lambda _: True)
        assert unsubscribe is not None
        assert other.compare_and_set("k", 1, b"before anybody listened")
        unfollow = mine.follow("k")
        assert heard.get(timeout=WAIT_S) == "k"
        unfollow()
        unsubscribe()
