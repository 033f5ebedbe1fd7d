"""Truncation by a drop as users see it: in Python, over HTTP, by commands, and as maintenance goes on with it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist.client.shard import Shard
from persist.commit.blob_tasks import write_bundles
from persist.core import commands as c
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import token_of_key
from persist.core.shard_view import ViewRequest, view_of
from persist.core.state import Policy, State
from persist.core.truncations_and_drops import RowDrop
from persist.formats.http_messages import decode_view, encode_view
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support import maintained
from tests.support.blob_calls import record_calls
from tests.support.clocks import Machine, World
from tests.unit.compactor.test_bundles import PLAIN, TINY, bundles, collected, left_over

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
PATH = f"/v1/shards/{NAME}"


@pytest.fixture
def world() -> World:
    return World(policy=Policy(inline_part_bytes_max=0))


@pytest.fixture
def shard(world: World, machine: Machine) -> Shard:
    """A row comes at each of the times 0 to 4, the first one twice."""
    found = machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")
    for number in range(5):
        found.insert([{"id": number, "v": "x", "__diff": 1 if number else 2}])
        world.pass_ms(1_000)
    return found


def ids(shard: Shard, as_of: int | None = None) -> dict[int, int]:
    return {row["id"]: row["__diff"] for row in shard.snapshot(as_of).to_arrow().to_pylist()}


def state(machine: Machine) -> State:
    return machine.location.machine(NAME).refresh()


def test_it_is_one_commit_that_reads_and_writes_no_part(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, shard: Shard
) -> None:
    before, calls = state(machine), record_calls(monkeypatch)
    done = shard.truncate(3, mode="drop", info={"ticket": 7})
    assert [verb for verb, _ in calls if verb != "stat"] == []
    assert (done.before, done.removed, done.changed, done.mode) == (3, None, True, "drop")
    assert (done.lower, done.upper) == (Antichain(5), Antichain(6))
    after = state(machine)
    assert after.drops == (RowDrop(3, 5),)
    assert list(after.trace.parts()) == list(before.trace.parts())
    [entry] = shard.history(1)
    assert (entry.operation, entry.purpose, entry.info, entry.rows) == (
        "drop_before", "drop before 3", {"ticket": 7}, 0,
    )  # fmt: skip


def test_reads_listeners_and_changes_see_retractions_at_its_time(shard: Shard) -> None:
    shard.truncate(3, mode="drop")
    shard.insert([{"id": 9, "v": "x"}])
    assert ids(shard) == {3: 1, 4: 1, 9: 1}
    assert ids(shard, 4) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    with shard.listen(4, until=7) as listen:
        events = list(listen)
    assert [(event.lower.element, event.upper.element) for event in events] == [(5, 6), (6, 7)]
    assert [tuple(row.values()) for row in events[0].updates.to_pylist()] == [
        (0, "x", 5, -2), (1, "x", 5, -1), (2, "x", 5, -1),
    ]  # fmt: skip
    assert [tuple(row.values()) for row in shard.changes(4).to_arrow().to_pylist()] == [
        (0, "x", -2), (1, "x", -1), (2, "x", -1), (9, "x", 1),
    ]  # fmt: skip


def test_a_restore_undoes_it_and_a_drop_does_not_take_that_away(shard: Shard) -> None:
    held = ids(shard)
    done = shard.truncate(3, mode="drop")
    restored = shard.restore(done.lower.element - 1)  # type: ignore[operator]
    assert (restored.added, restored.removed) == (4, 0)
    assert ids(shard) == held
    with pytest.raises(InvalidUsage, match="before 3 were dropped already, and restored rows were"):
        shard.truncate(3, mode="drop")
    assert shard.truncate(3).removed == 4
    assert ids(shard) == {3: 1, 4: 1}


def test_both_modes_know_what_the_other_has_done(shard: Shard) -> None:
    assert shard.truncate(2, mode="drop").changed
    assert not shard.truncate(2).changed
    assert shard.truncate(3).removed == 1
    assert not shard.truncate(3, mode="drop").changed
    with pytest.raises(InvalidUsage, match="with mode 'retract'"):
        shard.truncate(4, mode="drop")
    assert shard.truncate(4).removed == 1
    assert ids(shard) == {4: 1}


def test_a_dry_run_counts_and_changes_nothing(machine: Machine, shard: Shard) -> None:
    shard.truncate(1, mode="drop")
    before = state(machine)
    tried = shard.truncate(4, mode="drop", dry_run=True)
    assert (tried.removed, tried.changed, tried.upper) == (3, False, Antichain(6))
    after = state(machine)
    assert (after.trace, after.drops, after.truncated, after.leased_readers) == (
        before.trace, before.drops, before.truncated, {},
    )  # fmt: skip
    shard.insert([{"id": 4, "v": "x", "__diff": -1}])
    with pytest.raises(InvalidUsage, match="may retract, at 4 or later"):
        shard.truncate(4, mode="drop", dry_run=True)


def test_bundles_before_the_cut_go_and_one_across_it_is_clipped() -> None:
    world = maintained.World(policy=TINY)
    world.append_in_parts(10, 1)
    world.append([(f"k{n:05}", 7, 1 + n % 2, 1) for n in range(4)], 3)
    world.append_in_parts(10, 5, first=4)
    late = [part for part in bundles(world) if part.time_min == 3]
    assert 0 < len(late) < len(bundles(world))
    held = world.contents(4)
    assert world.shard.truncate(2, mode="drop").changed
    expected = {row: n for row, n in held.items() if row[1] == 7 and row[0] in ("k00001", "k00003")}
    expected |= {row: n for row, n in held.items() if row[1] >= 3000}
    assert world.contents(5) == expected
    assert world.contents(4) == held
    with world.shard.listen(4, until=6) as listen:
        gone = [row for event in listen for row in event.updates.to_pylist()]
    assert len(gone) == 12
    assert {row["__diff"] for row in gone} == {-1}
    world.forget_before(5)
    world.user.machine(maintained.NAME).apply(c.ForgetOutlived())
    assert bundles(world) == late
    assert world.contents(5) == expected
    collected(world)
    assert left_over(world) == set()


def across_the_cut(world: maintained.World) -> None:
    """One batch of six parts, with rows at the times 0 to 2."""
    runs: list[Any] = []
    with closing(world.shard.open_writer()) as writer:
        for number in range(6):
            table = pa.Table.from_pylist(
                [{"k": f"k{number}", "v": number, "__time": time, "__diff": 1} for time in (0, number % 3)],
                schema=maintained.UPDATES,
            )
            runs += writer.stage_for_one_commit(table, 0)
        writer.commit_compare_and_append(tuple(runs), 0, 3)


def test_a_bundle_that_was_written_before_a_drop_was_forgotten_is_left() -> None:
    """It has the rows that the parts have lost since (seed 12308 of the simulation)."""
    world = maintained.World(policy=PLAIN)
    across_the_cut(world)
    machine = world.user.machine(maintained.NAME)
    state = machine.refresh()
    late = write_bundles(world.user.versions, world.user.ids, TINY, state, state.trace.batches[0])
    assert late is not None
    assert world.shard.truncate(2, mode="drop").changed
    expected = {("k2", 2): 1, ("k5", 5): 1}
    world.forget_before(3)
    machine.apply(c.ForgetOutlived())
    assert machine.apply(late) == c.Bundled(False)
    assert world.contents(3) == expected


def test_a_dry_run_of_a_drop_that_was_done_already_tells_so(shard: Shard) -> None:
    """Also where another drop would be refused by now: the same again changes nothing."""
    shard.truncate(2, mode="drop")
    shard.insert([{"id": 4, "v": "x", "__diff": -1}])
    for before in (1, 2):
        tried = shard.truncate(before, mode="drop", dry_run=True)
        assert (tried.removed, tried.changed) == (0, False)
        assert not shard.truncate(before, mode="drop").changed


def test_a_drop_that_had_nothing_to_do_was_not_withdrawn(shard: Shard) -> None:
    """Also if a restore has undone the truncation that had removed the rows."""
    tokens = {before: token_of_key(f"nightly-{before}") for before in (1, 2)}
    shard.truncate(2)  # at 5
    first = {before: shard.truncate(before, mode="drop", token=token) for before, token in tokens.items()}
    assert {done.removed for done in first.values()} == {0}
    shard.restore(4)
    for before, token in tokens.items():
        again = shard.truncate(before, mode="drop", token=token)
        assert (again.lower, again.changed, again.pending) == (first[before].lower, False, False)


def test_a_view_without_truncations_is_as_it_was(machine: Machine, shard: Shard) -> None:
    """A client that does not know of them reads it. One with drops it refuses, since it would show dropped rows."""
    view = view_of(state(machine), ViewRequest())
    known = view.__struct_fields__.index("truncations") + 1  # what comes later is left out where there is none of it
    assert decode_view(encode_view(view)) == view
    assert encode_view(view)[:1] == bytes([0x90 + known - 2])
    shard.truncate(2, mode="drop")
    view = view_of(state(machine), ViewRequest())
    assert decode_view(encode_view(view)) == view
    assert encode_view(view)[:1] == bytes([0x90 + known])


def test_over_http_it_is_tried_done_answered_again_and_listened_to(http: TestClient, shard: Shard) -> None:
    tried = http.post(f"{PATH}/truncate", params={"before": 2, "mode": "drop", "dry_run": True}).json()
    assert (tried["removed"], tried["lower"], tried["mode"]) == (3, [5], "drop")
    asked: dict[str, Any] = {"params": {"before": 2, "mode": "drop"}, "headers": {"Idempotency-Key": "old"}}
    done = http.post(f"{PATH}/truncate", **asked).json()
    assert done == {
        "before": 2, "timestamp": None, "lower": [5], "upper": [6], "removed": None, "mode": "drop",
            "pending": False,
    }  # fmt: skip
    assert http.post(f"{PATH}/truncate", **asked).json() == done
    assert http.get(f"{PATH}/snapshot", params={"format": "ndjson", "columns": "id"}).text.count("\n") == 3
    with http.stream(
        "GET", f"{PATH}/listen", params={"after": 4, "until": 6}, headers={"accept": "text/event-stream"}
    ) as events:
        told = "".join(events.iter_text())
    assert told.count('"__diff":-') == 2
    refused = http.post(f"{PATH}/truncate", params={"before": 2, "mode": "erase"})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage")


def test_a_command_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{tmp_path}/shards") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        for number in range(3):
            shard.insert([{"id": number}])
    asked = ["retention", "truncate", NAME, "--dir", f"{tmp_path}/shards", "--before", "2", "--mode", "drop"]
    for more, removed, upper in (["--dry-run"], 2, [3]), ([], None, [4]), ([], 0, [4]):
        assert main([*asked, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["removed"], told["upper"], told["mode"]) == (removed, upper, "drop")


# --- a shard that was truncated by a drop is shown over HTTP as any other


COLUMNS = pa.schema([("id", pa.int64())])


def test_a_shard_with_drops_is_shown_in_json_and_created_again() -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", COLUMNS, ["id"], history="forever")
    for number in range(4):
        shard.insert([{"id": number}])
    shard.truncate(2, mode="drop")
    shard.truncate(3)
    state = machine.location.machine("orders").refresh()
    assert state.drops
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as http:
        shown = http.get("/v1/shards/orders")
        assert (shown.status_code, shown.json()["upper"]) == (200, shard.upper().to_json())
        assert not shown.json().keys() & {"batches", "drops", "truncations"}
        assert http.get("/v1/shards/orders?past=2").status_code == 200
        again = http.put("/v1/shards/orders", json={"fields": shown.json()["fields"], "key": ["id"]})
        assert again.status_code == 200, again.text
        assert http.get("/v1/shards?details=true").status_code == 200
