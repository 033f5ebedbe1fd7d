"""`persist inspect`: what each command prints of a frozen location, what it takes, and that it writes nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

import persist
from blob import BlobNotWritable
from blob.memory_blobs import MemoryBlob
from consensus import ConsensusNotWritable
from consensus.memory_logs import MemoryConsensus
from persist.core.errors import ReadOnly
from persist.inspect import readonly_location
from persist.inspect.queries import ANSWERS
from persist.inspect.readonly_location import ReadOnlyLocation
from rpc.cli.program import main
from tests.support import forked, json_schemas
from tests.support.inspected import COMMANDS, FixedClock, copied, everything
from tests.support.server import Server
from tests.support.waiting import WAIT_S

GOLDEN = Path(__file__).parent / "inspected"
SCHEMA = pa.schema([("id", pa.int64())])
VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schemas.INSPECT.read_text(encoding="utf-8")))
Ran = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("inspect") / "location")


@pytest.fixture
def ran(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Runs a command on the frozen location: its exit code, and what it printed."""
    monkeypatch.setattr(readonly_location, "SystemClock", FixedClock)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["inspect", *arguments, "--dir", str(directory)])
        told = capsys.readouterr()
        assert told.err == ""
        return code, told.out

    return run


def check(document: Any) -> None:
    VALIDATOR.validate(document)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_of_a_frozen_location_what_it_did(name: str, ran: Ran, pytestconfig: pytest.Config) -> None:
    """`pytest --rewrite` renews the files: read the difference."""
    (code, text), (again, as_json) = ran(*COMMANDS[name]), ran(*COMMANDS[name], "--json")
    assert (code, again) == (0, 0)
    for kind, said in (("txt", text), ("json", as_json)):
        file = GOLDEN / f"{name}.{kind}"
        if pytestconfig.getoption("--rewrite"):
            file.write_text(said, encoding="utf-8")
        assert said == file.read_text(encoding="utf-8")
    for line in as_json.splitlines():
        check(json.loads(line))


def test_every_command_has_a_golden_output() -> None:
    assert {words[0] for words in COMMANDS.values()} == set(ANSWERS)
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)


def test_the_published_schema_is_that_of_the_records() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert json_schemas.INSPECT.read_text(encoding="utf-8") == json_schemas.inspect_schema()


def test_the_schema_refuses_what_is_no_answer(ran: Ran) -> None:
    document = json.loads(ran("parts", "tagged", "--json")[1])
    for wrong in ({"version": 2}, {"rows": [{}]}, {"command": "state"}, {"findings": [{"what": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            check({**document, **wrong})


# --- a State, and the log


def test_a_state_at_each_version_is_the_one_that_the_log_leads_to(ran: Ran) -> None:
    head = json.loads(ran("state", "orders", "--json")[1])["seqno"]
    entries = [json.loads(line) for line in ran("log", "orders", "--json")[1].splitlines()]
    assert [entry["seqno"] for entry in entries] == list(range(1, head + 1))
    for entry in entries:
        found = json.loads(ran("state", "orders", "--at", str(entry["seqno"]), "--json")[1])
        assert (found["seqno"], found["about"]["commit_id"]) == (entry["seqno"], entry["commit_id"])


def test_following_a_log_shows_what_comes_and_ends_at_the_last_version_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "location"
    with persist.connect(f"persist://{place}", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        writing = threading.Timer(0.3, lambda: [shard.insert([{"id": number}]) for number in range(3)])
        writing.start()
        code = main(["inspect", "log", "orders", "--follow", "--to", "4", "--dir", str(place), "--json"])
        writing.join()
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [entry["seqno"] for entry in entries] == [1, 2, 3, 4]


# --- an inspection writes nothing: both stores are the same after it, and the right to read them is enough


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
    assert forked.Module("tests.support.inspected", [str(place)], said=said).wait(WAIT_S) == 0
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
        told = forked.ran("inspect", "state", "orders", "--dir", str(place))
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
