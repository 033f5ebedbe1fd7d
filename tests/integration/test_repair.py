"""A shard that names a part which cannot be read: the rest stays readable, and `persist check --repair` repairs it."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob import Blob
from blob.metrics import ForwardingBlob
from persist import Corruption, LocationSettings, PersistError
from persist.copies.shard_checks import byte_faults
from persist.core.batch import Part
from persist.core.blob_keys import is_bundle_key
from persist.core.state import Policy
from rpc.cli.program import main
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
KEPT = LocationSettings(policy=Policy(inline_part_bytes_max=0))


class Place:
    """A directory with the shard `orders`: three inserts, each a blob of its own keys and time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.copies = root.with_name("copies")
        self.copies.mkdir()
        with self.opened() as client:
            shard = client.create_shard("orders", SCHEMA, ["id"])
            for number in range(3):
                shard.insert([{"id": 10 * number + n, "v": "x"} for n in range(5)])
        for part in self.parts():
            (self.copies / part.id).write_bytes(self.file(part).read_bytes())

    def opened(self) -> persist.Client:
        return persist.connect(f"persist://{self.root}", location=KEPT)

    def parts(self) -> list[Part]:
        with self.opened() as client:
            return list(client.transport.location.machine("orders").refresh().trace.parts())

    def file(self, part: Part) -> Path:
        return self.root / "blob" / (part.key or "")

    def ids(self, as_of: int | None = None) -> list[int]:
        with self.opened() as client:
            return sorted(client.shard("orders").snapshot(as_of).to_arrow().column("id").to_pylist())

    def frontiers(self) -> tuple[Any, Any]:
        with self.opened() as client:
            shard = client.shard("orders")
            return shard.since(), shard.upper()

    def check(self) -> int:
        return main(["check", "orders", "--deep", "--free", "0", "--json", "--dir", str(self.root)])

    def repair(self, *arguments: str) -> int:
        return main(["check", "orders", "--repair", "--dir", str(self.root), *arguments])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "data")


class Reads(ForwardingBlob):
    """Counts reads of bundles."""

    def __init__(self, inner: Blob) -> None:
        super().__init__(inner)
        self.keys: Counter[str | None] = Counter()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if is_bundle_key(key):
            self.keys[key] += 1
        return super().get_range(key, start, length)


def removed(file: Path) -> None:
    file.unlink()


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = [removed, flipped, cut]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_touch_the_bad_part_stays_readable(place: Place, damage: Any) -> None:
    bad = place.parts()[1]
    damage(place.file(bad))
    assert place.ids(0) == [0, 1, 2, 3, 4]
    with pytest.raises(Corruption) as told:
        place.ids()
    assert "orders" in told.value.message
    assert bad.key is not None
    assert bad.key in told.value.message
    with place.opened() as client:
        read = []
        with client.shard("orders").snapshot(2, num_splits=12) as snapshot:
            for split in snapshot.splits:
                with suppress(PersistError):
                    read += [row for piece in split.read(client.transport) for row in piece.column("id").to_pylist()]
        assert {0, 1, 2, 3, 21, 22, 23, 24} <= set(read)


def test_a_part_is_taken_out_only_when_that_is_meant(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    bad, before = place.parts()[1], place.frontiers()
    removed(place.file(bad))
    assert place.repair("--excise", bad.id) == 1
    assert "would remove 5 rows" in capsys.readouterr().out
    assert bad in place.parts()
    assert place.repair("--excise", bad.id, "--yes") == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["taken_out"]["id"] == bad.id
    assert receipt["taken_out"]["checksum"] == bad.checksum
    assert place.ids() == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]
    assert place.frontiers() == before
    assert place.check() == 0
    assert place.repair("--excise", bad.id, "--yes") == 2, "there is no such part any more"
    assert main(["maintain", "run", "--no-gc", "--once", "--dir", str(place.root)]) == 0
    assert place.ids() == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]


def test_a_copy_takes_the_place_of_a_part(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    bad, other = place.parts()[1], place.parts()[0]
    flipped(place.file(bad))
    assert place.repair("--replace", bad.id, str(place.copies / other.id), "--yes") == 2
    assert "is not a copy of part" in capsys.readouterr().err
    assert place.repair("--replace", bad.id, str(place.copies / bad.id)) == 1
    with pytest.raises(Corruption):
        place.ids()
    assert place.repair("--replace", bad.id, str(place.copies / bad.id), "--yes") == 0
    assert place.ids() == [10 * number + n for number in range(3) for n in range(5)]
    assert place.ids(1) == [10 * number + n for number in range(2) for n in range(5)]
    assert place.check() == 0


def test_each_bundle_is_read_once(tmp_path: Path) -> None:
    """What becomes of parts in bundles is in `tests/unit/compactor/test_bundles.py`."""
    bundling = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=1))
    with persist.connect(f"persist://{tmp_path}", location=bundling) as client:
        writer = client.create_shard("orders", SCHEMA, ["id"]).open_writer()
        staged = [writer.stage([{"id": n, "v": "x"}], None) for n in range(6)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))
        machine = client.transport.location.machine("orders")
        wait_until(lambda: all(part.bundle for part in machine.refresh().trace.parts()), "the parts are bundled")
        reads = Reads(client.transport.location.blob)
        assert list(byte_faults(machine.state(), reads)) == []
        assert reads.keys == Counter(part.key for part in machine.state().trace.parts())
