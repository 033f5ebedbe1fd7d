"""Policies of rows: what goes, what never goes, what holds them back; over stores whose clocks the tests move."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from compactor.metering import MaintenanceMetrics
from compactor.tasks import retention_task
from compactor.worker import Worker
from persist import Antichain, Conflict, InvalidUsage, NotReadable, PersistError, Shard, Unavailable
from persist.client.embedded import EmbeddedTransport
from persist.client.timestamps import to_datetime
from persist.maintenance.expiry import forget_outlived
from rpc.cli.program import main
from tests.support.clocks import DAY_MS, HOUR_MS, START_MS, Machine, World
from tests.support.rewrites import before_rewrites

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def world() -> World:
    found = World()
    found.true_ms = START_MS // DAY_MS * DAY_MS
    return found


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="1d")


def ids(shard: Shard) -> list[int]:
    found: list[int] = shard.snapshot().to_arrow()["id"].to_pylist()
    return found


def keeper(machine: Machine, metrics: MaintenanceMetrics | None = None) -> Any:
    task = retention_task(machine.location, EmbeddedTransport(machine.location), metrics)

    def keep(name: str) -> float | None:
        machine.location.machine(name).refresh()  # as merging does before it
        return task(name)

    return keep


def days(world: World, machine: Machine, shard: Shard, first: int, last: int) -> None:
    """A row at noon of each day, and maintenance after midnight."""
    task = keeper(machine)
    for day in range(first, last):
        world.pass_ms(12 * HOUR_MS)
        shard.insert([{"id": day}])
        world.pass_ms(12 * HOUR_MS + 60_000)
        task(NAME)
        forget_outlived(machine.location.machine(NAME), machine.clock)
        Worker(machine.location).run(NAME, idle=True)
        world.pass_ms(-60_000)


@pytest.mark.parametrize("keep_policies", [False, True])
@pytest.mark.parametrize("keeper", ["a snapshot", "a cut"])
def test_a_time_that_a_clone_would_not_keep_is_refused_and_makes_no_clone(
    world: World, machine: Machine, shard: Shard, keeper: str, keep_policies: bool
) -> None:
    """Readers are not cloned, and cuts only with the row policy. A tag keeps such a time in both."""
    if keeper == "a cut":
        shard.retain({"age": "30d", "cut_every": "1d"})
    days(world, machine, shard, 0, 2)
    shard.tag("second", 1)
    days(world, machine, shard, 2, 4)
    with closing(shard.snapshot(tag="second")) if keeper == "a snapshot" else nullcontext():
        shard.untag("second")
        shard.forget(3)
        assert (shard.since(), shard.count(as_of=1)) == (Antichain(3), 2)
        if keeper == "a snapshot" or not keep_policies:
            with pytest.raises(NotReadable, match="tag it"):
                machine.client.clone(NAME, "copy", as_of=1, keep_policies=keep_policies)
            assert machine.client.shards() == [NAME]
            shard.tag("second", 1)
        assert ids(machine.client.clone(NAME, "copy", as_of=1, keep_policies=keep_policies)) == [0, 1]


# --- by age


def test_rows_live_between_the_age_and_one_period_more(world: World, machine: Machine, shard: Shard) -> None:
    """Also where history is shorter than the age: the time before each cut stays readable."""
    shard.retain({"age": "3d", "cut_every": "1d"})
    days(world, machine, shard, 0, 8)
    assert shard.since() > Antichain(3)
    assert ids(shard) == [5, 6, 7], "what came at noon five days ago was cut at midnight after it"
    assert shard.retention().cuts <= 4


def test_a_worker_that_was_away_catches_up_with_one_truncation(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain({"age": "3d", "cut_every": "1d"})
    days(world, machine, shard, 0, 3)
    world.pass_ms(30 * DAY_MS)
    before, metrics = shard.upper().element, MaintenanceMetrics()
    keeper(machine, metrics)(NAME)
    assert (ids(shard), shard.upper()) == ([], Antichain((before or 0) + 1))
    assert (metrics.counters.retention_runs, metrics.counters.retention_rows) == (1, 3)


def test_a_shard_at_rest_costs_nothing(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain({"age": "3d", "cut_every": "1d"})
    days(world, machine, shard, 0, 2)
    task, committer = keeper(machine), machine.location.machine(NAME)
    waits: list[float | None] = []
    seqnos = []
    for _ in range(60):
        waits.append(task(NAME))
        seqnos.append(committer.state().seqno)
        if waits[-1] is None:
            break
        world.pass_ms(int(waits[-1] * 1000))
    assert waits[-1] is None, "it is not looked at again before it moves"
    assert ids(shard) == []
    assert len(set(seqnos)) < 12


def test_how_fine_the_cuts_are_follows_from_both_ages(shard: Shard) -> None:
    shard.retain({"age": "1h", "consumers": ["billing"], "consumers_max_age": "1d"})
    assert shard.retention().policy == {
        "age": "1h", "consumers": ["billing"], "consumers_max_age": "1d", "cut_every": "96s",
    }  # fmt: skip


# --- by rows and bytes


def test_about_so_many_bytes_stay(world: World, machine: Machine, shard: Shard) -> None:
    task, sizes = keeper(machine), []
    for hour in range(10):
        shard.insert([{"id": 100 * hour + number} for number in range(100)])
        if not hour:
            shard.retain({"bytes": 3 * shard.retention().bytes, "cut_every": "1h"})
        world.pass_ms(HOUR_MS)
        task(NAME)
        sizes.append(len(ids(shard)))
    assert 300 <= sizes[-1] <= 500
    assert shard.run_retention().truncated is None, "the same bytes are not taken away twice"


# --- consumers


def test_it_never_passes_a_consumer_and_says_so(world: World, machine: Machine, shard: Shard) -> None:
    reader = shard.critical_reader("billing")
    shard.retain({"age": "3d", "cut_every": "1d", "consumers": ["billing"]})
    days(world, machine, shard, 0, 8)
    assert ids(shard) == list(range(8))
    [told] = shard.retention().held_by
    assert "consumer 'billing' is at [0]" in told
    reader.downgrade_since(2)
    keeper(machine)(NAME)
    assert ids(shard) == list(range(2, 8))
    reader.downgrade_since(7)
    days(world, machine, shard, 8, 12)
    assert min(ids(shard)) == 7, "what it has read by now goes, and no more"
    reader.downgrade_since(12)
    keeper(machine)(NAME)
    assert shard.retention().held_by == ()


def test_a_consumer_that_was_never_registered_holds_everything(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain({"age": "1d", "cut_every": "1d", "consumers": ["billing"]})
    days(world, machine, shard, 0, 4)
    assert ids(shard) == [0, 1, 2, 3]
    assert "has no critical reader yet" in shard.retention().held_by[0]


def test_a_consumer_behind_for_too_long_is_passed_and_counted(world: World, machine: Machine, shard: Shard) -> None:
    shard.critical_reader("billing")
    shard.retain({"age": "2d", "cut_every": "1d", "consumers": ["billing"], "consumers_max_age": "4d"})
    days(world, machine, shard, 0, 8)
    assert ids(shard) == [4, 5, 6, 7], "what is younger than four days waits for the consumer"
    days(world, machine, shard, 8, 12)
    assert ids(shard) == [8, 9, 10, 11]
    assert shard.retention().overran > 1


# --- who owns the times, and who writes meanwhile


def test_where_nothing_can_be_read_the_policy_waits_for_a_write(world: World, machine: Machine) -> None:
    """A consumer that has read all of a shard without history has brought since to the upper."""
    shard = machine.client.create_shard("plain", SCHEMA, ["id"], history="none")
    shard.retain({"age": "1d", "cut_every": "1d", "consumers": ["billing"]})
    reader, task = shard.critical_reader("billing"), keeper(machine)
    shard.insert([{"id": 1}])
    world.pass_ms(DAY_MS)
    task("plain")
    reader.downgrade_since(1)
    world.pass_ms(2 * DAY_MS)
    task("plain")
    assert "nothing can be read before the next write" in shard.retention().held_by[0]
    shard.insert([{"id": 2}])
    task("plain")
    assert ids(shard) == [2]


def test_a_closed_shard_is_left_alone(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain({"age": "1d", "cut_every": "1d"})
    days(world, machine, shard, 0, 1)
    shard.advance_upper(None)
    world.pass_ms(5 * DAY_MS)
    assert keeper(machine)(NAME) is None
    assert shard.run_retention().held_by == ("the shard is closed",)
    assert ids(shard) == [0]


# --- what is refused

REFUSED: list[dict[str, Any]] = [
    {},
    *({"age": age} for age in ("", "long", "365000d", "none", "forever", 7)),
    *({"bytes": size} for size in ("many", 0, True, 1.5)),
    *({"rows": rows} for rows in (0, "7", True)),
    {"cut_every": "1d"},
    *({"age": "90d", "cut_every": every} for every in ("1s", "1ms")),
    *({"age": "1d", "consumers": some} for some in ("billing", [""], ["a", "a"], [7], [f"c{n}" for n in range(101)])),
    {"age": "1d", "consumers_max_age": "2d"},
    {"age": "1d", "column": "ts"},
    *({"tags": {"hourly": count}} for count in (0, 201, -1, True)),
    *({"tags": tags} for tags in ({}, {"weekly": 1}, ["hourly"])),
    {"tags": {"hourly": 1}, "consumers": ["billing"]},
    *({"age": "3d", "mode": mode} for mode in ("delete", 7)),
    {"tags": {"hourly": 1}, "mode": "drop"},
    {"column": "at", "column_age": "3d", "mode": "drop"},
]


PATH = f"/v1/shards/{NAME}/retention"


def test_what_is_refused_of_a_policy(shard: Shard, http: TestClient) -> None:
    for policy in REFUSED:
        with pytest.raises(InvalidUsage):
            shard.retain(policy)
        answer = http.put(PATH, json=policy, headers={"if-match": '"1"'})
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), policy
    assert shard.retention().version == 1


def test_a_policy_that_landed_is_put_again_with_the_version_of_before(shard: Shard, http: TestClient) -> None:
    """As it is with settings: its answer was lost."""
    for _ in range(2):
        done = http.put(PATH, json={"age": "3d", "cut_every": "1d"}, headers={"if-match": '"1"'})
        assert (done.status_code, shard.retention().version) == (200, 2)
    other = http.put(PATH, json={"age": "4d", "cut_every": "1d"}, headers={"if-match": '"1"'})
    assert (other.status_code, other.json()["kind"]) == (409, "conflict")


@pytest.mark.parametrize(
    "policy", [{"rows": 10}, {"rows": 10, "mode": "drop"}, {"bytes": 40}, {"rows": 10, "age": "3d"}]
)
def test_what_the_first_run_takes_by_a_cut_that_it_takes_itself_counts_too(
    world: World, machine: Machine, shard: Shard, policy: dict[str, Any]
) -> None:
    """No cut was taken before the policy is set. So nothing seemed to be due, and a dry run said so too."""
    shard.insert([{"id": number} for number in range(100)])
    world.pass_ms(2 * HOUR_MS + 60_000)
    shard.insert([{"id": 1_000 + number} for number in range(12)])
    world.pass_ms(60_000)
    upper = shard.upper()
    with pytest.raises(InvalidUsage, match="would remove 100 of the 112 rows"):
        shard.retain(policy)
    assert (shard.retention().policy, shard.upper()) == (None, upper)
    shard.retain(policy, confirm=True)
    tried = shard.run_retention(dry_run=True)
    assert (shard.retention().cuts, shard.upper()) == (0, upper), "a dry run takes no cut"
    done = shard.run_retention()
    assert done.truncated is not None
    assert (tried.why, tried.truncated.removed) == (done.why, 100)
    assert ids(shard) == [1_000 + number for number in range(12)]


def test_what_would_take_more_than_half_at_once_needs_confirm(world: World, machine: Machine, http: TestClient) -> None:
    shard = machine.client.create_shard("old", SCHEMA, ["id"], history="forever")
    for number in range(4):
        shard.insert([{"id": number}])
        world.pass_ms(DAY_MS)
    path = "/v1/shards/old/retention"
    with pytest.raises(InvalidUsage, match="3 of the 4 rows"):
        shard.retain({"age": "1d", "cut_every": "1d"})
    answer = http.put(path, json={"age": "1d", "cut_every": "1d"}, headers={"if-match": '"1"'})
    assert (answer.status_code, answer.json()["details"]) == (400, {"removed": 3, "rows": 4})
    assert shard.retention().version == 1
    assert shard.retain({"age": "2d", "cut_every": "1d"}).version == 2, "two of four are not more than half"
    assert shard.retain({"age": "1d", "cut_every": "1d"}, confirm=True).version == 3


def test_other_wrong_requests_are_refused(machine: Machine, shard: Shard, http: TestClient) -> None:
    for body, match, status in (
        ("[]", '"1"', 400),
        ("{", '"1"', 400),
        ('{"age": "1d", "age": "2d"}', '"1"', 400),
        ('{"age": "1d"}', "", 400),
        ('{"age": "1d"}', '"7"', 409),
    ):
        assert http.put(PATH, content=body, headers={"if-match": match}).status_code == status
    for wrong in ({"policy": 7}, {"policy": {"age": "1d"}, "confirm": 1}):
        with pytest.raises(InvalidUsage):
            shard.retain(**wrong)  # type: ignore[arg-type]
    with pytest.raises(Conflict):
        shard.retain({"age": "1d"}, expected_version=7)
    with pytest.raises(InvalidUsage):
        shard.run_retention(dry_run=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="no settings yet"):
        machine.client.create_shard("plain", SCHEMA, ["id"]).retain({"age": "1d"})
    assert http.get("/v1/shards/nobody/retention").status_code == 404
    assert shard.retention().version == 1


def test_over_http(world: World, machine: Machine, shard: Shard, http: TestClient) -> None:
    told = http.get(PATH)
    assert (told.json()["policy"], told.headers["etag"]) == (None, '"1"')
    assert http.post(f"{PATH}/run").json()["truncated"] is None
    policy = {"age": "3d", "bytes": "20MB", "cut_every": "1d"}
    done = http.put(PATH, json=policy, headers={"if-match": told.headers["etag"]})
    assert (done.json()["policy"], done.headers["etag"]) == ({**policy, "bytes": 20_000_000}, '"2"')
    days(world, machine, shard, 0, 3)
    world.pass_ms(DAY_MS)
    tried = http.post(f"{PATH}/run", params={"dry_run": True}).json()
    assert (tried["truncated"]["removed"], tried["why"]) == (1, ["age"])
    assert http.get(PATH).json()["due"] == 1
    assert http.post(f"{PATH}/run").json()["truncated"]["removed"] == 1
    found = http.get(PATH).json()
    assert (found["done_before"], found["removed"], found["due"], found["rows"]) == (1, 1, None, 2)
    assert found["done_at"] == to_datetime(world.true_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    kept = http.put(f"/v1/shards/{NAME}/settings", json={"history": "2d"}, headers={"if-match": '"2"'})
    assert kept.status_code == 200
    assert http.get(PATH).json()["policy"]["age"] == "3d"
    assert http.put(PATH, content="null", headers={"if-match": '"3"'}).json()["policy"] is None


def test_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "data")]
    with persist.connect(f"persist://{tmp_path}/data") as client:
        client.create_shard("a", SCHEMA, ["id"]).insert([{"id": 1}])
    assert main(["retention", "set", "a", "--age", "90d", "--consumer", "billing", *where]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["shard"], told["policy"]["age"], told["policy"]["consumers"]) == ("a", "90d", ["billing"])
    assert main(["retention", "run", "a", "--dry-run", *where]) == 0
    assert json.loads(capsys.readouterr().out)["truncated"] is None
    for given, policy in (
        (["--tags", "hourly=24,monthly=12"], {"tags": {"hourly": 24, "monthly": 12}}),
        (["--age", "3d", "--cut-every", "1d", "--mode", "drop"], {"age": "3d", "cut_every": "1d", "mode": "drop"}),
        (
            ["--column", "id", "--column-age", "30d", "--column-unit", "ms", "--confirm"],
            {"column": "id", "column_age": "30d", "column_unit": "ms", "cut_every": "432m"},
        ),
    ):
        assert main(["retention", "set", "a", *given, *where]) == 0
        assert json.loads(capsys.readouterr().out)["policy"] == policy
    assert main(["retention", "set", "a", "--keep-all", *where]) == 0
    assert main(["retention", "show", "a", *where]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["policy"] is None
    for wrong in (
        ["set", "a"],
        ["set", "a", "--age", "1d", "--keep-all"],
        ["set", "a", "--cut-every", "1d"],
        ["set", "nobody", "--age", "1d"],
    ):
        assert main(["retention", *wrong, *where]) == 1


def test_others_that_take_rows_away_each_time_make_it_come_again_later(
    world: World, machine: Machine, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.retain({"age": "1d", "cut_every": "1d"})
    days(world, machine, shard, 0, 1)
    world.pass_ms(3 * DAY_MS)
    metrics = MaintenanceMetrics()

    def others() -> None:
        shard.insert([{"id": 9}])
        shard.insert([{"id": 9, "__diff": -1}])

    with monkeypatch.context() as patched:
        before_rewrites(patched, *[others] * 100)
        with pytest.raises(PersistError):
            keeper(machine, metrics)(NAME)
    assert metrics.counters.retention_failed == 1
    assert 0 in ids(shard)
    keeper(machine)(NAME)
    assert 0 not in ids(shard)


# --- a ladder of tags


def test_a_ladder_sets_and_takes_away_its_own_tags(world: World, machine: Machine) -> None:
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="2h")
    shard.retain({"tags": {"hourly": 3, "daily": 2}})
    task = keeper(machine)
    for hour in range(50):
        shard.insert([{"id": hour}])
        if hour == 30:
            shard.tag("hourly-1999-01-01T00Z")
        world.pass_ms(HOUR_MS)
        task(NAME)
        forget_outlived(machine.location.machine(NAME), machine.clock)
        Worker(machine.location).run(NAME, idle=True)
    tags = shard.tags()
    hourly = sorted(tag for tag in tags if tag.startswith("hourly"))
    assert [tag[-3:] for tag in hourly] == ["00Z", "00Z", "01Z", "02Z"], "and the one of the user"
    assert [tags[tag].time for tag in hourly] == [30, 47, 48, 49]
    daily = sorted(tag for tag in tags if tag.startswith("daily"))
    assert len(daily) == 2
    assert [tags[tag].time for tag in daily] == [23, 47]
    assert shard.snapshot(tag=daily[0]).to_arrow().num_rows == 24, "though since has passed it"
    assert shard.since() > Antichain(40)
    shard.retain(None)
    task(NAME)
    assert sorted(shard.tags()) == sorted(tags)


def test_what_a_ladder_does_next_is_told(world: World, machine: Machine) -> None:
    """It was None, as if nothing were to be done before the shard moves."""
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="2h")
    shard.retain({"tags": {"hourly": 3}})
    assert shard.retention().next is None, "nothing was written yet"
    shard.insert([{"id": 1}])
    hour_ms = (world.true_ms // HOUR_MS + 1) * HOUR_MS
    assert shard.retention().next == to_datetime(hour_ms)
    world.pass_ms(HOUR_MS)
    keeper(machine)(NAME)
    assert list(shard.tags())
    assert shard.retention().next is None, "the newest tag shows the latest time"


def test_a_ladder_needs_a_grid_of_which_its_hours_and_days_are_points(shard: Shard) -> None:
    """All hourly tags of a day showed what was there at midnight."""
    hour = timedelta(hours=1)
    for every, tags, is_refused in (
        (24 * hour, {"hourly": 3}, True), (7 * hour / 60, {"hourly": 3}, True), (7 * hour, {"monthly": 3}, True),
        (24 * hour, {"daily": 3}, False), (hour / 3, {"hourly": 3, "daily": 3}, False),
    ):  # fmt: skip
        shard.retain(None)
        shard.configure(mark_every=every)
        with pytest.raises(InvalidUsage, match="no instant is known") if is_refused else nullcontext():
            shard.retain({"tags": tags})
        assert (shard.retention().policy is None) == is_refused
    with pytest.raises(InvalidUsage, match="no instant is known at which each hourly tag begins"):
        shard.configure(mark_every=24 * hour)


def test_a_ladder_at_rest_costs_nothing_and_a_wrong_clock_takes_no_tag(world: World, machine: Machine) -> None:
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="2h")
    shard.retain({"tags": {"hourly": 3, "monthly": 1}})
    shard.insert([{"id": 1}])
    task, waits = keeper(machine), []
    for _ in range(1_000):
        waits.append(task(NAME))
        if waits[-1] is None:
            break
        world.pass_ms(int(waits[-1] * 1000))
    assert waits[-1] is None
    tags = shard.tags()
    assert [tag.partition("-")[0] for tag in tags] == ["hourly", "monthly"]
    shard.insert([{"id": 2}])
    for off_ms in (400 * DAY_MS, -400 * DAY_MS):
        wrong = world.machine(off_ms)
        with pytest.raises(Unavailable):
            wrong.shard(NAME).run_retention()
    assert shard.tags() == tags
