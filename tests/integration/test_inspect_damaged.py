"""`persist inspect` of what is damaged or missing: it is told in its place, the rest is shown, and it exits with 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.copies.shard_facts import newest
from persist.core.batch import Part
from persist.inspect.part_listing import PartRow
from persist.inspect.queries import Query, answer
from persist.inspect.readonly_location import ReadOnlyLocation
from rpc.cli.program import main
from tests.support.clones import Shards
from tests.support.inspected import PART, ROLLUP, copied, everything, flip, spoil_entry

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return copied(tmp_path / "location")


class Told:
    """What a command told: its exit code, its document, its sentences of what is wrong."""

    def __init__(self, code: int, out: str, error: str) -> None:
        self.code = code
        self.error = error
        self.lines = [json.loads(line) for line in out.splitlines()]
        self.document: dict[str, Any] = self.lines[0] if self.lines else {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["rows"]
        return found

    @property
    def findings(self) -> list[str]:
        return [finding["what"] for finding in self.document["findings"]]


@pytest.fixture
def ask(place: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def asked(*words: str) -> Told:
        before = everything(place)
        code = main(["inspect", *words, "--dir", str(place), "--json"])
        assert everything(place) == before, "nothing is written"
        told = capsys.readouterr()
        return Told(code, told.out, told.err)

    return asked


# --- rollups and the log


@pytest.mark.parametrize("damage", ["gone", "flipped", "cut"])
def test_without_its_newest_rollup_a_state_is_made_of_an_older_one(damage: str, place: Path, ask: Any) -> None:
    whole = ask("state", "orders")
    rollup = place / "blob" / ROLLUP
    if damage == "gone":
        rollup.unlink()
    elif damage == "flipped":
        flip(rollup, 100)
    else:
        rollup.write_bytes(rollup.read_bytes()[:50])
    told = ask("state", "orders")
    assert told.code == 1
    assert told.document["seqno"] == whole.document["seqno"]
    assert told.document["state"] == whole.document["state"]
    assert told.findings
    assert ask("state", "tagged").code == 0
    assert {finding["shard"] for finding in ask("usage").document["findings"]} == {"orders"}


def test_a_log_entry_that_cannot_be_read_is_told_in_its_place(place: Path, ask: Any) -> None:
    spoil_entry(place, "orders", 20)
    told = ask("log", "orders")
    assert told.code == 1
    assert [line["seqno"] for line in told.lines] == list(range(1, 33))
    assert [line["seqno"] for line in told.lines if line["finding"] is not None] == [20]
    assert ask("state", "orders").code == 0, "the rollup after it is there"
    assert ask("state", "orders", "--at", "19").document["seqno"] == 19
    lost = ask("state", "orders", "--at", "21")
    assert lost.code == 1
    assert "v20 cannot be read" in lost.error
    assert ask("state", "orders", "--at", "32").code == 0


def test_a_head_that_cannot_be_read_shows_the_version_before_it(place: Path, ask: Any) -> None:
    spoil_entry(place, "orders", 32)
    told = ask("state", "orders")
    assert (told.code, told.document["seqno"]) == (1, 31)
    assert any("v31 is shown" in finding for finding in told.findings)
    assert ask("parts", "orders").rows


def test_a_shard_of_which_no_state_can_be_made_hides_no_other(place: Path, ask: Any) -> None:
    shutil.rmtree(place / "blob" / ROLLUP.split("/")[0])
    spoil_entry(place, "orders", 1)
    told = ask("usage")
    assert told.code == 1
    assert {"orders", "tagged"} <= {row["shard"] for row in told.rows}
    assert {finding["shard"] for finding in told.document["findings"]} == {"orders", "orders-clone"}, "it borrows"
    assert ask("state", "orders").code == 1
    assert ask("state", "tagged").code == 0


# --- blobs


def test_a_part_that_is_not_there_is_told_and_the_others_are_shown(place: Path, ask: Any) -> None:
    (place / "blob" / PART).unlink()
    told = ask("parts", "orders")
    assert told.code == 1
    assert [row["there"] for row in told.rows] == [False, None, None]
    assert told.findings == [f"the blob {PART} is missing"]
    assert ask("part", PART).code == 1
    assert ask("usage", "orders").findings == told.findings
    digest = ask("digest", "orders")
    assert (digest.code, digest.document["about"]["digest"]) == (1, None)


def test_a_part_that_is_too_short_is_told(place: Path, ask: Any) -> None:
    blob = place / "blob" / PART
    blob.write_bytes(blob.read_bytes()[:-7])
    assert ask("parts", "orders").findings == [f"the blob {PART} has 2224 bytes, not 2231"]
    told = ask("part", PART)
    assert (told.code, told.document["about"]["footer"]) == (1, False)


def test_a_flipped_byte_is_told_with_the_row_group_that_it_is_in(place: Path, ask: Any) -> None:
    flip(place / "blob" / PART, 40)
    told = ask("part", PART)
    about, [group] = told.document["about"], told.rows
    assert told.code == 1
    assert (about["whole"], about["footer"], group["sound"]) == (False, True, False)
    assert ask("parts", "orders").code == 0, "only its size is looked at there"
    assert ask("digest", "orders").code == 1


def test_a_footer_that_is_damaged_is_told(place: Path, ask: Any) -> None:
    flip(place / "blob" / PART, 2231 - 20)
    told = ask("part", PART)
    assert (told.code, told.document["about"]["footer"], told.rows) == (1, False, [])


def test_a_bundle_that_cannot_be_read_is_told_and_the_others_are_shown(place: Path, ask: Any) -> None:
    whole = ask("parts", "many").rows
    bundle = next(row for row in whole if row["lists"] == 2)
    flip(place / "blob" / bundle["key"], 60)
    told = ask("parts", "many")
    assert told.code == 1
    assert len(told.rows) == len(whole) - 2
    assert bundle["id"] in told.findings[0]
    assert ask("usage", "many").code == 1


def test_a_node_of_attributes_that_cannot_be_read_hides_no_others(place: Path, ask: Any) -> None:
    [chunk] = ask("state", "orders").document["state"]["attribute_chunks"].values()
    flip(place / "blob" / chunk["key"], 30)
    attributes = ask("attributes", "orders")
    assert attributes.code == 1
    assert {row["where"] for row in attributes.rows} == {"state"}
    (place / "blob" / chunk["key"]).unlink()
    assert ask("attributes", "orders").code == 1


# --- the location


def test_a_marker_that_is_missing_or_damaged_is_told_and_the_rest_is_shown(place: Path, ask: Any) -> None:
    (place / "persist.json").write_text("{")
    assert ask("usage").findings == ["persist.json is damaged: it is not JSON"]
    (place / "persist.json").unlink()
    told = ask("usage")
    assert told.code == 1
    assert told.findings == ["persist.json is missing: no program opens this directory as a location"]
    assert len(told.rows) == 20


def test_stores_of_two_locations_are_told(tmp_path: Path, place: Path, ask: Any) -> None:
    other = tmp_path / "other"
    with persist.connect(f"persist://{other}", collect=False) as client:
        client.create_shard("elsewhere", SCHEMA, ["id"])
    shutil.rmtree(place / "blob")
    shutil.copytree(other / "blob", place / "blob")
    told = ask("usage")
    assert told.code == 1
    assert any("belong" in finding or "binding" in finding for finding in told.findings)
    assert len(told.rows) == 20


def test_a_location_without_anything_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    persist.connect(f"persist://{tmp_path / 'empty'}").close()
    assert main(["inspect", "usage", "--dir", str(tmp_path / "empty"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == []


def test_a_log_without_the_index_of_its_file_is_read_of_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of files that were copied while a server was at work."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    with persist.connect(f"persist://{first}", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 1}])
        shutil.copytree(first, copy, ignore=shutil.ignore_patterns("*-shm"))
        newest = client.shard("orders").upper().to_json()
    assert (copy / "consensus.db-wal").stat().st_size > 0
    before = everything(copy)
    assert main(["inspect", "state", "orders", "--dir", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["upper"] == newest
    assert everything(copy) == before


# --- a look beside writers, merges and collections: one State is told, and what was taken away meanwhile is no dama


def looked_late(shards: Shards) -> tuple[ReadOnlyLocation, list[Part]]:
    """A look, and the parts that were taken away after their State was read."""
    look = ReadOnlyLocation(shards.blob, shards.consensus, clock=shards.clock)
    return look, list(newest(look, "a").known().trace.parts())


def test_parts_that_were_merged_and_collected_after_the_state_was_read_are_no_damage() -> None:
    shards = Shards()
    shards.create("a", inserts=4)
    look, before = looked_late(shards)
    document = answer(look, Query("parts", "a"))
    shards.client.shard("a").optimize()
    shards.blob.delete([part.key or "" for part in before])
    rows = [row for row in document.rows if isinstance(row, PartRow)]
    assert [row.there for row in rows] == [False] * len(before)
    assert document.findings == []


def test_parts_that_the_newest_state_names_are_missing_however_far_the_shard_has_moved() -> None:
    shards = Shards()
    shards.create("a", inserts=2)
    look, before = looked_late(shards)
    document = answer(look, Query("parts", "a"))
    shards.write("a")
    shards.blob.delete([before[0].key or ""])
    assert list(document.rows)
    assert [finding.key for finding in document.findings] == [before[0].key]
