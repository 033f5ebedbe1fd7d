"""A second `persist import` of a file: it writes what was undone as a whole, and never what was perhaps deleted."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.cli.import_job import INSERT, OVERWRITE, UPSERT, after
from persist.client.commit_info import HistoryEntry
from persist.client.shard import Shard
from persist.client.timestamps import to_datetime
from tests.support.examples import size, thinned
from tests.support.typed import KINDS, Place, place_of

DAY1, DAY2 = "id,v\n1,a\n2,b\n", "id,v\n3,c\n4,d\n"
MODES = {INSERT: (), UPSERT: ("--upsert",), OVERWRITE: ("--overwrite",)}


@pytest.fixture(scope="module", params=thinned(KINDS, 2))
def one_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def place(one_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    Path("day1.csv").write_text(DAY1)
    Path("day2.csv").write_text(DAY2)
    yield one_place
    one_place.clear()


@pytest.fixture
def load(place: Place, capsys: pytest.CaptureFixture[str]) -> Any:
    """Imports a file by a command that has to succeed; what it prints."""

    def run(file: str, *words: str) -> dict[str, Any]:
        found = place.type(capsys, "import", "t", file, *words)
        assert (found.code, found.err) == (0, ""), found.err
        return dict(json.loads(found.out))

    return run


@pytest.fixture
def shard(place: Place, load: Any) -> Iterator[Shard]:
    """Day 1 at time 0."""
    load("day1.csv", "--create", "--key", "id")
    with place.client() as client:
        yield client.shard("t")


def ids(shard: Shard) -> list[int]:
    return sorted(row["id"] for row in shard.snapshot().to_arrow().to_pylist() for _ in range(row["__diff"]))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_file_after_its_columns_changed_is_the_same_import(load: Any, shard: Shard, mode: str) -> None:
    """Its rows are others now, with the default of a column that came; what is new behind it is loaded."""
    load("day2.csv", *MODES[mode])
    shard.refresh_schema()
    shard.add_column("c", pa.string(), default="EUR")
    again = load("day2.csv", *MODES[mode])
    assert (again["done"], again["rows"], again["time"]) == ("already imported", 2, 1)
    assert load("day1.csv")["done"] == ("imported" if mode == OVERWRITE else "already imported")
    Path("day3.csv").write_text("id,v\n5,e\n")
    assert load("day3.csv")["done"] == "imported"


# --- undone as a whole


def test_all_files_of_one_commit_are_loaded_again(place: Place, load: Any, shard: Shard) -> None:
    words = ("day2.csv", "day1.csv", "--one-commit", "--upsert")
    shard.delete(keys=[1])
    load(*words)
    shard.restore(1)
    assert load(*words)["done"] == "imported"
    assert load(*words)["done"] == "already imported"
    assert ids(shard) == [1, 2, 3, 4]


def test_what_changed_nothing_is_looked_at_as_well(load: Any, shard: Shard) -> None:
    assert load("day1.csv", "--upsert")["done"] == "nothing to do"
    shard.overwrite([{"id": 9, "v": "z"}])
    assert load("day1.csv", "--upsert")["time"] == 2
    assert [load("day1.csv", "--upsert")["done"], ids(shard)] == ["already imported", [1, 2, 9]]


def test_a_token_of_ones_own_is_loaded_again_too(load: Any, shard: Shard) -> None:
    load("day2.csv", "--token", "monday")
    shard.restore(0)
    assert load("day2.csv", "--token", "monday")["done"] == "imported"
    assert load("day2.csv", "--token", "monday")["done"] == "already imported"
    assert ids(shard) == [1, 2, 3, 4]


def test_what_removed_the_rows_is_named_however_much_was_written_since(load: Any, shard: Shard) -> None:
    """Only the first 20 commits were named, all of them upserts."""
    assert load("day2.csv")["time"] == 1
    shard.delete(where="id >= 3")
    for number in range(25):
        shard.upsert([{"id": 9, "v": str(number)}])
    removed = load("day2.csv")["removed_by"]
    assert [entry["operation"] for entry in removed] == ["delete", *["upsert"] * 20]
    assert [removed[0]["time"], removed[-1]["time"]] == [2, 27]


# --- an overwrite by the same file


@pytest.mark.parametrize("mode", [INSERT, UPSERT])
def test_an_overwrite_by_the_same_file_is_an_import_of_it(load: Any, shard: Shard, mode: str) -> None:
    """`import`, `import --overwrite` and `import` of one file left its rows twice."""
    assert load("day2.csv", *MODES[mode])["time"] == 1
    load("day2.csv", "--overwrite")
    shard.restore(2)
    for words in ((), ("--again",)):
        found = load("day2.csv", *MODES[mode], *words)
        assert (found["done"], found["time"], ids(shard)) == ("already imported", 2, [3, 4])
    shard.delete(keys=[3])
    assert load("day2.csv", *MODES[mode])["removed_by"] == [{"time": 3, "operation": "delete"}]
    shard.restore(0)
    for _ in range(2):
        assert [load("day2.csv", *MODES[mode])["time"], ids(shard)] == [5, [1, 2, 3, 4]]


# --- perhaps in part


@pytest.mark.parametrize("mode", [INSERT, UPSERT])
def test_rows_that_were_deleted_on_purpose_come_back_only_by_again(load: Any, shard: Shard, mode: str) -> None:
    load("day2.csv", *MODES[mode])
    shard.delete(keys=[3])
    shard.update({"v": "x"}, "id = 4")
    for _ in range(2):
        found = load("day2.csv", *MODES[mode])
        assert (found["done"], found["time"]) == ("already imported", 1)
        assert found["removed_by"] == [{"time": 2, "operation": "delete"}, {"time": 3, "operation": "update"}]
    assert ids(shard) == [1, 2, 4]
    for _ in range(2):
        assert load("day2.csv", *MODES[mode], "--again")["time"] == 4
        assert ids(shard) == ([1, 2, 3, 4, 4] if mode == INSERT else [1, 2, 3, 4]), "loaded once"
    assert load("day2.csv", *MODES[mode])["time"] == 4, "the second load is known without --again"


def test_what_is_all_there_is_not_loaded_by_again(load: Any, shard: Shard) -> None:
    load("day2.csv")
    shard.insert([{"id": 5, "v": "e"}])
    assert "removed_by" not in load("day2.csv", "--again")
    assert ids(shard) == [1, 2, 3, 4, 5]


def test_a_retraction_may_have_removed_a_row(load: Any, shard: Shard) -> None:
    load("day2.csv")
    shard.insert([{"id": 3, "v": "c", "__diff": -1}])
    assert load("day2.csv")["removed_by"] == [{"time": 2, "operation": "insert"}]


def test_a_restore_of_the_whole_table_undoes_a_deletion_too(load: Any, shard: Shard) -> None:
    load("day2.csv")
    shard.delete(keys=[3])
    shard.restore(1)
    assert "removed_by" not in load("day2.csv")
    shard.restore(0)
    assert [load("day2.csv")["done"], ids(shard)] == ["imported", [1, 2, 3, 4]]


def test_where_the_history_does_not_reach_back_only_again_loads(load: Any, shard: Shard) -> None:
    load("day2.csv")
    shard.configure(history="none")
    for _ in range(300):  # of these a shard that keeps no history has the newest entries
        shard.insert([{"id": 9, "v": "z"}])
    told = load("day2.csv")
    assert (told["done"], told["time"], told["removed_by"]) == ("already imported", 1, None)
    assert load("day2.csv", "--again")["time"] == 302
    for words in ((), ("--again",)):
        told = load("day2.csv", *words)
        assert (told["done"], told["time"], "removed_by" in told) == ("already imported", 302, False)
    assert Counter(ids(shard))[3] == 2


# --- each against a model


@pytest.mark.parametrize("seed", thinned(range(24), 12))
def test_after_any_four_operations_an_import_leaves_its_rows_once(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imports and overwrites by one file, and what undoes them, with times by chance."""
    chance = random.Random(seed)
    place = Place(("--dir", f"{tmp_path}/data"), f"persist://{tmp_path}/data")
    file = tmp_path / "file.csv"
    file.write_text(DAY2)

    def load(name: str, *words: str) -> dict[str, Any]:
        found = place.type(capsys, "import", name, str(file), *words)
        assert found.code == 0, found.err
        return dict(json.loads(found.out))

    kinds = ("import", "import --overwrite", "restore", "truncate", "overwrite")
    sequences = [one for one in product(kinds, repeat=4) if any(kind.startswith("import") for kind in one)]
    with persist.connect(place.url) as client:
        for number, sequence in enumerate(chance.sample(sequences, size(9, 12))):
            name, done = f"t{number}", []
            shard = client.create_shard(name, pa.schema([("id", pa.int64()), ("v", pa.string())]), ["id"])
            shard.insert([{"id": 1, "v": "a"}])
            for kind in (*sequence, "import"):
                latest = (shard.upper().element or 1) - 1
                time = chance.randint(0, latest)
                done.append((kind, time))
                if kind == "restore":
                    shard.restore(time)
                elif kind == "truncate":
                    shard.truncate(time + 1)
                elif kind == "overwrite":
                    shard.overwrite([{"id": 9, "v": "z"}])
                else:
                    told = load(name, *kind.split()[1:])
                    there = Counter(ids(shard))
                    assert there[3] == there[4] <= 1, (done, told)
                    assert there[3] == 1 or told["removed_by"], (done, told)


def entry(operation: str, time: int, *, point: int | None = None, **more: Any) -> HistoryEntry:
    said = {"rows": 1, "size": 1, "retractions": 0, "purpose": None, "who": None, "info": None, **more}
    return HistoryEntry(time, 0, to_datetime(0), operation, time, time + 1, point=point, **said)


def test_what_a_policy_takes_may_be_a_part_and_by_hand_it_is_the_whole() -> None:
    by_hand, by_policy = entry("truncate", 9, point=5), entry("truncate", 9, point=5, info={"retention": ["age"]})
    assert after(INSERT, 3, [by_hand]).undone_by == by_hand
    assert after(INSERT, 3, [by_policy]).removed_by == (by_policy,)
    assert after(INSERT, 5, [by_hand]).removed_by == (by_hand,), "equal rows may have been there before"


def test_a_restore_to_a_time_that_is_not_recorded_may_have_removed_rows() -> None:
    unknown = entry("restore", 9)
    assert after(INSERT, 3, [unknown]).removed_by == (unknown,)


def test_a_truncation_that_is_pending_may_be_withdrawn() -> None:
    pending = replace(entry("drop_before", 9, point=9, rows=0), upper=9)
    assert after(INSERT, 3, [pending]).is_whole
    assert after(INSERT, 3, [pending, entry("drop_before", 9, point=9, rows=0)]).undone_by is not None


def test_what_writes_no_row_removes_none() -> None:
    for operation in ("update_attributes", "advance_upper", "evolve_schema", "restore", "tag"):
        assert after(INSERT, 3, [entry(operation, 9, rows=0)]).is_whole
