"""Cuts over many shards, and truncating by them: in Python, over HTTP, by commands, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist.client.many_shards import SHARDS_MAX, TIMES, Cut
from persist.client.timestamps import to_datetime
from persist.core import commands as c
from persist.core.errors import InvalidUsage, PersistError, UnknownShard, UpgradeNeeded
from persist.core.frontier import EMPTY, Antichain
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.asking import typed
from tests.support.clocks import DAY_MS, HOUR_MS, Machine, World
from tests.support.epochs import raise_epoch
from tests.support.token_file import bearer, write_tokens

SCHEMA = pa.schema([("id", pa.int64())])
NAMES = ["eu/items", "eu/orders"]


@pytest.fixture
def machine(world: World) -> Machine:
    """`eu/items` has two times, `eu/orders` three, a second apart; `us/orders` has one."""
    found = world.machine()
    for name, times in (("eu/items", 2), ("eu/orders", 3), ("us/orders", 1)):
        shard = found.client.create_shard(name, SCHEMA, ["id"], history="7d")
        for number in range(times):
            shard.insert([{"id": number}])
            world.pass_ms(1_000)
    return found


@pytest.fixture
def http(machine: Machine) -> Iterator[TestClient]:
    with typed(TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1")) as client:
        yield client


def ids(machine: Machine, name: str) -> list[int]:
    found: list[int] = machine.shard(name).snapshot().to_arrow()["id"].to_pylist()
    return found


def altered(cut: Cut, **changes: Any) -> dict[str, Any]:
    """The cut as JSON with other values, and the checksum as it was."""
    return {**json.loads(cut.to_json()), **changes}


# --- taking them


def test_a_cut_has_each_shards_upper(machine: Machine) -> None:
    cut = machine.client.cut(NAMES)
    assert dict(cut.shards) == {"eu/items": Antichain(2), "eu/orders": Antichain(3)}
    assert (cut.kind, cut.taken_ms, cut.epoch, len(cut)) == ("upper", machine.clock.now_ms(), 1, 2)
    assert machine.client.cut(prefix="eu/") == machine.client.cut(NAMES, at_once=1) == cut
    assert Cut.from_json(cut.to_json()) == pickle.loads(pickle.dumps(cut)) == cut
    with pytest.raises(UnknownShard):
        cut["us/orders"]


def test_a_cut_by_a_wall_clock_is_the_same_whenever_it_is_taken(world: World, machine: Machine) -> None:
    at = to_datetime(1_760_000_002_000)  # after the second row of eu/items; eu/orders has just been created
    cut = machine.client.cut(prefix="eu/", at=at)
    assert (cut.kind, cut["eu/items"], cut["eu/orders"]) == ("timestamp", Antichain(2), Antichain(0))
    machine.shard("eu/orders").insert([{"id": 9}])
    world.pass_ms(5_000)
    assert machine.client.cut(prefix="eu/", at=at).shards == cut.shards


def test_a_cut_by_cursors_is_what_all_of_them_have_passed(machine: Machine) -> None:
    for name in NAMES:
        for cursor, since in (("billing", 1), ("search", 2 if name == "eu/orders" else 0)):
            machine.shard(name).downgrade_since(since, cursor)
    machine.shard("eu/items").downgrade_since(50, "ahead", force=True)
    cut = machine.client.cut(NAMES, cursors=["billing", "search"])
    assert (cut.kind, cut["eu/items"], cut["eu/orders"]) == ("cursors", Antichain(0), Antichain(1))
    assert machine.client.cut(["eu/items"], cursors=["ahead"])["eu/items"] == Antichain(2), "not beyond the upper"


def test_meet_and_join(machine: Machine) -> None:
    one = machine.client.cut(["eu/items", "eu/orders"])
    machine.shard("eu/orders").insert([{"id": 9}])
    other = machine.client.cut(["eu/orders", "us/orders"])
    assert dict(one.meet(other).shards) == {"eu/orders": Antichain(3)}
    assert {name: upper.element for name, upper in one.join(other).shards.items()} == {
        "eu/items": 2, "eu/orders": 4, "us/orders": 1,
    }  # fmt: skip
    closed = Cut(one.location, 1, 0, "times", {"eu/orders": EMPTY})
    assert (one.meet(closed)["eu/orders"], one.join(closed)["eu/orders"]) == (Antichain(3), EMPTY)
    assert (one.join(other).kind, one.meet(closed).kind, one.meet(closed).taken_ms) == ("upper", TIMES, 0)
    for wrong in (Cut("elsewhere", 1, 0, "upper", {}), Cut(one.location, 1, 0, "upper", one.shards, {"eu/orders": 1})):
        for combined in (one.meet, one.join):
            with pytest.raises(InvalidUsage):
                combined(wrong)


# --- truncating


def test_a_truncation_by_a_cut_is_done_in_every_shard_once(machine: Machine) -> None:
    cut = machine.client.cut(NAMES)
    machine.shard("eu/orders").insert([{"id": 9}])
    tried = machine.client.truncate(cut, dry_run=True)
    assert [outcome.done and outcome.done.removed for outcome in tried.outcomes] == [2, 3]
    assert ids(machine, "eu/items") == [0, 1]
    done = machine.client.truncate(cut)
    assert done.complete
    assert [outcome.done and outcome.done.changed for outcome in done.outcomes] == [True, True]
    assert (ids(machine, "eu/items"), ids(machine, "eu/orders"), ids(machine, "us/orders")) == ([], [9], [0])
    again = machine.client.truncate(cut)
    assert again.complete
    assert not any(outcome.done and outcome.done.changed for outcome in again.outcomes)


def test_what_one_shard_refuses_leaves_the_others_alone_and_the_same_again_completes_it(machine: Machine) -> None:
    """A row for each line of the table: dropped, closed, forgotten."""
    for name in ("a", "b", "c", "d", "e"):
        machine.client.create_shard(name, SCHEMA, ["id"], history="7d").insert([{"id": 1}])
        machine.shard(name).insert([{"id": 2}])
    cut = machine.client.cut(["a", "b", "c", "d", "e"])
    cut = Cut(cut.location, cut.epoch, cut.taken_ms, cut.kind, dict.fromkeys(cut.shards, Antichain(1)))
    machine.shard("a").drop()
    machine.shard("b").drop()
    machine.client.create_shard("b", SCHEMA, ["id"]).insert([{"id": 7}])
    machine.shard("c").advance_upper(None)
    machine.shard("d").forget(1)
    done = machine.client.truncate(cut)
    kinds = {outcome.shard: outcome.error.kind for outcome in done.failed if outcome.error}
    assert kinds == {"a": "unknown_shard", "b": "unknown_shard", "c": "upper_mismatch", "d": "not_readable"}
    assert not done.complete
    assert (ids(machine, "b"), ids(machine, "c"), ids(machine, "d"), ids(machine, "e")) == ([7], [1, 2], [1, 2], [2])
    closed = machine.client.cut(["c"])
    assert closed["c"] == EMPTY
    [outcome] = machine.client.truncate(closed).outcomes
    assert outcome.to_json()["error"]["kind"] == "upper_mismatch"


def test_a_truncation_by_a_cut_is_not_complete_while_it_waits(machine: Machine, http: TestClient) -> None:
    """A shard that is fed by append truncates with the next commit of its writer, unless that withdraws it."""
    shards = [machine.client.create_shard(name, SCHEMA, ["id"]) for name in ("fed/a", "fed/b", "fed/c")]
    for shard in shards:
        shard.append([{"id": 0}], 0, 1)
    cut = machine.client.cut(prefix="fed/")
    for _ in range(2):
        done = machine.client.truncate(cut)
        assert (done.complete, done.failed) == (False, ())
        assert all(outcome.done and outcome.done.pending for outcome in done.outcomes)
    shards[0].append([{"id": 1}], 1, 2)
    shards[1].append([{"id": 0, "__diff": -1}], 1, 2)
    shards[2].erase(keys=[0])
    body = http.post("/v1/truncate", content=cut.to_json()).json()
    assert body["complete"] is False
    assert [shard.get("error", {}).get("kind") for shard in body["shards"]] == [None, "conflict", "conflict"]
    assert [ids(machine, shard.name) for shard in shards] == [[1], [], [0]]
    shards[0].insert([{"id": 2}])  # from here on the service has the times
    shards[0].restore(0)
    assert ids(machine, "fed/a") == [0]
    assert machine.client.truncate(cut).outcomes[0].done, "a restore has undone it, so it is done again"
    assert ids(machine, "fed/a") == []


def test_a_cut_of_another_location_or_of_a_later_epoch_is_refused(world: World, machine: Machine) -> None:
    cut = machine.client.cut(NAMES)
    for wrong in (
        Cut("0" * 32, 1, cut.taken_ms, cut.kind, cut.shards),
        Cut(cut.location, 2, cut.taken_ms, cut.kind, cut.shards),
    ):
        with pytest.raises(InvalidUsage, match=r"location|epoch"):
            machine.client.truncate(wrong)
    raise_epoch(machine.location)
    assert world.machine().client.truncate(cut).complete, "what was taken before is as true as it was"


@pytest.mark.parametrize(
    "change",
    [
        {"shards": {"eu/orders": [1]}},
        {"shards": {"..": [1]}},
        {"lives": {"eu/orders": 1}},
        {"epoch": 2},
        {"taken_ms": -1},
        {"kind": "none"},
        {"crc": 1},
        {"v": 0},
        {"more": 1},
    ],
)
def test_a_cut_that_is_damaged_is_refused(machine: Machine, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage, match="the cut is damaged"):
        Cut.from_json(json.dumps(altered(machine.client.cut(NAMES), **change)))


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", "[" * 100_000, b"\xff", None, 7])
def test_what_is_no_cut_is_refused(text: Any) -> None:
    with pytest.raises(InvalidUsage):
        Cut.from_json(text)


def test_a_cut_of_a_later_version_asks_for_an_upgrade(machine: Machine) -> None:
    with pytest.raises(UpgradeNeeded):
        Cut.from_json(json.dumps(altered(machine.client.cut(NAMES), v=2)))


@pytest.mark.parametrize(
    "arguments",
    [
        {"at_once": 0},
        {"at_once": True},
        {"names": "eu/orders"},
        {"prefix": 7, "names": None},
        {"at": "noon"},
        {"cursors": "billing"},
    ],
)
def test_wrong_arguments_are_refused(machine: Machine, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        machine.client.cut(**{"names": NAMES, **arguments})


@pytest.mark.parametrize("arguments", [{"retries": -1}, {"dry_run": 1}, {"at_once": 0}, {"info": 7}])
def test_wrong_arguments_of_a_truncation_are_refused(machine: Machine, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        machine.client.truncate(machine.client.cut(NAMES), **arguments)
    assert ids(machine, "eu/items") == [0, 1]


# --- over HTTP

FAR = "2099-01-01T00:00:00Z"
REFUSED: list[tuple[str, Any, str, int]] = [
    ("names and a prefix", {"shards": NAMES, "prefix": "eu/"}, "invalid_usage", 400),
    ("too many names", {"shards": [f"s{n}" for n in range(SHARDS_MAX + 1)]}, "invalid_usage", 400),
    ("a shard that is not there", {"shards": ["nobody"]}, "unknown_shard", 404),
    ("a cursor that is not there", {"prefix": "eu/", "cursors": ["billing"]}, "invalid_usage", 400),
    ("to come", {"prefix": "eu/", "at": FAR}, "not_complete", 409),
]


@pytest.mark.parametrize(("body", "kind", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused_of_a_cut(http: TestClient, body: Any, kind: str, status: int) -> None:
    answer = http.post("/v1/cuts", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (status, kind), answer.text


def test_a_cut_that_is_made_by_hand_has_frontiers(machine: Machine) -> None:
    cut = machine.client.cut(NAMES)
    for wrong in ({"eu/orders": 5}, {5: Antichain(5)}):
        with pytest.raises(InvalidUsage, match="a cut has a frontier, an Antichain, for each name"):
            Cut(cut.location, cut.epoch, 0, "upper", wrong)  # type: ignore[arg-type]


def test_a_wall_clock_that_a_shard_does_not_know_refuses_the_cut(world: World, machine: Machine) -> None:
    world.store_off_ms = DAY_MS
    world.machine(DAY_MS).shard("eu/orders").insert([{"id": 9}])
    world.store_off_ms = 0
    right = world.machine()
    right.location.machine("eu/orders").apply(c.LowerSeal())
    world.pass_ms(2 * HOUR_MS)
    at = to_datetime(world.true_ms - HOUR_MS)
    with typed(TestClient(create_app(right.location, ServerSettings()), base_url="http://127.0.0.1")) as http:
        answer = http.post("/v1/cuts", json={"prefix": "eu/", "at": at.isoformat()})
        assert (answer.status_code, answer.json()["kind"]) == (410, "not_readable"), answer.text
        assert http.post("/v1/cuts", json={"prefix": "eu/"}).json()["shards"]["eu/orders"] == [4]


def test_over_http_a_cut_is_taken_and_truncated_by(machine: Machine, http: TestClient) -> None:
    text = http.post("/v1/cuts", json={"prefix": "eu/"}).text
    assert Cut.from_json(text) == machine.client.cut(NAMES)
    tried = http.post("/v1/truncate", content=text, params={"dry_run": True}).json()
    assert [(found["shard"], found["removed"]) for found in tried["shards"]] == [("eu/items", 2), ("eu/orders", 3)]
    machine.shard("eu/items").advance_upper(None)
    done = http.post("/v1/truncate", content=text, headers={"persist-info": '{"ticket": 1}'}).json()
    assert (done["complete"], done["shards"][0]["error"]["kind"]) == (False, "upper_mismatch")
    assert (done["shards"][1]["removed"], done["shards"][1]["lower"]) == (3, [3])
    assert machine.shard("eu/orders").history(1)[0].info == {"ticket": 1}
    assert http.post("/v1/truncate", content=text).json()["shards"][1]["removed"] == 0


def test_what_is_refused_of_a_truncation_by_a_cut(machine: Machine, http: TestClient) -> None:
    cut = machine.client.cut(NAMES)
    elsewhere = Cut("0" * 32, 1, cut.taken_ms, cut.kind, cut.shards)
    rows: list[tuple[str, str, int]] = [
        ("", "invalid_usage", 400),
        (json.dumps(altered(cut, v=2)), "upgrade_needed", 501),
        (elsewhere.to_json(), "invalid_usage", 400),
        ('{"v": 1, "v": 1}', "invalid_usage", 400),
    ]
    for text, kind, status in rows:
        answer = http.post("/v1/truncate", content=text)
        assert (answer.status_code, answer.json()["kind"]) == (status, kind), answer.text
    assert http.post("/v1/truncate", content=cut.to_json(), params={"retries": -1}).status_code == 422
    assert http.post("/v1/truncate", content=cut.to_json(), headers={"Idempotency-Key": "k"}).status_code == 400
    assert (ids(machine, "eu/items"), ids(machine, "eu/orders")) == ([0, 1], [0, 1, 2])


def test_tokens_reach_their_prefixes_only(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    tokens = write_tokens(file, {"read": ("read", "eu/"), "write": ("write", "eu/")})
    app = create_app(machine.location, ServerSettings(tokens_file=str(file)))
    own, all_of_them = machine.client.cut(NAMES).to_json(), machine.client.cut(prefix="").to_json()

    def asked(scope: str, path: str, **more: Any) -> int:
        return int(http.post(path, headers=bearer(tokens[scope]), **more).status_code)

    with TestClient(app) as http:
        assert asked("read", "/v1/cuts", json={"prefix": "eu/"}) == 200
        for body in ({"prefix": ""}, {"prefix": "us/"}, {"shards": ["eu/orders", "us/orders"]}):
            assert asked("read", "/v1/cuts", json=body) == 403
        assert asked("read", "/v1/truncate", content=own) == 403
        assert asked("write", "/v1/truncate", content=all_of_them) == 403
        assert (ids(machine, "eu/items"), ids(machine, "us/orders")) == ([0, 1], [0]), "nothing was written"
        assert asked("write", "/v1/truncate", content=own) == 200
    assert (ids(machine, "eu/items"), ids(machine, "us/orders")) == ([], [0])


# --- by commands, and through a server


def test_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "data")]
    with persist.connect(f"persist://{tmp_path}/data") as client:
        for name in ("a", "b"):
            client.create_shard(name, SCHEMA, ["id"]).insert([{"id": 1}])
    assert main(["retention", "cut", "a", "b", *where]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "cut.json"
    file.write_text(text)
    assert dict(Cut.from_json(text).shards) == {"a": Antichain(1), "b": Antichain(1)}
    assert main(["retention", "truncate", "--cut", str(file), "--dry-run", *where]) == 0
    assert [json.loads(line)["removed"] for line in capsys.readouterr().out.splitlines()] == [1, 1]
    with persist.connect(f"persist://{tmp_path}/data") as client:
        client.shard("a").drop()
    assert main(["retention", "truncate", "--cut", str(file), *where]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told[0]["error"]["kind"], told[1]["removed"]) == ("unknown_shard", 1)


def test_dropped_shards_are_left_out_of_a_prefix(machine: Machine) -> None:
    machine.shard("eu/items").drop()
    assert list(machine.client.cut(prefix="eu/").shards) == ["eu/orders"]
    machine.client.create_shard("eu/items", SCHEMA, ["id"])
    cut = machine.client.cut(prefix="eu/")
    assert (cut["eu/items"], dict(cut.lives)) == (Antichain(0), {"eu/items": 1})
    assert Cut.from_json(cut.to_json()) == cut
    with pytest.raises(PersistError):
        machine.client.cut(prefix="eu/", at=datetime(2099, 1, 1, tzinfo=UTC))
