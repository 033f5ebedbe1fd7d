"""`persist inspect` with credentials that may only read: PostgreSQL with SELECT, etcd with a role that reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from consensus import ConsensusUnavailable, open_consensus
from persist.commit.location import open_stores
from persist.inspect.queries import ANSWERS, Query, answer
from persist.inspect.readonly_location import open_readonly_stores
from rpc.cli.program import main
from tests.services.postgres import Postgres
from tests.services.process import free_ports
from tests.support.inspected import everything
from tests.support.location import client_of

pytestmark = pytest.mark.services
SCHEMA = pa.schema([("id", pa.int64())])
OF_ONE = sorted(ANSWERS.keys() - {"usage", "part"})


def filled(blob: str, consensus: str) -> None:
    """A location with a shard and some commits."""
    location = open_stores(blob, consensus)
    with client_of(location) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for number in range(3):
            shard.insert([{"id": number}])
    location.close()


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    return tmp_path / "blob"


@pytest.fixture
def reader_url(postgres_server: Postgres, blob: Path) -> Iterator[tuple[str, str]]:
    """A filled location: its consensus URL for a role that may only SELECT, and that of its owner."""
    name = f"looked_{free_ports(1)[0]}"
    owner = postgres_server.create_database(name)
    filled(blob.as_uri(), owner)
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE \"{name}\" LOGIN PASSWORD 'right'")
        connection.execute(f'GRANT SELECT ON consensus_log TO "{name}"')
    yield postgres_server.url(name, user=name), owner
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(f'DROP OWNED BY "{name}"')
        connection.execute(f'DROP ROLE "{name}"')


def rows_of(url: str) -> list[tuple[object, ...]]:
    """The log with the row versions of PostgreSQL: a row that was written again has another."""
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute("SELECT xmin::text, ctid::text, * FROM consensus_log ORDER BY key, seqno").fetchall()


def test_a_postgres_role_with_select_sees_everything_and_nothing_is_written(
    reader_url: tuple[str, str], blob: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, owner = reader_url
    before = rows_of(owner), everything(blob)
    at = ["--blob", blob.as_uri(), "--consensus", url, "--json"]
    for words in (["usage"], ["state", "orders", "--from", "1"], *([what, "orders"] for what in OF_ONE)):
        assert main(["inspect", *words, *at]) == 0, (words, capsys.readouterr().err)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["command"] == "usage"
    assert (rows_of(owner), everything(blob)) == before


def test_also_the_owner_of_a_postgres_database_writes_nothing_by_looking(
    reader_url: tuple[str, str],
) -> None:
    store = open_consensus(reader_url[1], reads_only=True)
    with pytest.raises(ConsensusUnavailable, match="read-only transaction"):
        store.compare_and_set("orders", 99, b"")
    with pytest.raises(ConsensusUnavailable, match="read-only transaction"):
        store.truncate("orders", 2)
    store.close()


def test_no_table_is_made_in_a_postgres_database_without_one(
    postgres_server: Postgres, blob: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres_server.create_database(f"bare_{free_ports(1)[0]}")
    blob.mkdir()
    assert main(["inspect", "usage", "--blob", blob.as_uri(), "--consensus", url]) == 2
    assert "has no table consensus_log: it is not a location of persist" in capsys.readouterr().err
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT to_regclass('consensus_log')").fetchone() == (None,)


def test_a_postgres_server_that_does_not_answer_is_unreachable(blob: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob.mkdir()
    url = f"postgresql://a:b@127.0.0.1:{free_ports(1)[0]}/c"
    assert main(["inspect", "usage", "--blob", blob.as_uri(), "--consensus", url]) == 3
    assert capsys.readouterr().out == ""


def test_nothing_is_written_to_etcd(etcd_url: str, blob: Path) -> None:
    filled(blob.as_uri(), etcd_url)
    look = open_readonly_stores(blob.as_uri(), etcd_url)
    before = {name: look.consensus.scan(name, 1, 100) for name in look.names()}
    revision = _revision(look.consensus)
    for asked in (Query("usage"), *(Query(what, "orders") for what in OF_ONE)):
        document = answer(look, asked)
        assert list(document.pieces())
        assert document.findings == [], asked
    assert _revision(look.consensus) == revision, "each write of etcd has a revision"
    assert {name: look.consensus.scan(name, 1, 100) for name in look.names()} == before
    look.close()


def test_nothing_is_written_to_s3(s3_url: str, tmp_path: Path) -> None:
    consensus = f"sqlite:///{tmp_path}/log.db"
    filled(s3_url, consensus)
    look = open_readonly_stores(s3_url, consensus)
    before = list(look.blob.list(""))
    for asked in (Query("usage"), *(Query(what, "orders") for what in OF_ONE)):
        document = answer(look, asked)
        assert list(document.pieces())
        assert document.findings == [], asked
    assert list(look.blob.list("")) == before
    look.close()


def _revision(consensus: object) -> int:
    """The revision of the whole cluster, as an answer to a read tells it."""
    store = consensus._inner  # type: ignore[attr-defined]
    found: int = store._range(key=b"none", limit=1).header.revision
    return found
