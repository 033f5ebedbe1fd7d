"""Rows that name columns, where others give the names to other columns meanwhile: they were read by the old meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import SchemaMismatch, Shard
from persist.codecs import rows
from persist.parts.schema_changes import DropColumn, RenameColumn
from rpc import command_endpoint
from rpc.app import create_app
from tests.support.embedded import client_of
from tests.support.location import TestClock, memory_location

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
SWAP = RenameColumn("a", "x"), RenameColumn("b", "a"), RenameColumn("x", "b")
VERBS = "insert", "append?lower=1&upper=2", "compare-and-append?expected_upper=1&new_upper=2"
BODIES = {
    "application/x-ndjson": b'{"id": 2, "a": "1", "b": "2"}\n',  # on the event loop
    "text/csv": b"id,a,b\n2,1,2\n",  # on a thread
}
WANTED = {"id": 2, "a": "1", "b": "2"}


class Servers:
    """Two servers of one location, each in this process: `http` is one of them, `other` a shard by the other one."""

    def __init__(self, *, unique: bool = False) -> None:
        stores, clock = (MemoryBlob("mem:"), MemoryConsensus("mem:")), TestClock()
        self.here, there = (memory_location(blob=stores[0], consensus=stores[1], clock=clock) for _ in range(2))
        self.closing = [self.here.close, there.close]
        self.http = TestClient(create_app(self.here), base_url="http://127.0.0.1")
        self.other: Shard = client_of(there).create_shard("s", COLUMNS, ["id"])
        if unique:
            self.other.set_constraints(unique=True)
        assert self.post("insert", "application/x-ndjson", b'{"id": 1}').status_code == 200

    def post(self, verb: str, form: str, body: bytes) -> Any:
        return self.http.post(f"/v1/shards/s/{verb}", content=body, headers={"content-type": form})

    def rows(self) -> list[dict[str, Any]]:
        self.other.refresh_schema()
        with self.other.snapshot(where="id > 1") as snapshot:
            found: list[dict[str, Any]] = snapshot.to_arrow().drop_columns(["__diff"]).to_pylist()
            return found

    def close(self) -> None:
        for close in self.closing:
            close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    found = Servers()
    with closing(found), found.http:
        yield found


@pytest.fixture
def once_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[object]]:
    """Has something done once, right after the rows of a body were read; what that came to."""

    def patched(work: Callable[[], object]) -> list[object]:
        done: list[object] = []

        def then(real: Callable[..., Any]) -> Callable[..., Any]:
            def read(*given: Any) -> Any:
                table = real(*given)
                if not done:
                    done.append(work())
                return table

            return read

        for name in ("read", "read_each"):
            monkeypatch.setattr(rows, name, then(getattr(rows, name)))
        return done

    return patched


@pytest.mark.parametrize(("verb", "form"), list(zip(VERBS, [*BODIES, *BODIES], strict=False)))
def test_rows_went_into_the_columns_that_had_their_names_before(servers: Servers, verb: str, form: str) -> None:
    """The server has not heard yet that another one has let two columns change their names."""
    servers.other.alter(*SWAP)
    answer = servers.post(verb, form, BODIES[form])
    assert answer.status_code == 200, answer.text
    assert servers.rows() == [WANTED]


@pytest.mark.parametrize(("verb", "unique"), [*((verb, False) for verb in VERBS), (VERBS[0], True)])
@pytest.mark.parametrize("form", BODIES)
def test_rows_were_read_by_names_that_changed_before_their_commit(
    verb: str, unique: bool, form: str, once_read: Callable[[Callable[[], object]], list[object]]
) -> None:
    servers = Servers(unique=unique)
    with closing(servers), servers.http:
        done = once_read(lambda: servers.other.alter(*SWAP))
        answer = servers.post(verb, form, BODIES[form])
        assert answer.status_code == 200, answer.text
        assert len(done) == 1
        assert servers.rows() == [WANTED]


@pytest.mark.parametrize("form", BODIES)
def test_a_name_that_is_gone_by_then_is_refused(
    form: str, servers: Servers, once_read: Callable[[Callable[[], object]], list[object]]
) -> None:
    """A client that knows no schema was told that all was well, and its values were not kept."""
    once_read(lambda: servers.other.alter(DropColumn("b")))
    answer = servers.post("insert", form, BODIES[form])
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
    assert "column 'b' was dropped" in answer.json()["detail"]
    assert servers.rows() == []


def test_columns_that_change_all_the_time_are_told(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads a body so often, and no more."""
    real, read = rows.read, []

    def changing(*given: Any) -> pa.Table:
        read.append(servers.other.alter(*SWAP))
        return real(*given)

    monkeypatch.setattr(command_endpoint.rows, "read", changing)
    answer = servers.post("insert", "text/csv", BODIES["text/csv"])
    assert (answer.status_code, answer.json()["kind"]) == (409, SchemaMismatch.kind)
    assert len(read) == command_endpoint.READINGS_MAX
    assert servers.rows() == []
