"""`persist history`: settings and wall clocks of a shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main

SCHEMA = pa.schema([("id", pa.string())])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for key in "abc":
            shard.insert([{"id": key}])
    return str(tmp_path / "data")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["history", "orders", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_shows_what_is_kept_and_changes_it(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = told(capsys, "--dir", directory)
    assert (found["history"], found["version"], found["since"]) == ("1w", 1, [0])
    assert found["settled"]
    [found] = told(capsys, "--dir", directory, "--keep", "30d", "--forget", "2")
    assert (found["history"], found["version"], found["since"]) == ("30d", 2, [2])


def test_tells_which_time_an_instant_names_and_back(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = told(capsys, "--dir", directory, "--at", "2020-01-01T00:00:00+01:00")
    assert before == {"at": "2020-01-01T00:00:00+01:00", "frontier": [0]}
    shown, _ = told(capsys, "--dir", directory, "--when", "2")
    assert shown["time"] == 2
    assert shown["timestamp"].endswith(".000Z")


def test_a_clock_that_is_right_needs_no_repair(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    repaired, found = told(capsys, "--dir", directory, "--repair-clock")
    assert repaired["taken_back_from"] is None
    assert repaired["settled"] <= found["settled"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--keep", "3d", "--forget", "99"],
        ["--forget", "2", "--keep", "long"],
        ["--keep", "3d", "--at", "yesterday"],
        ["--keep", "3d", "--commits", "0"],
        ["--keep", "3d", "--before", "7.0"],
    ],
    ids=str,
)
def test_of_several_arguments_one_that_is_wrong_leaves_all_undone(
    directory: str, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["history", "orders", "--dir", directory, *wrong]) == 1
    capsys.readouterr()
    [found] = told(capsys, "--dir", directory)
    assert (found["history"], found["version"], found["since"]) == ("1w", 1, [0])
