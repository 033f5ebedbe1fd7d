"""Tags: single times that stay readable when since has passed them, in Python, over HTTP and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import persist
from compactor.tasks import history_task
from persist import Conflict, Expired, InvalidUsage, NotReadable, PersistError, Shard, Unavailable
from persist.commit.blob_tasks import merged
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.named_holds import TAGS_MAX
from rpc.cli.program import main
from tests.support.clocks import DAY_MS, HOUR_MS, Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64())])


def filled(client: persist.Client) -> Shard:
    """Row 0 has at each time, from 0 to 9, that time as its value; each time has a row of its own besides."""
    shard = client.create_shard(NAME, SCHEMA, ["id"], history="forever")
    for time in range(10):
        old = [{"id": 0, "v": time - 1, "__diff": -1}] if time else []
        shard.insert([*old, {"id": 0, "v": time}, {"id": 100 + time, "v": 1}])
    return shard


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return filled(machine.client)


def passed(shard: Shard, location: Location, before: int = 8) -> None:
    """Since goes on, and what it has passed is merged."""
    shard.forget(before)
    committer = location.machine(NAME)
    state = committer.refresh()
    merge: Any = merged(state, state.trace.batches, location.blob, location.ids)
    assert committer.apply(merge) == c.MergeApplied(True)


def shown(snapshot: persist.Snapshot) -> tuple[int, int]:
    """The value of row 0, and how many rows there are."""
    rows = snapshot.to_arrow().to_pylist()
    return next(row["v"] for row in rows if row["id"] == 0), len(rows)


def test_a_tagged_time_reads_as_it_did_when_since_has_passed_it(shard: Shard, machine: Machine) -> None:
    assert shard.tag("eom", at=4) == persist.ShardTag("eom", 4, None)
    passed(shard, machine.location)
    assert shown(shard.snapshot(tag="eom")) == (4, 6)
    assert shown(shard.snapshot(4)) == (4, 6), "a time that is tagged can be given as a time, too"
    assert shown(shard.snapshot(8)) == (8, 10)
    for time in (3, 5, 7):
        with pytest.raises(NotReadable, match=r"readable from \[8\] on"):
            shard.snapshot(time)
    assert list(shard.tags()) == ["eom"]
    assert shard.untag("eom")
    assert not shard.untag("eom")
    with pytest.raises(NotReadable):
        shard.snapshot(4)


def test_a_wall_clock_can_be_tagged(world: World, machine: Machine, shard: Shard) -> None:
    then = datetime.fromtimestamp(machine.clock.now_ms() / 1000 + 1, UTC)
    world.pass_ms(HOUR_MS)
    shard.insert([{"id": 1, "v": 1}])
    assert shard.tag("then", at=then).time == 9


def test_a_snapshot_of_a_tag_holds_no_since_and_reads_on_without_the_tag(shard: Shard, machine: Machine) -> None:
    shard.tag("eom", at=4)
    held = shard.snapshot(tag="eom")
    shard.untag("eom")
    passed(shard, machine.location)
    assert shard.since().element == 8
    assert shard.tag("again", at=4).time == 4, "its time is kept as long as somebody reads it"
    shard.untag("again")
    assert shown(held) == (4, 6)
    with pytest.raises(NotReadable):
        shard.tag("again", at=4)


def test_a_snapshot_of_a_tag_whose_lease_has_lapsed_is_refused(shard: Shard, machine: Machine, world: World) -> None:
    shard.tag("eom", at=4)
    held = shard.snapshot(tag="eom")
    location = machine.location.machine(NAME)
    [reader] = location.state().leased_readers
    location.apply(c.ExpireReader(reader))
    world.pass_ms(DAY_MS)  # so it is renewed before anything is read
    with pytest.raises(Expired):
        held.to_arrow()


def test_changes_and_a_restore_begin_at_a_tag_that_since_has_passed(shard: Shard, machine: Machine) -> None:
    shard.tag("eom", at=4)
    shard.tag("later", at=6)
    passed(shard, machine.location)
    changes = shard.changes(4, 9).to_arrow().to_pylist()
    assert {(row["id"], row["v"], row["__diff"]) for row in changes} == {
        (0, 4, -1),
        (0, 9, 1),
        *((100 + time, 1, 1) for time in range(5, 10)),
    }
    for end in (5, 6):
        with pytest.raises(NotReadable, match=r"readable from \[8\] on"):
            shard.changes(4, end)
    assert shard.restore(4).changed
    assert shown(shard.snapshot()) == (4, 6)


def test_a_tag_is_kept_as_long_as_asked_and_by_no_wrong_clock(world: World, machine: Machine, shard: Shard) -> None:
    task = history_task(machine.location, machine.location.machine)
    tag = shard.tag("eom", at=4, keep="3d")
    assert tag.until == datetime.fromtimestamp((machine.clock.now_ms() + 3 * DAY_MS) / 1000, UTC)
    shard.tag("ever", at=5)
    assert task(NAME) == 3 * 24 * 3600
    passed(shard, machine.location)
    world.pass_ms(2 * DAY_MS)
    assert task(NAME) == 24 * 3600
    ahead = world.machine(off_ms=400 * DAY_MS)
    with pytest.raises(Unavailable, match="do not agree"):
        history_task(ahead.location, ahead.location.machine)(NAME)
    assert list(shard.tags()) == ["eom", "ever"]
    assert shard.tag("eom", at=4, keep=timedelta(days=2)).until == datetime.fromtimestamp(
        (machine.clock.now_ms() + 2 * DAY_MS) / 1000, UTC
    )
    world.pass_ms(2 * DAY_MS)
    assert task(NAME) is None
    assert list(shard.tags()) == ["ever"]
    with pytest.raises(NotReadable, match="has no tag 'eom'"):
        shard.snapshot(tag="eom")


def test_tags_of_a_shard_are_bounded(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TAGS_MAX == 1_000
    monkeypatch.setattr("persist.core.transitions.history_control.TAGS_MAX", 20)
    for number in range(20):
        shard.tag(f"t{number}", at=number % 10)
    with pytest.raises(InvalidUsage, match="which is the maximum"):
        shard.tag("one-more")
    shard.untag("t7")
    shard.tag("one-more")


# --- what is refused, as the page says

BAD: list[tuple[type[PersistError], Callable[[Shard], object]]] = [
    (InvalidUsage, lambda shard: shard.tag("eom 10")),
    (InvalidUsage, lambda shard: shard.tag("..")),
    (InvalidUsage, lambda shard: shard.tag("x", at=10)),
    (NotReadable, lambda shard: shard.tag("x", at=7)),
    (InvalidUsage, lambda shard: shard.tag("x", at="noon")),  # type: ignore[arg-type]
    (Conflict, lambda shard: shard.tag("eom", at=9)),
    (NotReadable, lambda shard: shard.snapshot(tag="nobody")),
    (InvalidUsage, lambda shard: shard.snapshot(9, tag="eom")),
    (NotReadable, lambda shard: shard.snapshot(7)),
    (NotReadable, lambda shard: shard.listen(4)),
    (InvalidUsage, lambda shard: shard.untag("eom 10")),
]


@pytest.mark.parametrize(("kind", "ask"), BAD)
def test_bad_input(kind: type[PersistError], ask: Callable[[Shard], object], shard: Shard, machine: Machine) -> None:
    shard.tag("eom", at=4)
    passed(shard, machine.location)
    before = machine.location.machine(NAME).state()
    with pytest.raises(kind) as raised:
        ask(shard)
    assert type(raised.value) is kind
    after = machine.location.machine(NAME).refresh()
    assert (after.tags, after.since, after.trace) == (before.tags, before.since, before.trace)


def test_a_keep_that_is_refused_is_named_keep(shard: Shard) -> None:
    keeps: list[Any] = ["long", "none", "0d", timedelta(0), timedelta(microseconds=1), 7]
    for keep in keeps:
        with pytest.raises(InvalidUsage, match=r"^keep is "):
            shard.tag("x", keep=keep)
    assert not shard.tags()


# --- HTTP


def test_tags_over_http(http: TestClient, shard: Shard, machine: Machine) -> None:
    path = f"/v1/shards/{NAME}/tags"
    assert http.put(f"{path}/eom", params={"at": 4}).json() == {"tag": "eom", "time": 4, "until": None}
    kept = http.put(f"{path}/now", params={"keep": "30d"}).json()
    assert (kept["time"], kept["until"][-1]) == (9, "Z")
    passed(shard, machine.location)
    assert [tag["tag"] for tag in http.get(path).json()["tags"]] == ["eom", "now"]
    assert http.get(f"{path}/eom").json()["time"] == 4
    rows = http.get(f"/v1/shards/{NAME}/snapshot", params={"tag": "eom", "format": "ndjson"})
    assert rows.headers["persist-as-of"] == "4"
    assert len(rows.text.splitlines()) == 6
    assert http.get(f"/v1/shards/{NAME}/snapshot", params={"as_of": 4, "format": "csv"}).status_code == 200
    refused = http.get(f"/v1/shards/{NAME}/listen", params={"after": 4})
    assert (refused.status_code, refused.json()["kind"]) == (410, "not_readable")
    assert "only that single time is kept" in refused.json()["detail"]
    assert http.delete(f"{path}/eom").json() == {"tag": "eom", "removed": True}
    assert http.delete(f"{path}/eom").json() == {"tag": "eom", "removed": False}
    assert http.get(f"{path}/eom").status_code == 410


def test_bad_requests(http: TestClient, shard: Shard) -> None:
    shard.tag("eom", at=4)
    for method, query, status in (
        ("PUT", "/tags/eom?at=5", 409), ("PUT", "/tags/new?at=4&timestamp=2026-01-01T00:00:00Z", 400),
        ("PUT", "/tags/new?until=5", 400), ("PUT", "/tags/a%20b", 400), ("GET", "/tags/nobody", 410),
        ("GET", "/snapshot?tag=nobody", 410), ("GET", "/snapshot?tag=eom&as_of=4", 400),
        ("GET", "/listen?tag=eom", 400),
    ):  # fmt: skip
        assert http.request(method, f"/v1/shards/{NAME}{query}").status_code == status, query
    assert list(shard.tags()) == ["eom"]


# --- the command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        filled(client)

    def told(do: str, *arguments: str) -> list[dict[str, Any]]:
        assert main(["tag", do, NAME, *arguments, "--dir", str(tmp_path / "data")]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert told("list") == []
    assert told("set", "eom", "--at", "4") == [{"shard": NAME, "tag": "eom", "time": 4, "until": None}]
    assert [tag["time"] for tag in told("set", "now", "--keep", "400d")] == [4, 9]
    assert [tag["tag"] for tag in told("remove", "eom")] == ["now"]
    for bad, sentence in [
        (["remove", NAME, "eom"], "has no tag 'eom'"),
        (["set", NAME, "x", "--at", "noon"], "--at is 'noon'"),
    ]:
        assert main(["tag", *bad, "--dir", str(tmp_path / "data")]) == 1
        assert sentence in capsys.readouterr().err
