"""Wall clocks and history, as users see them: in Python and over HTTP, over stores whose clocks the tests move."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import quote

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist import Antichain, Conflict, InvalidUsage, LocationSettings, NotReadable, Shard, Unavailable
from persist.client import timestamps
from persist.client.timestamps import load_clock_stretches, to_datetime
from persist.commit.location import Location
from persist.core.frontier import TIME_MAX
from persist.core.state import Policy
from persist.parts import ShardSchema
from persist.parts.python_values import parse_key
from tests.support.clocks import START_MS, Ids, Machine, World
from tests.support.embedded import client_of
from tests.support.location import InlineBackground

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def world() -> World:
    return World(policy=Policy(overlay_flush_at=8, rollup_every=4))


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


def at(world: World, ago_ms: int = 0) -> datetime:
    return to_datetime(world.true_ms - ago_ms)


def insert(world: World, shard: Shard, number: int, passes_ms: int = 1_000) -> None:
    shard.insert([{"id": number}])
    world.pass_ms(passes_ms)


def ids(shard: Shard, as_of: datetime) -> list[int]:
    return sorted(shard.snapshot(as_of, wait_s=0).to_arrow()["id"].to_pylist())


# --- which time a wall clock names


def test_a_wall_clock_shows_what_was_there_by_then_for_ever_and_from_everywhere(world: World, shard: Shard) -> None:
    for number in range(30):
        insert(world, shard, number)
    instants = {ago: at(world, ago * 1_000) for ago in range(0, 30, 3)}
    shown = {ago: ids(shard, instant) for ago, instant in instants.items()}
    assert shown == {ago: list(range(30 - ago)) for ago in instants}
    world.pass_ms(60_000)
    insert(world, shard, 99)
    other = world.machine().shard(NAME)
    assert {ago: ids(other, instant) for ago, instant in instants.items()} == shown
    state = world.machine().location.machine(NAME).refresh()
    assert state.attribute_root.count > 20, "most marks lie in the index by now"


def test_a_snapshot_tells_the_wall_clock_that_it_was_resolved_to(world: World, shard: Shard) -> None:
    insert(world, shard, 1, passes_ms=2_345)
    with shard.snapshot(at(world)) as found:
        assert found.as_of == 0
        assert found.timestamp == to_datetime((START_MS + 2_345) // 1_000 * 1_000)
    assert shard.snapshot().timestamp is None


def test_a_listener_goes_on_after_what_was_there_by_a_wall_clock(world: World, shard: Shard) -> None:
    insert(world, shard, 1)
    then = at(world)
    insert(world, shard, 2)
    with shard.listen(then) as listen:
        [event] = listen.next_events(0)
    assert event.updates["id"].to_pylist() == [2]


def test_a_zone_is_needed_and_any_zone_will_do(world: World, shard: Shard) -> None:
    insert(world, shard, 1)
    here = timezone(timedelta(hours=5, minutes=30))
    assert ids(shard, at(world).astimezone(here)) == [1]
    with pytest.raises(InvalidUsage, match="without a zone"):
        shard.snapshot(datetime.fromisoformat("2026-11-20T12:00"))
    with pytest.raises(InvalidUsage, match="from 1970 to 9999"):
        shard.time_at(datetime(1969, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-01:00", "0001-01-01T00:00:00+01:00"])
def test_an_instant_that_has_no_date_in_utc_is_refused_by_every_door(shard: Shard, http: TestClient, text: str) -> None:
    when = datetime.fromisoformat(text)
    for ask in (shard.time_at, shard.snapshot, shard.listen, shard.changes, shard.restore):
        with pytest.raises(InvalidUsage, match="from 1970 to 9999"):
            ask(when)
    for path in ("time-at?timestamp=", "snapshot?format=csv&timestamp=", "changes?start="):
        answer = http.get(f"/v1/shards/{NAME}/{path}{quote(text)}")
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")


def test_an_instant_that_is_to_come_is_waited_for(world: World, shard: Shard) -> None:
    insert(world, shard, 1)
    to_come = at(world, -5_000)
    with pytest.raises(Unavailable, match="is not over yet"):
        shard.time_at(to_come, wait_s=2)
    assert shard.time_at(to_come, wait_s=10) == Antichain(1)


def test_before_anything_was_written_nothing_can_be_read(world: World, shard: Shard) -> None:
    early = datetime(2000, 1, 1, tzinfo=UTC)
    insert(world, shard, 1)
    assert shard.time_at(early) == Antichain(0)
    with pytest.raises(NotReadable, match="nothing was written"):
        shard.snapshot(early)
    with shard.listen(early) as listen:
        assert [event.updates["id"].to_pylist() for event in listen.next_events(0)] == [[1]]


# --- the wall clocks of many times


def dated(shard: Shard, first: int, last: int) -> list[datetime | None]:
    """The wall clocks of these times, as a column gets them."""
    times = pa.chunked_array([range(first, last + 1)], pa.int64())
    return load_clock_stretches(shard._transport, NAME, first, last, 10.0).of(times).to_pylist()


def test_what_was_forgotten_is_refused_and_a_closed_shard_is_dated_to_its_end(world: World, shard: Shard) -> None:
    for _ in range(5):
        insert(world, shard, 1)
    shard.forget(3)
    with pytest.raises(NotReadable, match="when 2 was written is forgotten"):
        dated(shard, 2, 4)
    known = dated(shard, 3, 4)
    shard.advance_upper(None)
    times = pa.chunked_array([[3, 4, TIME_MAX]], pa.int64())
    assert load_clock_stretches(shard._transport, NAME, 3, TIME_MAX, 10.0).of(times).to_pylist()[:2] == known


def test_too_many_wall_clocks_at_once_are_refused(world: World, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        insert(world, shard, 1)
    monkeypatch.setattr(timestamps, "STRETCHES_MAX", 4)
    with pytest.raises(InvalidUsage, match="have more than 4 wall clocks; ask for fewer"):
        dated(shard, 0, 4)
    assert len(dated(shard, 3, 4)) == 2


# --- history


def test_new_shards_keep_what_their_location_says(world: World) -> None:
    def created(history: str | None, name: str) -> int | None:
        clock = world.machine().clock
        location = Location(
            world.blob, world.consensus, settings=LocationSettings(history=history), clock=clock, ids=Ids(clock, 9),
            background=InlineBackground(),
        )  # fmt: skip
        found = client_of(location).create_shard(name, SCHEMA, ["id"]).settings
        return found.history_ms if found.version else -1

    assert created(None, "without") == -1
    assert created("7d", "seven") == 7 * 24 * 3_600_000
    assert created("7d,tmp/=none,eu/=forever", "tmp/a") == 0
    assert created("7d,tmp/=none,eu/=forever", "eu/a") is None


def test_settings_are_changed_one_after_another(shard: Shard) -> None:
    assert shard.settings.version == 1
    assert shard.configure(history=timedelta(days=2)).history_ms == 2 * 24 * 3_600_000
    assert shard.configure(mark_every=timedelta(minutes=1)).history_ms == 2 * 24 * 3_600_000
    with pytest.raises(Conflict, match="version 3, not the expected 1"):
        shard.configure(history="none", expected_version=1)
    with pytest.raises(InvalidUsage, match="it must be an age such as '7d'"):
        shard.configure(history="a week")
    assert shard.configure(mark_every="90s").mark_every_ms == 90_000
    for wrong in ("forever", "none", "soon", timedelta(0), 5):
        with pytest.raises(InvalidUsage, match=r"mark_every is .*; it must be an age such as '10s'"):
            shard.configure(mark_every=wrong)  # type: ignore[arg-type]


def test_a_client_of_a_server_does_not_say_what_new_shards_keep() -> None:
    with pytest.raises(InvalidUsage, match="a server decides how much history new shards keep"):
        persist.connect("http://localhost:1", history="30d")


def test_settings_that_are_refused_change_nothing(shard: Shard) -> None:
    before = shard.settings
    for wrong in (
        *({"expected_version": version} for version in ("3", 1.0, True, -1, 2**63)),
        *({"history": timedelta(microseconds=us)} for us in (5, -5)),
    ):
        with pytest.raises(InvalidUsage):
            shard.configure(**{"history": "9d", **wrong})  # type: ignore[arg-type]
    assert shard.settings == before


def test_numbers_of_too_many_digits_are_refused_as_others_are(machine: Machine, shard: Shard) -> None:
    huge, client = 10**5_000, machine.client
    asked: list[Callable[[], object]] = [
        lambda: shard.snapshot(huge),
        lambda: shard.snapshot(wait_s=huge),
        lambda: shard.time_at(huge),  # type: ignore[arg-type]
        lambda: shard.configure(history=huge),  # type: ignore[arg-type]
        lambda: shard.insert([{"id": 1}], info=huge),  # type: ignore[arg-type]
        lambda: shard.insert([{"id": 1, huge: 2}]),
        lambda: shard.truncate(1, mode=huge),  # type: ignore[call-overload]
        lambda: shard.erase(keys=[(huge,)]),
        lambda: client.shard(huge),  # type: ignore[arg-type]
        lambda: parse_key(ShardSchema(pa.schema([("x", pa.float64())]), ("x",)), [huge]),
    ]
    for ask in asked:
        with pytest.raises(InvalidUsage, match="a number of too many digits"):
            ask()


def test_who_manages_the_shard_forgets_by_hand(world: World, shard: Shard) -> None:
    for number in range(5):
        insert(world, shard, number)
    then = at(world, 3_000)
    assert ids(shard, then) == [0, 1]
    assert shard.forget(3) == Antichain(3)
    with pytest.raises(NotReadable, match="history was forgotten"):
        shard.snapshot(then)
    with pytest.raises(InvalidUsage, match="beyond the latest complete time"):
        shard.forget(5)


# --- over HTTP


def test_over_http_a_wall_clock_takes_the_place_of_a_time(world: World, shard: Shard, http: TestClient) -> None:
    insert(world, shard, 1, passes_ms=2_500)
    when = at(world).isoformat()
    insert(world, shard, 2)
    told = http.get(f"/v1/shards/{NAME}/time-at", params={"timestamp": when}).json()
    assert told == {"frontier": [1], "as_of": 0, "timestamp": "2025-10-09T08:53:22.000Z"}
    asked = {"timestamp": when, "format": "ndjson"}
    read = http.get(f"/v1/shards/{NAME}/snapshot", params=asked)
    assert read.text == '{"id":1,"__diff":1}\n'
    assert read.headers["persist-as-of"] == "0"
    assert read.headers["persist-timestamp"] == told["timestamp"]
    shown = http.get(f"/v1/shards/{NAME}/timestamp-of", params={"time": 0}).json()
    assert shown == {"time": 0, "timestamp": "2025-10-09T08:53:21.000Z"}
    refused = http.get(f"/v1/shards/{NAME}/snapshot", params={**asked, "as_of": 0})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage")
    refused = http.get(f"/v1/shards/{NAME}/time-at", params={"timestamp": "2026-11-20 12:00"})
    assert "with its zone" in refused.json()["detail"]


def test_over_http_settings_are_compared_and_set(shard: Shard, http: TestClient) -> None:
    path = f"/v1/shards/{NAME}/settings"
    found = http.get(path)
    assert (found.json(), found.headers["etag"]) == ({"history": "1w", "mark_every": "1s", "version": 1}, '"1"')
    changed = http.put(path, json={"history": "none"}, headers={"If-Match": '"1"'})
    assert changed.json() == {"history": "none", "mark_every": "1s", "version": 2}
    assert http.put(path, json={"history": "7d"}, headers={"If-Match": '"1"'}).status_code == 409
    changed = http.put(path, json={"mark_every": "10s"}, headers={"If-Match": '"2"'})
    assert changed.json() == {"history": "none", "mark_every": "10s", "version": 3}, "what is omitted is unchanged"
    for body, headers in [
        ({"history": "7d"}, {}),
        ({"keep": "7d"}, {"If-Match": '"3"'}),
        ({"mark_every": 1000}, {"If-Match": '"3"'}),
        ({"mark_every": "none"}, {"If-Match": '"3"'}),
        ([], {"If-Match": "3"}),
    ]:
        assert http.put(path, json=body, headers=headers).status_code == 400
    assert http.put("/v1/shards/b", json={"fields": [{"name": "i", "type": "int8", "key": True}], "history": "2d"})
    assert http.get("/v1/shards/b/settings").json()["history"] == "2d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{NAME}/settings", b'{"history": "1d", "history": "none"}'),
        ("new", b'{"fields": [{"name": "i", "type": "int8", "key": true}], "history": "1d", "history": "none"}'),
    ],
)
def test_over_http_a_body_with_a_name_twice_is_refused(shard: Shard, http: TestClient, path: str, body: bytes) -> None:
    answer = http.put(f"/v1/shards/{path}", content=body, headers={"If-Match": '"1"'})
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
    assert "two values for one name" in answer.json()["detail"]
    assert http.get("/v1/shards/new").status_code == 404
    assert shard.settings.version == 1
