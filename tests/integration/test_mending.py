"""`persist check --repair --from`: what a shard lacks comes back from backups, whatever kind of blob it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from blob import Blob
from blob.memory_blobs import MemoryBlob
from persist import AttributeUpdate, InvalidUsage, Shard, named_key
from persist.copies.backup_creation import BackupRequest, back_up
from persist.copies.backup_store import BLOBS, BackupStore
from persist.copies.blob_repair import LEFT, PUT, REPLACED, RepairedBlob, repair_blobs
from persist.copies.shard_checks import byte_faults
from persist.copies.shard_facts import all_parts
from persist.copies.verify import Depth, verify_shards
from persist.core.blob_keys import is_bundle_key, is_part_key
from persist.core.ids import token_of_key
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import Policy
from rpc.cli.program import main
from tests.support.clocks import HOUR_MS, Machine, World

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
SMALL = Policy(inline_part_bytes_max=0, plain_parts_max=1, rollup_every=4, overlay_flush_at=4)


class Place:
    """A shard that names a blob of every kind, and a backup of it."""

    def __init__(self) -> None:
        self.world = World(policy=SMALL)
        self.machine: Machine = self.world.machine()
        self.kept = MemoryBlob("mem:backups", now_ms=lambda: self.world.true_ms)
        self.shard: Shard = self.machine.client.create_shard("orders", SCHEMA, ["id"], history="forever")
        for number in range(24):
            self.shard.insert([{"id": number, "v": "x" * 20}], token=token_of_key(f"orders {number}"))
            self.world.pass_ms(1_500)
        for first in range(0, 40, 8):
            jobs = range(first, first + 8)
            self.shard.attributes.update([AttributeUpdate.replace(named_key(f"job {job}"), job) for job in jobs])
        writer = self.shard.open_writer()
        staged = [writer.stage([{"id": 5_000 + number, "v": "bundled" * 50}], None) for number in range(9)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))
        self.world.pass_ms(HOUR_MS)
        back_up(self.machine.location, self.store, BackupRequest(at_once=1))
        self.rows = self.read()

    @property
    def blob(self) -> Blob:
        return self.world.blob

    @property
    def store(self) -> BackupStore:
        return BackupStore(self.kept, self.machine.location.clock, self.machine.location.ids)

    def read(self) -> list[dict[str, Any]]:
        return sorted(self.shard.snapshot().to_arrow().to_pylist(), key=lambda row: int(row["id"]))

    def key(self, kind: str) -> str:
        state = self.machine.location.machine("orders").refresh()
        named = {
            "part": [key for key in state.blob_keys() if is_part_key(key)],
            "bundle": [key for key in state.blob_keys() if is_bundle_key(key)],
            "entries": [file.key for file in state.files_of(ENTRIES)],
            "outcomes": [file.key for file in state.files_of(OUTCOMES)],
            "attributes": [chunk.key for chunk in state.attribute_chunks.values()],
        }
        return sorted(named[kind])[0]

    def repair_blobs(self, *, dry_run: bool = False) -> list[RepairedBlob]:
        return list(repair_blobs(self.machine.location, "orders", self.store, dry_run=dry_run))

    def faults(self) -> list[str]:
        location = self.world.machine().location
        state = location.machine("orders").refresh()
        return [fault.key for fault in byte_faults(state, self.blob, location.settings.build)]


@pytest.fixture
def place() -> Place:
    return Place()


def removed(blob: Blob, key: str) -> None:
    blob.delete([key])


def flipped(blob: Blob, key: str) -> None:
    data = bytearray(blob.get(key))
    data[len(data) // 2] ^= 1
    blob.delete([key])
    blob.put(key, bytes(data))


def cut(blob: Blob, key: str) -> None:
    data = blob.get(key)
    blob.delete([key])
    blob.put(key, data[:-1])


KINDS = ["part", "bundle", "entries", "outcomes", "attributes"]


@pytest.mark.parametrize(
    ("kind", "damage"), [*((kind, removed) for kind in KINDS), ("part", flipped), ("bundle", cut), ("entries", flipped)]
)
def test_a_blob_of_any_kind_comes_back(place: Place, kind: str, damage: Callable[[Blob, str], None]) -> None:
    key = place.key(kind)
    damage(place.blob, key)
    assert key in place.faults()
    [found] = verify_shards(place.machine.location, ["orders"], Depth(deep=True))
    assert key in [fault.key for fault in found.faults]
    [would] = place.repair_blobs(dry_run=True)
    assert key in place.faults()  # nothing was done
    [done] = place.repair_blobs()
    assert done.done == would.done == (REPLACED if kind in ("part", "bundle") and damage is not removed else PUT)
    assert place.faults() == []
    [after] = verify_shards(place.world.machine().location, ["orders"], Depth(deep=True))
    assert after.is_sound
    assert place.read() == place.rows
    assert place.repair_blobs() == []


def test_a_bundle_and_a_part_that_it_lists_come_back_in_two_rounds(place: Place) -> None:
    bundle = place.key("bundle")
    state = place.machine.location.machine("orders").refresh()
    inside = [named.part.key for named in all_parts(state, place.blob) if named.within and named.part.key]
    place.blob.delete([bundle, *inside[:2]])
    assert [found.done for found in place.repair_blobs()].count(PUT) >= 2
    assert place.faults() == []
    assert place.read() == place.rows


def test_what_no_backup_has_sound_is_left_and_told(place: Place) -> None:
    part, entries = place.key("part"), place.key("entries")
    place.blob.delete([part, entries])
    flipped(place.kept, BLOBS + part)
    place.kept.delete([BLOBS + entries])
    found = {one.fault.key: one for one in place.repair_blobs()}
    assert {one.done for one in found.values()} == {LEFT}
    assert "damaged as well" in found[part].why
    assert "no backup" in found[entries].why
    assert place.blob.stat(part) is None


@pytest.mark.parametrize(("keep", "damage"), [("orders", removed), ("copy", flipped)])
def test_what_a_clone_borrowed_comes_back(place: Place, keep: str, damage: Callable[[Blob, str], None]) -> None:
    """The backup of a clone has what it borrowed under keys of its own."""
    location = place.machine.location
    place.machine.client.clone("orders", "copy")
    clone = place.machine.client.shard("copy")
    before = clone.snapshot().to_arrow().num_rows
    place.kept = MemoryBlob("mem:other", now_ms=lambda: place.world.true_ms)
    back_up(location, place.store, BackupRequest((keep,), at_once=1))
    key = place.key("part")
    damage(place.blob, key)
    assert [one.done for one in repair_blobs(location, "copy", place.store)] == [PUT if damage is removed else REPLACED]
    assert list(repair_blobs(location, "copy", place.store)) == []
    assert clone.snapshot().to_arrow().num_rows == before
    [found] = verify_shards(location, ["copy"], Depth(deep=True))
    assert found.is_sound


def test_backups_of_another_location_are_refused(place: Place) -> None:
    other = BackupStore(MemoryBlob("mem:other"), place.machine.location.clock, place.machine.location.ids)
    with suppress(InvalidUsage):
        other.open("f" * 32)
    with pytest.raises(InvalidUsage, match="has backups of location"):
        list(repair_blobs(place.machine.location, "orders", other))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import persist

    data, url = tmp_path / "data", f"file://{tmp_path}/backups"
    with persist.connect(f"persist://{data}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert(pa.table({"id": range(20_000), "v": [f"{n * 7919 % 100_003}" for n in range(20_000)]}))
        before = shard.snapshot().to_arrow().num_rows
    assert main(["backup", "create", "--dir", str(data), "--to", url]) == 0
    part = next((data / "blob").rglob("*.parquet"))
    part.unlink()
    assert main(["check", "orders", "--repair", "--dir", str(data), "--from", f"file://{tmp_path}/no"]) in (2, 3)
    assert not (tmp_path / "no").exists()
    capsys.readouterr()
    assert main(["check", "orders", "--repair", "--dir", str(data), "--from", url]) == 1
    assert not part.exists()
    assert main(["check", "orders", "--repair", "--dir", str(data), "--from", url, "--yes"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("done") for line in lines] == ["put_back", None, "put_back", None]
    assert lines[-1] == {"shard": "orders", "put_back": 1, "replaced": 0, "left": 0, "dry_run": False}
    assert main(["check", "orders", "--repair", "--dir", str(data), "--from", url]) == 0
    with persist.connect(f"persist://{data}") as client:
        assert client.shard("orders").snapshot().to_arrow().num_rows == before
