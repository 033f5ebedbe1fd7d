"""`persist check` beside writers and collections, and on what is lost, held or given in an odd form."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob.metrics import ForwardingBlob
from compactor.worker import Worker, WorkerSettings
from persist.check.location_checks import ServerFacts, store_failing
from persist.commit.location import LocationSettings
from persist.copies.verify import Depth, verify_shards
from persist.core.ids import critical_reader_id_of
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from rpc.cli.program import main
from tests.support.ailments import DAY_MS, HOUR_MS, NAME, SCHEMA, World, examine, made
from tests.support.damaged import Damaged
from tests.support.forked import Forked
from tests.support.read_comparison import reader_differences

NO_INLINE = Policy(inline_part_bytes_max=0, rollup_every=4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two shards with parts and rollups."""
    url, settings = f"persist://{tmp_path}/data", LocationSettings(policy=NO_INLINE)
    with persist.connect(url, collect=False, location=settings) as client:
        for name in ("eu/orders", "us/orders"):
            shard = client.create_shard(name, SCHEMA, ["id"])
            for number in range(6):
                shard.insert([{"id": number, "note": "x"}])
    return tmp_path / "data"


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.map_(pa.string(), pa.list_(pa.int64()))], ids=str)
def test_lists_that_were_merged_are_no_fault_and_keep_their_type(kind: pa.DataType) -> None:
    value = [1.0] if pa.types.is_list(kind) else [("a", [1])]
    machine = World(policy=NO_INLINE).machine()
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    shard = machine.client.create_shard(NAME, schema, key=["id"])
    for _ in range(2):
        shard.insert(pa.table({"id": [0], "v": pa.array([value], kind)}, schema))
    assert str(shard.snapshot().to_arrow().schema.field("v").type) == str(kind)
    [found] = verify_shards(machine.location, [NAME], Depth(deep=True, threads=1))
    assert found.faults == ()
    assert reader_differences(machine.location) == []


class Meanwhile(ForwardingBlob):
    """When the first byte of a part is read, others write, merge and collect."""

    world: World
    has_gone_on = False

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if not self.has_gone_on:
            self.has_gone_on = True
            self.go_on()
        return super().get_range(key, start, length)

    def go_on(self) -> None:
        machine = self.world.machine()
        shard = machine.client.shard(NAME)
        for number in range(60):
            shard.insert([{"id": number, "note": "y"}])
            self.world.pass_ms(1_000)
        self.world.pass_ms(2 * HOUR_MS)
        while Worker(machine.location, WorkerSettings()).run(NAME, idle=True):
            pass
        for _ in range(3):
            Collector(machine.location).run(NAME)
            self.world.pass_ms(2 * HOUR_MS)


@pytest.fixture
def moving() -> tuple[World, Meanwhile]:
    world = World(policy=NO_INLINE)
    made(world.machine(), rows=12, history="none")
    blob = Meanwhile(world.blob)
    blob.world = world
    return world, blob


def test_what_is_collected_during_a_deep_look_is_no_fault(moving: tuple[World, Meanwhile]) -> None:
    world, blob = moving
    [found] = verify_shards(world.machine().location, [NAME], Depth(deep=True, threads=1), blob)
    assert blob.has_gone_on
    assert found.faults == ()


def test_what_came_into_the_place_of_collected_parts_is_read(moving: tuple[World, Meanwhile]) -> None:
    world, blob = moving
    go_on = blob.go_on

    def and_damage() -> None:
        go_on()
        for part in world.machine().location.machine(NAME).state().trace.parts():
            assert part.key is not None
            data = bytearray(world.blob.get(part.key))
            data[len(data) // 2] ^= 1
            world.blob.delete([part.key])
            world.blob.put(part.key, bytes(data))

    blob.go_on = and_damage  # type: ignore[method-assign]
    [found] = verify_shards(world.machine().location, [NAME], Depth(deep=True, threads=1), blob)
    assert {str(fault.kind) for fault in found.faults} >= {"part"}


def test_a_shard_that_never_stands_still_has_only_faults_that_two_looks_meet() -> None:
    world = World(policy=NO_INLINE)
    shard = made(world.machine(), rows=12, history="none")

    class Slow(ForwardingBlob):
        """While blobs are listed others write and collect."""

        def list(self, prefix: str) -> Iterator[object]:  # type: ignore[override]
            if not prefix.endswith("/v"):
                for number in range(8):
                    shard.insert([{"id": number, "note": "y"}])
                world.pass_ms(2 * HOUR_MS)
                Collector(world.machine().location).run(NAME)
            return iter(list(super().list(prefix)))

    machine = world.machine()
    machine.location.blob = Slow(machine.location.blob)
    [found] = verify_shards(machine.location, [NAME], Depth())
    assert found.faults == ()


def test_the_state_of_another_shard_is_damage_and_is_not_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Damaged(place)
    rollups = [damaged.state(name).rollups for name in ("eu/orders", "us/orders")]
    first, second = (named[max(named)].key for named in rollups)  # one shard may have made more of them than the other
    damaged.write(first, damaged.read(second))
    assert main(["check", "--quick", "--dir", str(place), "--free", "0"]) == 1
    said = capsys.readouterr().out
    assert "CRITICAL blob-damaged eu/orders" in said
    assert "log-damaged" not in said  # the log is whole: its remedy would not help
    assert "us/orders" not in said


@pytest.mark.parametrize(("lost", "code"), [("everything", 2), ("the log", 3), ("an epoch", 1)])
def test_a_check_makes_and_repairs_nothing(
    place: Path, lost: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if lost == "everything":
        shutil.rmtree(place)
        place.mkdir()
    elif lost == "the log":
        for path in place.glob("consensus.db*"):
            path.unlink()
    else:
        (place / "blob" / "epoch" / "1").unlink()
    before = {path: path.stat().st_size for path in place.rglob("*")}
    assert main(["check", "--deep", "--free", "0", "--dir", str(place)]) == code
    assert {path: path.stat().st_size for path in place.rglob("*")} == before
    assert ("stores-mispaired" in capsys.readouterr().out) == (lost == "an epoch")


def test_ctrl_c_ends_a_look_that_waits_for_its_rate(place: Path) -> None:
    with persist.connect(f"persist://{place}", collect=False) as client:
        note = os.urandom(100_000).hex()
        client.shard("eu/orders").insert([{"id": 1, "note": note}])
    look = Forked(["check", "--deep", "--rate", "1024", "--dir", str(place)], os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        look.wait(1)
    while look.poll() is None:  # Python may lose one that comes while it imports
        look.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            look.wait(1)
    look.communicate()
    assert look.poll() != 0


# --- what is held, and who


def test_all_critical_readers_are_looked_at() -> None:
    world = World()
    machine = world.machine()
    shard = made(machine, history="none")
    names = [f"job-{number}" for number in range(101)]
    for name in names:
        shard.critical_reader(name)
    world.pass_ms(9 * DAY_MS)
    for number in range(3):
        shard.insert([{"id": number, "note": "x"}])
    upper = shard.upper().element
    assert upper is not None
    still = max(names, key=critical_reader_id_of)
    for name in set(names) - {still}:
        shard.critical_reader(name).downgrade_since(upper - 1)
    world.pass_ms(2 * DAY_MS)
    assert {one.id for one in examine(world).findings} >= {"since-held", "cursor-still"}


def test_failures_of_one_kind_of_call_are_added_up() -> None:
    call = ("consensus", "compare_and_set")

    def told(**outcomes: int) -> int:
        return len(list(store_failing(ServerFacts({}, {(*call, name): n for name, n in outcomes.items()}, None))))

    assert told(ok=12, ConsensusUnavailable=4, ConsensusIndeterminate=4) == 1
    assert told(ok=495, ConsensusUnavailable=5) == 0  # exactly one in a hundred
    assert told(ok=494, ConsensusUnavailable=5) == 1


# --- what is given


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["check", "--quick", "--free", "0", "--tokens", str(tmp_path / "pipe"), "--dir", str(place)]) == 2
    assert "no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["--held", "--behind", "--token-age", "--free"])
def test_an_empty_limit_was_taken_as_the_default(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--quick", "--dir", "nowhere", limit, ""]) == 2
    assert f"{limit} is empty: give a value, or leave it out" in capsys.readouterr().err
