"""An inspection writes nothing: both stores are the same after it, and the right to read them is enough."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob import BlobNotWritable
from blob.memory_blobs import MemoryBlob
from consensus import ConsensusNotWritable
from consensus.memory_logs import MemoryConsensus
from persist.core.errors import ReadOnly
from persist.inspect.readonly_location import ReadOnlyLocation
from rpc.cli.program import main
from tests.support.forked import Module, ran
from tests.support.inspected import COMMANDS, copied, everything
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that another user can reach."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(made)


def test_no_command_changes_a_directory(tmp_path: Path) -> None:
    place = copied(tmp_path / "location")
    before = everything(place)
    for name, words in COMMANDS.items():
        assert main(["inspect", *words, "--dir", str(place)]) == 0, name
        assert everything(place) == before, name


def test_credentials_that_may_only_read_are_enough(open_to_all: Path) -> None:
    """Another user, files and directories that may not be written: as on a file system that is read-only."""
    place = copied(open_to_all / "location")
    for path in [*place.rglob("*"), place]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = everything(place)
    said = open_to_all / "said"
    said.touch()
    assert Module("tests.support.inspected", [str(place)], said=said).wait(WAIT_S) == 0
    assert said.read_text() == f"codes {[0] * len(COMMANDS)}"
    assert everything(place) == before


def test_beside_a_process_that_writes_nothing_is_changed(tmp_path: Path) -> None:
    """Its write-ahead log is read as well. The index of that is memory that its own connections share."""
    place = tmp_path / "location"
    with Server(place, environment={"PERSIST_PUBLISH_EVERY": "0"}) as server, persist.connect(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(5):
            shard.insert([{"id": number}])
        before = everything(place, but=("-shm",))
        assert (place / "consensus.db-shm").exists()
        assert len(before["consensus.db-wal"][2]) > 0
        told = ran("inspect", "state", "orders", "--dir", str(place))
        assert told.returncode == 0
        assert "upper: 5" in told.stdout
        assert everything(place, but=("-shm",)) == before
        shard.insert([{"id": 5}])


def test_after_a_process_that_was_killed_nothing_is_changed(tmp_path: Path) -> None:
    """What it left beside its database is read, not taken in."""
    place, killed = tmp_path / "location", tmp_path / "killed"
    with persist.connect(f"persist://{place}", collect=False) as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1}])
        shutil.copytree(place, killed)
    before = everything(killed)
    assert {"consensus.db-wal", "consensus.db-shm"} <= before.keys()
    for words in (["usage"], ["parts", "orders"]):
        assert main(["inspect", *words, "--dir", str(killed)]) == 0
    assert everything(killed) == before


def test_the_stores_of_a_look_refuse_every_write() -> None:
    look = ReadOnlyLocation(MemoryBlob(), MemoryConsensus())
    for write in (lambda: look.blob.put("a", b""), lambda: look.blob.delete(["a"]), lambda: look.blob.abandon([])):
        with pytest.raises(BlobNotWritable, match="was opened read-only"):
            write()
    for change in (
        lambda: look.consensus.compare_and_set("a", 1, b""),
        lambda: look.consensus.begin("a", 1, b""),
        lambda: look.consensus.truncate("a", 1),
        lambda: look.consensus.scrub(),
    ):
        with pytest.raises(ConsensusNotWritable, match="was opened read-only"):
            change()
    assert look.blob.presign_put("a", 1) is None
    assert look.consensus.subscribe(print) is None
    with pytest.raises(ReadOnly):
        look.versions.identity.check_writable()
    look.blob.check()
    look.consensus.check()
