"""The State of a shard as a file: a round trip is the identity, and what was changed is refused."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist import AttributeUpdate, Shard, named_key
from persist.copies.state_file import export_state, import_state, read_file, to_json_value
from persist.copies.verify import Depth, verify_shards
from persist.core import errors
from persist.core.record import replace
from persist.core.state import Policy, State
from rpc.cli.program import main
from tests.support.clocks import Machine, World
from tests.support.examples import thinned
from tests.support.pages import error_rows
from tests.support.refused import errors_made

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
SMALL = Policy(inline_part_bytes_max=200, plain_parts_max=1, rollup_every=8)


@pytest.fixture
def world() -> World:
    return World(policy=SMALL)


def lived(machine: Machine, name: str, seed: int) -> Shard:
    """A shard with some of all that a shard can have."""
    chance = random.Random(seed)
    shard = machine.client.create_shard(name, SCHEMA, ["id"], history="forever")
    for number in range(chance.randint(3, 25)):
        rows = [
            {"id": chance.randrange(1000), "v": "x" * chance.choice((1, 50, 400))} for _ in range(chance.randint(1, 6))
        ]
        shard.insert(rows, info={"n": number})
        machine.location.clock.sleep(chance.choice((0.1, 1.5)))
        if chance.random() < 0.2:
            shard.tag(f"t{number}")
        if chance.random() < 0.2:
            shard.attributes.update([AttributeUpdate.replace(named_key(f"job {number}"), number)])
    writer = shard.open_writer()
    staged = [writer.stage([{"id": 5_000 + number, "v": "bundled" * 50}], None) for number in range(6)]
    writer.commit_insert(tuple(run for runs in staged for run in runs))
    if chance.random() < 0.5:
        shard.truncate(2)
    if chance.random() < 0.3:
        shard.critical_reader("billing")
    return shard


def rows(shard: Shard) -> list[Any]:
    times: Any = range(shard.since().element, shard.upper().element)  # type: ignore[arg-type]
    return [sorted(map(repr, shard.snapshot(as_of).to_arrow().to_pylist())) for as_of in times]


def plain(state: State) -> str:
    """The State without what an import changes: its name, the keys of blobs, and sums of bundles, which have keys."""
    told = to_json_value(replace(state, name="", rollups={}, seqno=0, commit_id="", incarnation=0))
    text = re.sub(r"s[0-9a-f]{32}", "s", json.dumps(told))
    return re.sub(r'"checksum": \d+, |"size": \d+', "", text)


def text_of(machine: Machine, name: str) -> bytes:
    return json.dumps(export_state(machine.location, name)).encode()


@pytest.mark.parametrize("seed", thinned(range(12), 4))
def test_a_round_trip_is_the_identity(machine: Machine, seed: int) -> None:
    shard = lived(machine, "orders", seed)
    file = read_file(text_of(machine, "orders"))
    told = import_state(machine.location, file, "copy/of", machine.location.blob, keeps_policies=True)
    copy = machine.client.shard("copy/of")
    assert told.upper == shard.upper().to_json()
    assert rows(copy) == rows(shard)
    assert (copy.tags(), copy.settings, copy.schema.arrow) == (shard.tags(), shard.settings, shard.schema.arrow)
    before, after = (machine.location.machine(name).refresh() for name in ("orders", "copy/of"))
    assert plain(after) == plain(file.state)
    assert str(before.shard_id) not in json.dumps(to_json_value(replace(after, entries={})))
    shard.drop(force=True)
    [verdict] = verify_shards(machine.location, iter(["copy/of"]), Depth(deep=True))
    assert verdict.is_sound
    again = read_file(text_of(machine, "copy/of"))
    assert plain(again.state) == plain(replace(file.state, entries=again.state.entries))


def test_an_export_writes_a_lease_and_nothing_else(world: World, machine: Machine) -> None:
    lived(machine, "orders", 1)
    before = {stat.key for stat in world.blob.list("s") if ".rollup" not in stat.key}
    state = machine.location.machine("orders").refresh()
    text_of(machine, "orders")
    after = machine.location.machine("orders").refresh()
    assert after.seqno <= state.seqno + 3
    assert (after.trace, after.leased_readers, after.upper) == (state.trace, {}, state.upper)
    assert {stat.key for stat in world.blob.list("s") if ".rollup" not in stat.key} == before


def test_a_clone_is_exported_with_what_it_has_borrowed(machine: Machine) -> None:
    shard = lived(machine, "orders", 3)
    expected = rows(shard)
    machine.client.clone("orders", "test")
    file = read_file(text_of(machine, "test"))
    assert (file.state.borrowed, file.state.loans) == ({}, {})
    import_state(machine.location, file, "own", machine.location.blob)
    assert rows(machine.client.shard("own")) == expected


def test_an_import_that_was_interrupted_goes_on(world: World, machine: Machine) -> None:
    lived(machine, "orders", 5)
    file = read_file(text_of(machine, "orders"))
    put, count = world.blob.put, [0]
    for fails_at in (1, 2):
        count[0] = 0

        def failing(key: str, data: bytes, fails_at: int = fails_at) -> None:
            count[0] += 1
            if count[0] == fails_at:
                raise errors.Unavailable("away")
            put(key, data)

        world.blob.put = failing  # type: ignore[method-assign]
        with pytest.raises(errors.PersistError):
            import_state(machine.location, file, "copy", machine.location.blob)
        world.blob.put = put  # type: ignore[method-assign]
        assert machine.client.shards() == ["orders"]
    first = import_state(machine.location, file, "copy", machine.location.blob)
    again = import_state(machine.location, file, "copy", machine.location.blob)
    assert (again.upper, first.left, again.left) == (first.upper, False, True)
    assert rows(machine.client.shard("copy")) == rows(machine.client.shard("orders"))


# --- the command, and what is wrong


class Place:
    """A directory with a shard, and its file."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.blobs = f"file://{self.data}/blob"
        with persist.connect(f"persist://{self.data}") as client:
            shard = client.create_shard("orders", SCHEMA, ["id"])
            shard.insert(pa.table({"id": range(20_000), "v": [f"{n * 7919 % 100_003}" for n in range(20_000)]}))
            client.create_shard("dropped", SCHEMA, ["id"]).drop()
        self.file = root / "orders.json"
        assert main(["backup", "export-state", "orders", "--dir", str(self.data), "-o", str(self.file)]) == 0

    def changed(self, change: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> str:
        told = json.loads(self.file.read_text())
        change(told)
        if sealed:
            del told["crc32"]
            told["crc32"] = zlib.crc32(json.dumps(told, separators=(",", ":"), sort_keys=True).encode())
        other = self.root / "changed.json"
        other.write_text(json.dumps(told))
        return str(other)

    def back(self, file: object, *more: str, name: str = "copy") -> list[str]:
        return ["backup", "import-state", str(file), "--as", name, "--dir", str(self.data), *more]


def emptied(place: Place) -> str:
    (place.root / "empty").mkdir(exist_ok=True)
    return f"file://{place.root}/empty"


def other_file(place: Place) -> str:
    return place.changed(lambda told: told.update(persist="x"))


MODIFIED = "`import-state`: the file is damaged or was modified"
LATER = "`import-state`: the file is of a later version or format version"
WRONG: dict[str, Callable[[Place], list[str]]] = {
    "`export-state`: the shard does not exist, or was dropped": lambda p: [
        "backup", "export-state", "dropped", "--dir", str(p.data),
    ],
    "the file cannot be read, or is not an export": lambda p: p.back(p.root / "nothing.json"),
    MODIFIED: lambda p: p.back(
        p.changed(lambda told: told["state"].update(floor=7))
    ),
    LATER: lambda p: p.back(p.changed(lambda told: told.update(version=2))),
    "`--as` with an invalid name": lambda p: p.back(p.file, name="no name"),
    "`import-state`: the name exists or existed": lambda p: p.back(p.file, name="orders"),
    "`import-state`: a blob is missing or damaged": lambda p: p.back(
        p.file, "--from", emptied(p)
    ),
    "the directory of `--from` does not exist": lambda p: p.back(p.file, "--from", f"file://{p.root}/no"),
}  # fmt: skip
MORE: list[tuple[str, Callable[[Place], list[str]]]] = [
    ("`export-state`: the shard does not exist, or was dropped", lambda p: [
        "backup", "export-state", "no", "--dir", str(p.data),
    ]),
    ("the file cannot be read, or is not an export", lambda p: p.back(other_file(p))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(name="x"), sealed=False))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(more=1)))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(bytes="AAAA")))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t["blobs"].pop()))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(bytes="ü")))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(format_version="5")))),
    (MODIFIED, lambda p: p.back(p.changed(lambda t: t.update(blobs=[["a", "1", 2]])))),
    (LATER, lambda p: p.back(p.changed(lambda t: t.update(format_version=99)))),
    ("`import-state`: the name exists or existed", lambda p: p.back(p.file, name="dropped")),
]  # fmt: skip


DOCUMENTED = error_rows("docs/backup.md", "export-state", "import-state")


def test_every_row_of_the_page_has_its_test() -> None:
    assert list(DOCUMENTED) == [row for row in WRONG if row in DOCUMENTED]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize(("row", "wrong"), [*WRONG.items(), *MORE])
def test_what_is_wrong_is_refused_and_no_shard_is_made(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, row: str, wrong: Any
) -> None:
    arguments = wrong(place)
    with errors_made(monkeypatch) as made:
        assert main(arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("persist backup: ")
    assert "Traceback" not in told
    assert made[-1].kind == DOCUMENTED.get(row, "invalid_usage"), told
    with persist.connect(f"persist://{place.data}") as client:
        assert client.shards() == ["orders"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path)
    arguments = ["backup", "import-state", str(place.file), "--as", "orders", "--dir", str(tmp_path / "new")]
    assert main([*arguments, "--from", place.blobs]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["shard"], told["upper"], told["critical_readers"]) == ("orders", [1], [])
    with persist.connect(f"persist://{tmp_path / 'new'}") as client:
        assert client.shard("orders").snapshot().to_arrow().num_rows == 20_000
    assert main(["backup", "export-state", "orders", "--dir", str(place.data)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "orders"
