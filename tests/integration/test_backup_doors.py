"""`persist backup`: what it prints, and what it refuses, row by row of the table in docs/backup.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from persist.commit.clocks_and_ids import SystemClock, SystemIds
from persist.copies.backup_store import BLOBS, RUNNING, BackupStore
from rpc.cli.program import main
from tests.support.pages import error_rows
from tests.support.refused import errors_made

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAMES = ["eu/items", "eu/orders", "us/orders"]


@dataclass(frozen=True)
class Place:
    """A location with three shards and one backup of it."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def url(self) -> str:
        return f"file://{self.root}/backups"

    @property
    def kept(self) -> Path:
        return self.root / "backups"

    def manifest(self) -> Path:
        return next(self.kept.glob("backups/*/manifest.json"))


def large(text: str) -> pa.Table:
    """Rows that a State does not hold inline."""
    values = [f"{text} {number * 7919 % 100_003 * 6_007}" for number in range(10_000)]
    return pa.table({"id": list(range(10_000)), "v": values})


def filled(root: Path, names: list[str]) -> None:
    with persist.connect(f"persist://{root}") as client:
        for name in names:
            shard = client.create_shard(name, SCHEMA, ["id"])
            shard.insert(large("x"))
            shard.insert([{"id": 1, "v": "y"}])


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, what was printed, and what was said of errors."""
    capsys.readouterr()
    code = main(["backup", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Place:
    found = Place(tmp_path_factory.mktemp("template"))
    filled(found.data, NAMES)
    assert main(["backup", "create", "--dir", str(found.data), "--to", found.url]) == 0
    return found


@pytest.fixture
def place(template: Place, tmp_path: Path) -> Place:
    shutil.copytree(template.root, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


def test_from_the_first_backup_to_the_last_one_pruned(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{place.data}") as client:
        client.shard("eu/orders").insert(large("later"))
        expected = {name: client.shard(name).snapshot().to_arrow() for name in NAMES}
    code, [made], _ = run(capsys, "create", "--dir", place.data, "--to", place.url)
    assert (code, 0 < made["sent"] < made["bytes"]) == (0, True)
    code, listed, _ = run(capsys, "list", "--from", place.url)
    assert (code, len(listed), listed[1]) == (0, 2, made)
    _, shown, _ = run(capsys, "show", "--from", place.url)
    assert ([line["shard"] for line in shown[:-1]], shown[-1]) == (NAMES, made)
    _, first, _ = run(capsys, "show", "--from", place.url, "--backup", listed[0]["backup"])
    assert first[-1] == listed[0]
    for how in ([], ["--deep"], ["--deep", "--rate", "500MB"]):
        assert run(capsys, "verify", "--from", place.url, *how)[:2] == (0, [{**made, "faults": 0}])
    code, told, _ = run(capsys, "restore", "--from", place.url, "--dir", place.root / "again", "--prefix", "eu/")
    assert (code, [line["shard"] for line in told[:-1]], told[-1]["shards"]) == (0, NAMES[:2], 2)
    code, told, _ = run(capsys, "restore", "--from", place.url, "--dir", place.root / "again", "us/orders")
    assert (code, told[-1]["shards"]) == (0, 1)
    with persist.connect(f"persist://{place.root}/again") as client:
        assert {name: client.shard(name).snapshot().to_arrow() for name in client.shards()} == expected
    assert main(["check", "--deep", "--free", "0", "--dir", str(place.root / "again")]) == 0
    code, [pruned], _ = run(capsys, "prune", "--from", place.url, "--last", 1)
    assert (code, pruned["backups"]) == (0, [listed[0]["backup"]])
    assert run(capsys, "verify", "--from", place.url, "--deep")[0] == 0


def test_faults_have_a_line_each(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((place.kept / "blobs").rglob("*.parquet"))
    files[0].unlink()
    code, told, _ = run(capsys, "verify", "--from", place.url)
    assert (code, told[-1]["faults"], len(told)) == (1, 1, 2)
    assert told[0]["key"] == str(files[0].relative_to(place.kept / "blobs"))


Wrong = Callable[[Place], list[object]]


def create(place: Place, *more: object) -> list[object]:
    return ["create", "--dir", place.data, "--to", place.url, *more]


def restored(place: Place, *more: object) -> list[object]:
    return ["restore", "--from", place.url, "--dir", place.root / "again", *more]


def to_a_location(place: Place) -> list[object]:
    return ["create", "--dir", place.data, "--to", f"file://{place.data}/blob"]


def to_its_own(place: Place) -> list[object]:
    return ["create", "--dir", place.data, "--to", f"file://localhost{place.data}/blob/./copies"]


def to_anothers(place: Place) -> list[object]:
    filled(place.root / "other", ["orders"])
    return ["create", "--dir", place.root / "other", "--to", place.url]


def coarse(place: Place) -> list[object]:
    with persist.connect(f"persist://{place.data}") as client:
        client.shard("eu/orders").configure(mark_every=timedelta(hours=1))
    return create(place)


def empty(place: Place) -> list[object]:
    shutil.rmtree(place.kept)
    persist.connect(f"persist://{place.root}/empty").close()
    return ["create", "--dir", place.root / "empty", "--to", place.url]


def had(place: Place) -> list[object]:
    filled(place.root / "again", ["us/orders"])
    with persist.connect(f"persist://{place.root}/again") as client:
        client.shard("us/orders").drop()
    return restored(place)


def damaged_blob(place: Place) -> list[object]:
    for file in (place.kept / "blobs").rglob("*.parquet"):
        data = bytearray(file.read_bytes())
        data[50] ^= 1
        file.chmod(0o644)
        file.write_bytes(data)
    return restored(place)


def closed(place: Place) -> list[object]:
    at = datetime.now(UTC).isoformat()
    with persist.connect(f"persist://{place.data}") as client:
        client.shard("us/orders").advance_upper(None)
    assert main(["backup", "create", "--dir", str(place.data), "--to", place.url]) == 0
    return restored(place, "us/orders", "--at", at)


def no_backups(place: Place) -> list[object]:
    (place.root / "nothing").mkdir()
    return ["list", "--from", f"file://{place.root}/nothing"]


def manifest_with(place: Place, old: str, new: str) -> list[object]:
    file = place.manifest()
    file.chmod(0o644)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    return ["verify", "--from", place.url]


def beside(place: Place, kind: str, *arguments: object) -> list[object]:
    BackupStore(open_blob(place.url), SystemClock(), SystemIds()).run(kind)
    return list(arguments)


BAD_PACE = "`--at-once` above 64"
WRONG: dict[str, Wrong] = {
    "`--to` is the blob store of a location, or has other content": to_a_location,
    "`--to` is below the blobs of the location": to_its_own,
    "`--to` is in memory": lambda p: ["create", "--dir", p.data, "--to", "mem:copies"],
    "`--to` has backups of another location": to_anothers,
    "`--from` has no backups": no_backups,
    "`--backup` is not an id": lambda p: ["show", "--from", p.url, "--backup", "../x"],
    "names together with `--prefix`": lambda p: create(p, "eu/orders", "--prefix", "eu/"),
    "`--ahead` together with `--at`": lambda p: restored(p, "--ahead", "--at", "2026-01-01T00:00:00Z"),
    BAD_PACE: lambda p: create(p, "--at-once", "65"),
    "shards have no common wall-clock time within a minute": coarse,
    "a location without shards": empty,
    "`backup create`: the shard does not exist": lambda p: create(p, "eu/nothing"),
    "`backup restore`: the backup does not have the shard": lambda p: restored(p, "eu/nothing"),
    "`backup restore`: the name exists or existed": had,
    "`--as` with several shards": lambda p: restored(p, "--as", "one"),
    "`--at` later than the latest backup": lambda p: restored(p, "--at", "2199-01-01T00:00:00Z"),
    "`--at` is not a time with a zone": lambda p: restored(p, "--at", "2026-01-01T00:00:00"),
    "`backup restore --at`: before the history in the backup, or an erasure was pending": lambda p: restored(
        p, "--at", "2020-01-01T00:00:00Z"
    ),
    "`backup restore --at`: the shard is closed": closed,
    "`backup restore`: a blob or the State is missing or damaged in the backup": damaged_blob,
    "`backup verify`: the manifest of the latest backup is damaged": lambda p: manifest_with(
        p, '"epoch":1', '"epoch":2'
    ),
    "`backup verify`: the latest backup is of a later version": lambda p: manifest_with(p, '"v":1', '"v":2'),
    "`backup prune`: a manifest is damaged, and `--damaged` is not given": lambda p: [
        "prune",
        *manifest_with(p, '"epoch":1', '"epoch":2')[1:],
        "--last",
        "1",
    ],
    "`prune --last 0`": lambda p: ["prune", "--from", p.url, "--last", "0"],
    "`backup prune`: a backup is being made; likewise `backup create` during pruning": lambda p: beside(
        p, RUNNING, "prune", "--from", p.url, "--last", "1"
    ),
}


DOCUMENTED = error_rows("docs/backup.md", "backup ")


@pytest.mark.parametrize(
    ("command", "created"),
    [
        ("restore nosuch --from {kept} --dir {new}", "new"),
        ("restore eu/items --from {kept} --dir {new} --at 2020-01-01T00:00:00Z --backup {id}", "new"),
        ("restore --from {kept} --dir {new} --as two", "new"),
        ("import-state {state} --as copy --dir {new} --from file://{root}/none", "new"),
        ("import-state {state} --as a//b --dir {new} --from {kept}", "new"),
        ("create nosuch --dir {data} --to file://{new}", "new"),
        ("create --prefix no --dir {data} --to file://{new}", "new"),
        ("recover --dry-run --blob file://{data}/blob --consensus sqlite:///{new}.db", "new.db"),
    ],
)
def test_a_refusal_or_a_dry_run_creates_no_store(
    place: Place, capsys: pytest.CaptureFixture[str], command: str, created: str
) -> None:
    """`restore` of a shard that the backup lacks left a whole, empty location."""
    state = place.root / "state.json"
    assert run(capsys, "export-state", "eu/items", "--dir", place.data, "-o", state)[0] == 0
    places = {"kept": place.url, "new": place.root / "new", "root": place.root, "data": place.data, "state": state}
    words = command.format(**places, id=place.manifest().parent.name).split()
    assert run(capsys, *words)[0] == 1
    assert not (place.root / created).exists()


def test_a_second_restore_or_import_says_that_it_left_the_shard(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that it had restored a shard whose settings and columns had changed since."""
    state, new = place.root / "state.json", place.root / "new"
    assert run(capsys, "export-state", "eu/items", "--dir", place.data, "-o", state)[0] == 0
    for words in (
        ("restore", "eu/items", "--as", "copy", "--from", place.url, "--dir", new),
        ("import-state", state, "--as", "imported", "--from", f"file://{place.data}/blob", "--dir", new),
    ):
        assert run(capsys, *words)[1][0]["left"] is False
        with persist.connect(f"persist://{new}") as client:
            client.shard(words[words.index("--as") + 1]).tag("mine", at=0)
        assert run(capsys, *words)[1][0]["left"] is True


def test_every_row_of_the_page_has_its_test() -> None:
    assert list(DOCUMENTED) == [row for row in WRONG if row in DOCUMENTED]


@pytest.mark.parametrize(("row", "wrong"), WRONG.items())
def test_what_is_wrong_is_refused_and_nothing_is_written(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, row: str, wrong: Wrong
) -> None:
    arguments = wrong(place)
    before = kept(place)
    with errors_made(monkeypatch) as made:
        code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (1, [], 1), err
    assert {error.kind for error in made if error.message in err} == {DOCUMENTED.get(row, "invalid_usage")}, err
    assert kept(place) == before
    assert not (place.data / "blob" / "copies").exists()
    if (place.root / "again").exists():
        with persist.connect(f"persist://{place.root}/again") as client:
            assert "eu/orders" not in client.shards()


def kept(place: Place) -> set[str]:
    """What is in the store of the backups, but for who says that it runs; manifests only of what may be sent."""
    found = {str(file.relative_to(place.kept)) for file in place.kept.rglob("*") if file.is_file()}
    return {name for name in found if name.startswith(BLOBS) or name.endswith("manifest.json")}
