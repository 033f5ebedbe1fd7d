"""Who may move frontiers (`manage`) drops no shard, and takes from others no more history than it has itself read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist
from persist.core import commands as c
from persist.core.errors import NotReadable
from persist.core.frontier import EMPTY, Antichain
from rpc import stream_leases
from tests.integration.test_read_scope import CRITICAL, EVENTS, FAR, NAME, OTHER, READER, TOKEN, UPPER, WRITER, Place
from tests.support.waiting import wait_until

OTHER_COLUMNS = {"fields": [{"name": "z", "type": "int64", "key": True}]}
BEYOND = 1_700_000_000_000  # the time of day in milliseconds, where times are numbers of inserts
ROWS = b'{"id": 1}\n'
NDJSON = {"content-type": "application/x-ndjson"}

CLOSE_WRITES: list[str | c.Command] = [
    "advance-upper?upper=[]",
    f"append?lower={UPPER}&upper=[]",
    f"compare-and-append?expected_upper={UPPER}&new_upper=[]",
    c.AdvanceUpper(EMPTY),
    c.CompareAndAppend(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
    c.Append(WRITER, TOKEN, Antichain(UPPER), EMPTY, ()),
]
CLOSE_READS: list[str | c.Command] = [
    "downgrade-since?since=[]",
    "downgrade-since?since=[]&force=true",
    c.CompareAndDowngradeSince(CRITICAL, "", "", EMPTY),
    c.CompareAndDowngradeSince(CRITICAL, "", "", EMPTY, force=True),
    c.DowngradeSince(READER, EMPTY, FAR),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as found:
        yield found


def knock(place: Place, door: str | c.Command) -> int:
    if isinstance(door, c.Command):
        return int(place.send("manage", door).status_code)
    content = b"" if door.startswith(("advance", "downgrade")) else ROWS
    return int(place.call("manage", "POST", f"/v1/shards/{NAME}/{door}", content=content, headers=NDJSON).status_code)


def register(place: Place) -> None:
    place.sent("manage", c.RegisterWriter(WRITER, 60_000))
    place.sent("manage", c.RegisterReader(READER, None, 60_000))
    place.sent("manage", c.RegisterCriticalReader(CRITICAL, "", "cursor"))


@pytest.mark.parametrize(("first", "second"), [(CLOSE_WRITES, CLOSE_READS), (CLOSE_READS, CLOSE_WRITES)])
def test_no_door_of_the_scope_manage_drops_a_shard(
    place: Place, first: list[str | c.Command], second: list[str | c.Command]
) -> None:
    """Both frontiers were closed one after the other. Then the name could be used anew, with other columns."""
    register(place)
    shard_id = place.state.shard_id
    told = {knock(place, door) for door in first}
    assert 200 in told
    for door in second:
        assert knock(place, door) == (200 if isinstance(door, c.DowngradeSince) else 400), door
    place.sent("manage", c.ExpireReader(READER))
    assert not place.state.is_closed
    assert place.call("manage", "PUT", f"/v1/shards/{NAME}", json=OTHER_COLUMNS).status_code == 422
    assert place.state.shard_id == shard_id
    assert place.call("manage", "DELETE", f"/v1/shards/{NAME}").status_code == 403


def test_a_listener_that_reaches_the_end_of_a_closed_shard_does_not_drop_it(place: Place) -> None:
    knock(place, "advance-upper?upper=[]")
    answer = place.call("manage", "GET", f"/v1/shards/{NAME}/listen", headers=EVENTS)
    assert "id: closed" in answer.text
    assert not place.state.is_closed
    assert place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?format=ndjson").status_code == 200


@pytest.mark.parametrize("scope", ["read", "write", "manage"])
def test_no_leased_reader_closes_a_shard_to_reads(place: Place, scope: str) -> None:
    """One command of the scope `write` did, where nobody else held anything: for everybody, for ever."""
    place.sent(scope, c.RegisterReader(READER, None, 60_000))
    place.sent(scope, c.RegisterReader(OTHER, EMPTY, 60_000))
    for reader in (READER, OTHER, READER):
        for command in (c.MoveHold, c.DowngradeSince):
            told = place.sent(scope, command(reader, EMPTY, FAR))
            assert told == c.SinceDowngraded(EMPTY, Antichain(0))
    assert place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?format=ndjson").status_code == 200


def test_a_hold_beyond_the_upper_takes_no_history_from_others(place: Place) -> None:
    """A listener with times of a wrong unit took since with it, without force: all history was unreadable for good."""
    place.sent("manage", c.RegisterReader(READER, Antichain(BEYOND), 60_000))
    place.sent("manage", c.RegisterReader(OTHER, Antichain(BEYOND), 60_000))
    assert place.sent("manage", c.DowngradeSince(READER, Antichain(BEYOND), FAR)) == c.SinceDowngraded(
        Antichain(BEYOND), Antichain(UPPER - 1)
    )
    for _ in range(40):
        knock(place, "insert")
    place.sent("manage", c.DowngradeSince(READER, Antichain(BEYOND), FAR))
    state = place.state
    assert (state.since, state.upper) == (Antichain(UPPER + 39), Antichain(UPPER + 40))
    assert place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?format=ndjson").status_code == 200


def test_the_renewed_lease_of_a_listener_takes_no_history_from_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_leases, "LEASE_MS", 600)
    path = f"/v1/shards/{NAME}/listen?after={BEYOND}&until={BEYOND + 5}"
    listening = threading.Thread(target=lambda: place.call("manage", "GET", path, headers=EVENTS))
    listening.start()

    def moved() -> bool:
        knock(place, "insert")
        return place.state.since > Antichain(0)

    wait_until(moved, "the listener's lease was renewed")
    assert place.state.since < place.state.upper
    knock(place, f"advance-upper?upper={BEYOND + 5}")
    listening.join()


def test_a_snapshot_beyond_a_forced_since_says_so_at_once(place: Place) -> None:
    """It waited for a minute, then it said: wait longer."""
    knock(place, f"downgrade-since?since={BEYOND}&force=true")
    shard = persist.Client(place.app.state.service.transport).shard(NAME)
    with pytest.raises(NotReadable, match=f"since .{BEYOND}., beyond its upper .10.: nothing can be read until"):
        shard.snapshot(wait_s=600)
    answer = place.call("read", "GET", f"/v1/shards/{NAME}/snapshot?wait=600")
    assert (answer.status_code, answer.json()["kind"]) == (410, "not_readable")
