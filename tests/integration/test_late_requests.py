"""A request is held up by a server that is stopped. Its caller is answered by another one; then the server goes on.

What the caller was told stays true: a command that was refused does not happen afterwards, and one that was answered
does not happen again. Each test says what once happened instead.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import Antichain, Client, ReadLease, ReadSettings, Shard
from persist.client.embedded import EmbeddedTransport
from persist.core import commands as c
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Expired,
    Indeterminate,
    OpaqueMismatch,
    PersistError,
    SchemaMismatch,
    UpperMismatch,
)
from persist.core.ids import token_of_key
from persist.core.state import SchemaRecord
from persist.http_client.http_calls import HttpCalls, Servers
from tests.support.answering import CLOSE, Answering
from tests.support.late import LateTransport
from tests.support.location import AscendingIds, TestClock, memory_location
from tests.support.server import url_of

SCHEMA = pa.schema([pa.field("k", pa.int64(), nullable=False)])
WIDER = SCHEMA.append(pa.field("v", pa.int64()))
WIDEST = WIDER.append(pa.field("w", pa.int64()))
LOCK = persist.named_key("lock")
TOKEN = token_of_key("the write that comes late")


@dataclass
class Place:
    """Two clients, each with a server of its own. The requests of `client` can be held up."""

    client: Client
    other: Client
    late: LateTransport
    clock: TestClock

    def __post_init__(self) -> None:
        self.shard = self.client.create_shard("orders", SCHEMA, ["k"])
        self.theirs = self.other.shard("orders")

    def rows(self) -> list[int]:
        return sorted(self.other.shard("orders").snapshot().to_arrow()["k"].to_pylist())


@pytest.fixture
def place() -> Iterator[Place]:
    blob, consensus, clock = MemoryBlob("mem:"), MemoryConsensus("mem:"), TestClock()
    one, two = (
        EmbeddedTransport(memory_location(blob=blob, consensus=consensus, clock=clock, ids=AscendingIds(origin)))
        for origin in (1, 2)
    )
    late = LateTransport(one)
    yield Place(Client(late), Client(two), late, clock)
    one.close()
    two.close()


def row(key: int) -> list[dict[str, int]]:
    return [{"k": key}]


def under_lock(value: int) -> persist.AttributeUpdate:
    return persist.AttributeUpdate.replace_if_equals(LOCK, value, 0)


def lock(shard: Shard, value: int) -> None:
    shard.attributes.update(persist.AttributeUpdate.replace(LOCK, value))


# --- refused, and then it would happen


@dataclass(frozen=True)
class Refused:
    """`first` makes that `call` is refused as `found`; after `then` the late request finds what it needs."""

    kind: type[c.Command]
    first: Callable[[Shard], object]
    call: Callable[[Shard], object]
    found: type[PersistError]
    then: Callable[[Shard], object]


def held(shard: Shard) -> None:
    shard.critical_reader("keeper", "mine")


def released(shard: Shard) -> None:
    shard.critical_reader("keeper").expire()


def refused_by_lock(kind: type[c.Command], call: Callable[[Shard], object]) -> Refused:
    return Refused(kind, lambda s: lock(s, 1), call, AttributeMismatch, lambda s: lock(s, 0))


MAY_COME = {
    "drop": Refused(c.Drop, held, lambda s: s.drop(), Conflict, released),
    "insert under a condition": refused_by_lock(c.Insert, lambda s: s.insert(row(9), attributes=under_lock(2))),
    "insert with a token": refused_by_lock(c.Insert, lambda s: s.insert(row(9), token=TOKEN, attributes=under_lock(2))),
    "attributes": refused_by_lock(c.UpdateAttributes, lambda s: s.attributes.update(under_lock(2))),
    "compare-and-append ahead of the upper": Refused(
        c.CompareAndAppend,
        lambda s: s.advance_upper(1),
        lambda s: s.compare_and_append(row(9), 5, 6),
        UpperMismatch,
        lambda s: s.advance_upper(5),
    ),
    "append beyond a gap": Refused(
        c.Append,
        lambda s: s.advance_upper(1),
        lambda s: s.append(row(9), 5, 6),
        UpperMismatch,
        lambda s: s.advance_upper(5),
    ),
    "downgrade": Refused(
        c.CompareAndDowngradeSince,
        lambda s: (s.insert(row(1)), s.insert(row(2)), s.critical_reader("keeper", "theirs")),
        lambda s: s.critical_reader("keeper").downgrade_since(1, expected="mine"),
        OpaqueMismatch,
        lambda s: s.critical_reader("keeper").downgrade_since(0, opaque="mine"),
    ),
}


@pytest.mark.parametrize("door", MAY_COME)
def test_what_may_still_happen_is_not_told_as_refused(place: Place, door: str) -> None:
    """All but the last were told as refused, and happened when the server went on."""
    case = MAY_COME[door]
    case.first(place.theirs)
    place.late.hold(case.kind)
    with pytest.raises(Indeterminate, match="or may yet") as told:
        case.call(place.shard)
    assert told.value.details["refused"] == case.found.kind
    assert told.value.__cause__.__class__ is case.found
    case.then(place.theirs)
    assert not isinstance(place.late.deliver(), PersistError), "it does happen, as the caller was told it may"


def refused_by_upper(
    kind: type[c.Command],
    call: Callable[[Shard], object],
    first: Callable[[Shard], object] = lambda s: s.insert(row(1)),
) -> Refused:
    return Refused(kind, first, call, UpperMismatch, lambda s: (lock(s, 0), s.upper().is_empty or s.insert(row(2))))


NEVER_COMES = {
    "compare-and-append": refused_by_upper(c.CompareAndAppend, lambda s: s.compare_and_append(row(9), 0, 1)),
    "compare-and-append under a condition": refused_by_upper(
        c.CompareAndAppend, lambda s: s.compare_and_append(row(9), 0, 1, token=TOKEN, attributes=under_lock(2))
    ),
    "append of times that inserts took": refused_by_upper(c.Append, lambda s: s.append(row(9), 0, 2)),
    "append with attributes": refused_by_upper(
        c.Append, lambda s: s.append(row(9), 0, 2, attributes=under_lock(2)), lambda s: s.append(row(1), 0, 1)
    ),
    "insert where no time is left": refused_by_upper(
        c.Insert, lambda s: s.insert(row(9)), lambda s: (s.insert(row(1)), s.advance_upper(None))
    ),
}


@pytest.mark.parametrize("door", NEVER_COMES)
def test_what_is_told_as_refused_never_happens(place: Place, door: str) -> None:
    case = NEVER_COMES[door]
    case.first(place.theirs)
    place.late.hold(case.kind)
    with pytest.raises(case.found):
        case.call(place.shard)
    case.then(place.theirs)
    assert isinstance(place.late.deliver(), case.found)
    assert 9 not in place.rows()


def test_a_schema_that_was_told_as_perhaps_evolved_does_not_come_back(place: Place) -> None:
    place.theirs.evolve_schema(WIDER)
    place.late.hold(c.EvolveSchema)
    with pytest.raises(Indeterminate):
        place.shard.evolve_schema(SCHEMA.append(pa.field("w", pa.int64())))
    place.theirs.evolve_schema(WIDEST)
    assert isinstance(place.late.deliver(), SchemaMismatch)
    assert place.theirs.refresh_schema().arrow == WIDEST


def test_an_edit_of_a_new_shard_asks_what_became_of_its_token_again(place: Place) -> None:
    """The question changes nothing whenever it comes, and the call ended as Indeterminate."""
    place.late.hold(c.Rewrite)
    done = place.shard.upsert(row(1), token=TOKEN)
    assert isinstance(place.late.deliver(), c.Appended), "it is answered as the edit was"
    assert (done.lower.element, place.rows()) == (0, [1])


def test_a_pipelined_writer_is_opened_although_another_instance_came_first(place: Place) -> None:
    with place.theirs.pipelined_writer("billing") as earlier:
        earlier.append(row(1))
    place.late.hold(c.UpdateAttributes)
    with place.shard.pipelined_writer("billing") as writer:
        writer.append(row(2))
    place.late.deliver()
    assert place.rows() == [1, 2]


# --- answered, and then it would happen again


def test_a_creation_that_comes_late_does_not_bring_a_dropped_shard_back(place: Place) -> None:
    """The shard was listed again, empty, and nobody had asked for it."""
    place.late.hold(SchemaRecord)
    with pytest.raises(Indeterminate):  # of this transport; over servers it is repeated
        place.client.create_shard("new", SCHEMA, ["k"])
    place.other.create_shard("new", SCHEMA, ["k"]).drop()
    place.late.deliver()
    assert place.other.shards("new") == []


def test_a_creation_over_http_says_which_shard_it_follows(tmp_path: Path) -> None:
    """Without `follows` a PUT means, as before, whatever the name stands for when it arrives."""
    with url_of("server", tmp_path) as url:

        def put(query: str = "") -> dict[str, Any]:
            return sent("PUT", f"{url}/v1/shards/orders{query}")

        first = put("?follows=")
        assert first["upper"] == [0]
        sent("DELETE", f"{url}/v1/shards/orders")
        late = put("?follows=")
        assert (late["shard_id"], late["upper"], late["since"]) == (first["shard_id"], [], [])
        second = put(f"?follows={first['shard_id']}")
        assert second["shard_id"] != first["shard_id"]
        assert put("?follows=") == second
        sent("DELETE", f"{url}/v1/shards/orders")
        assert put(f"?follows={first['shard_id']}")["upper"] == []
        assert sent("GET", f"{url}/v1/shards")["shards"] == []
        assert put()["shard_id"] not in (first["shard_id"], second["shard_id"])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            put("?follows=orders")


def sent(method: str, url: str) -> dict[str, Any]:
    fields = {"fields": [{"name": "k", "type": "int64", "key": True, "nullable": False}]}
    body = json.dumps(fields).encode() if method == "PUT" else None
    with urllib.request.urlopen(urllib.request.Request(url, body, method=method)) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_a_creation_that_no_server_answered_is_not_told_as_not_done(tmp_path: Path) -> None:
    """It was Unavailable: "it did not happen"."""
    with url_of("server", tmp_path) as url, persist.connect(url) as client, Answering(CLOSE) as gone:
        transport: Any = client.transport
        transport._calls = HttpCalls(Servers([gone.url], transport.clock), transport.clock, token=None, timeout_s=1.0)
        with pytest.raises(Indeterminate, match="may have happened"):
            client.create_shard("orders", SCHEMA, ["k"])


def history(shard: Shard) -> None:
    for key in range(3):
        shard.insert(row(key))


def test_a_hold_that_was_given_up_late_is_not_a_later_one_of_the_name(place: Place) -> None:
    """The second hold was taken away, though it never expires, and history that it kept was forgotten."""
    history(place.theirs)
    hold = place.shard.critical_reader("billing")
    place.late.hold(c.ExpireCriticalReader)
    hold.expire()
    place.theirs.critical_reader("billing")
    place.late.deliver()
    assert place.theirs.downgrade_since(2, "others").element == 0


def test_a_hold_that_is_taken_late_does_not_stay_for_ever(place: Place) -> None:
    """It held all history, and nobody knew that it was there."""
    history(place.theirs)
    place.late.hold(c.RegisterCriticalReader)
    place.shard.critical_reader("billing").expire()
    place.late.deliver()
    assert place.theirs.downgrade_since(2, "others").element == 2


USES: list[Callable[[ReadLease], object]] = [ReadLease.check, lambda lease: lease.downgrade(Antichain(0), lease.seqno)]


def test_a_lease_on_a_tag_that_is_taken_late_is_not_the_one_that_lapsed(place: Place) -> None:
    """Its time is kept as before. What its holder read of was deleted between the two."""
    history(place.theirs)
    place.theirs.tag("month", 1)
    place.late.hold(c.RegisterReader)
    found = place.shard.snapshot(tag="month")
    for key in range(3, 6):
        place.clock.advance_ms(ReadSettings().lease_ms)
        place.theirs.insert(row(key))
    assert isinstance(place.late.deliver(), c.ReaderRegistered)
    with pytest.raises(Expired, match="is gone: its lease lapsed"):
        found.to_arrow()
    assert sorted(place.shard.snapshot(tag="month").to_arrow()["k"].to_pylist()) == [0, 1]


@pytest.mark.parametrize("use", USES, ids=["check", "downgrade"])
def test_a_lease_that_is_taken_late_is_another_one(place: Place, use: Callable[[ReadLease], object]) -> None:
    """Its holder took it for the lapsed one: what had been deleted between the two was told as corruption."""
    place.late.hold(c.RegisterReader)
    reader = place.shard.open_reader()
    for key in range(3):  # the lease is forgotten by the commits of another
        place.clock.advance_ms(ReadSettings().lease_ms)
        place.theirs.insert(row(key))
    place.theirs.downgrade_since(2, "others")
    with pytest.raises(Expired):
        reader.check()
    assert isinstance(place.late.deliver(), c.ReaderRegistered)
    with pytest.raises(Expired, match="is gone: its lease lapsed"):
        use(reader)
