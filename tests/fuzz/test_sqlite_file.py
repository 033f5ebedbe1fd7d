"""A damaged `consensus.db` gives right rows or Corruption: never wrong rows, a time given twice, or another error."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.write import WriteSettings
from persist.core.errors import Corruption, InvalidUsage
from tests.support.examples import size

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.string())])
INSERTS = 70
PAGE = 4096
DAMAGES = size(40, 120)
IMPATIENT = HandleSettings(write=WriteSettings(retry_s=0.5), read=ReadSettings(retry_s=0.5))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("healthy") / "location"
    chance = random.Random(0)
    with persist.connect(f"persist://{directory}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(INSERTS):
            shard.insert([{"id": number * 10 + n, "v": "v" * chance.randint(0, 30)} for n in range(3)])
    with closing(sqlite3.connect(directory / "consensus.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return directory


@pytest.fixture(scope="module")
def rows(healthy: Path) -> list[str]:
    with persist.connect(f"persist://{healthy}") as client:
        return _rows(client)


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "copy"))


def _rows(client: Client) -> list[str]:
    shard = client.shard("orders")
    return sorted(map(str, shard.snapshot(INSERTS - 1, wait_s=0).to_arrow().to_pylist()))


def damaged(data: bytearray, chance: random.Random) -> bytearray:
    """One damage as disks and careless copies make it."""
    kind = chance.choice(("bit", "bit", "first page", "zeroed sector", "cut", "swapped pages"))
    if kind == "bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "first page":
        data[chance.choice((chance.randrange(100), PAGE - 1 - chance.randrange(500)))] ^= 1 << chance.randrange(8)
    elif kind == "zeroed sector":
        at = chance.randrange(len(data)) // 512 * 512
        data[at : at + 512] = bytes(512)
    elif kind == "cut":
        del data[chance.randrange(512, len(data)) :]
    else:
        one, other = (PAGE * chance.randrange(1, len(data) // PAGE) for _ in range(2))
        data[one : one + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[one : one + PAGE]
    return data


def outcomes(directory: Path, rows: list[str]) -> Iterator[str]:
    with persist.connect(f"persist://{directory}", handles=IMPATIENT) as client:
        assert _rows(client) == rows, "wrong rows"
        yield "read"
        assert client.shard("orders").insert([{"id": -1, "v": "new"}]).lower.element == INSERTS, "a time given twice"
        yield "written"


def test_random_damage_gives_right_rows_or_corruption(copy: Path, healthy: Path, rows: list[str]) -> None:
    whole = (healthy / "consensus.db").read_bytes()
    told = 0
    wrong = []
    for seed in range(DAMAGES):
        for old in copy.glob("consensus.db-*"):
            old.unlink()
        (copy / "consensus.db").write_bytes(damaged(bytearray(whole), random.Random(seed)))
        try:
            list(outcomes(copy, rows))
        except Corruption:
            told += 1
        except InvalidUsage as error:  # a file that seems to be empty beside a blob store that is not
            told += "has lost all" in str(error)
        except Exception as error:
            wrong.append(f"damage {seed}: {type(error).__name__}: {error}")
    assert not wrong
    assert told > DAMAGES / 5, "of what lies before the newest rollup nobody needs anything"


def test_half_a_file_is_corruption_at_once_and_says_what_to_do(copy: Path) -> None:
    """It was Unavailable, which clients repeat for two minutes."""
    data = (copy / "consensus.db").read_bytes()
    (copy / "consensus.db").write_bytes(data[: len(data) // 2])
    with pytest.raises(Corruption, match="backup"), persist.connect(f"persist://{copy}") as client:
        client.shard("orders").snapshot(wait_s=0)
