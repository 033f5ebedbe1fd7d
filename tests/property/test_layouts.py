"""Rows in any layout and container land as they are: by every verb and interface, or they are refused as a whole."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import persist
import persist.aio
from persist.client.client import Client
from persist.client.shard import Shard
from persist.codecs.rows import PARQUET
from persist.commit.location import Location
from persist.core.batch import Part
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.ids import PartId
from persist.formats.http_messages import ARROW_STREAM
from persist.parts import ShardSchema, codec, writer
from rpc.app import create_app
from tests.support import layouts
from tests.support.asking import typed
from tests.support.examples import examples
from tests.support.location import client_of, memory_location
from tests.support.server import url_of

FEW = examples(0.4, of_a_proof=500)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def location() -> Iterator[Location]:
    opened = memory_location()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(location: Location) -> Client:
    return client_of(location)


@pytest.fixture(scope="module")
def http(location: Location) -> Iterator[TestClient]:
    with typed(TestClient(create_app(location), base_url="http://127.0.0.1")) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a real server."""
    with url_of("server", tmp_path_factory.mktemp("served")) as url, persist.connect(url) as opened:
        yield opened


def created(client: Client, **options: Any) -> Shard:
    return client.create_shard(f"s{next(_numbers)}", layouts.COLUMNS, list(layouts.KEY), **options)


def check_contents(shard: Shard, rows: list[dict[str, Any]]) -> None:
    found = shard.snapshot().to_arrow()
    assert set(found["__diff"].to_pylist()) <= {1}
    assert found.drop_columns(["__diff"]).sort_by("id").to_pylist() == sorted(rows, key=lambda row: row["id"])


def _pipelined(shard: Shard, rows: Any) -> None:
    with shard.pipelined_writer("w") as writer:
        writer.append(rows)


def _staged(shard: Shard, rows: Any) -> None:
    with closing(shard.open_writer()) as writer:
        writer.commit_insert(writer.stage(rows, None))


def _by_writer(shard: Shard, rows: Any) -> None:
    with closing(shard.open_writer()) as writer:
        writer.insert(rows)


VERBS: dict[str, Callable[[Shard, Any], object]] = {
    "insert": lambda shard, rows: shard.insert(rows),
    "append": lambda shard, rows: shard.append(rows, 0, 1),
    "compare_and_append": lambda shard, rows: shard.compare_and_append(rows, 0, 1),
    "upsert": lambda shard, rows: shard.upsert(rows),
    "merge": lambda shard, rows: shard.merge(rows).when_matched_update().when_not_matched_insert().execute(),
    "overwrite": lambda shard, rows: shard.overwrite(rows),
    "replace_where": lambda shard, rows: shard.replace_where("id >= 0", rows),
    "writer": _by_writer,
    "staged": _staged,
    "pipelined": _pipelined,
}


@pytest.mark.parametrize("verb", VERBS)
@FEW
@given(data=st.data())
def test_rows_in_any_layout_land_as_they_are(client: Client, verb: str, data: st.DataObject) -> None:
    rows, shard = data.draw(layouts.rows()), created(client)
    VERBS[verb](shard, data.draw(layouts.containers(rows)))
    check_contents(shard, rows)


@pytest.mark.parametrize("verb", ["insert", "append", "compare_and_append", "upsert", "merge"])
@FEW
@given(data=st.data())
def test_unique_keys_are_looked_up_in_any_layout(client: Client, verb: str, data: st.DataObject) -> None:
    rows, shard = data.draw(layouts.rows()), created(client, unique=True)
    VERBS[verb](shard, data.draw(layouts.containers(rows)))
    check_contents(shard, rows)


@pytest.mark.parametrize("verb", ["upsert", "merge", "overwrite", "replace_where"])
@FEW
@given(data=st.data())
def test_rows_that_are_there_are_replaced_in_any_layout(client: Client, verb: str, data: st.DataObject) -> None:
    before, rows = data.draw(layouts.rows()), data.draw(layouts.rows())
    shard = created(client)
    shard.insert(before)
    VERBS[verb](shard, data.draw(layouts.containers(rows)))
    stay = before if verb in ("upsert", "merge") else []
    check_contents(shard, list({row["id"]: row for row in [*stay, *rows]}.values()))


@FEW
@given(data=st.data())
def test_rows_are_taken_away_in_any_layout(client: Client, data: st.DataObject) -> None:
    rows, shard = data.draw(layouts.rows(min_size=1)), created(client)
    shard.insert(rows)
    gone = data.draw(st.lists(st.sampled_from(rows), unique_by=lambda row: row["id"]))
    taken = data.draw(layouts.tables(gone))
    cut = data.draw(st.integers(0, len(gone)))
    diffs = pa.chunked_array([pa.array([-1] * cut, pa.int64()), pa.array([-1] * (len(gone) - cut), pa.int64())])
    shard.insert(taken.append_column("__diff", diffs))
    check_contents(shard, [row for row in rows if row not in gone])


@FEW
@given(data=st.data())
def test_a_retry_in_another_container_is_the_same_write(client: Client, data: st.DataObject) -> None:
    rows, token = data.draw(layouts.rows(min_size=1)), client.new_token()
    verb = data.draw(st.sampled_from(["insert", "upsert", "overwrite", "merge"]))
    shard = created(client)

    def write() -> object:
        given = data.draw(layouts.containers(rows))
        if verb == "merge":
            merge = shard.merge(given).when_matched_update().when_not_matched_insert()
            return merge.execute(token=token).lower
        return getattr(shard, verb)(given, token=token).lower

    assert write() == write()
    check_contents(shard, rows)


@pytest.mark.parametrize("verb", VERBS)
@examples(0.2, of_a_proof=100)
@given(data=st.data())
def test_a_client_of_a_server_sends_any_layout(served: Client, verb: str, data: st.DataObject) -> None:
    rows, shard = data.draw(layouts.rows()), created(served)
    VERBS[verb](shard, data.draw(layouts.containers(rows)))
    check_contents(shard, rows)


POSTS = ["insert", "append?lower=0&upper=1", "compare-and-append?expected_upper=0&new_upper=1", "upsert", "overwrite"]


@pytest.mark.parametrize("form", [ARROW_STREAM, PARQUET])
@pytest.mark.parametrize("verb", POSTS)
@FEW
@given(data=st.data())
def test_a_body_in_any_layout_lands_as_it_is(
    client: Client, http: TestClient, verb: str, form: str, data: st.DataObject
) -> None:
    rows, shard = data.draw(layouts.rows()), created(client)
    table, sink = data.draw(layouts.tables(rows, of="posted" if form == ARROW_STREAM else "common")), io.BytesIO()
    if form == PARQUET:
        pq.write_table(table, sink, row_group_size=data.draw(st.integers(1, 5)))
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    answer = http.post(f"/v1/shards/{shard.name}/{verb}", content=sink.getvalue(), headers={"content-type": form})
    assert answer.status_code == 200, answer.text
    check_contents(shard, rows)


@examples(0.3, of_a_proof=100)
@given(data=st.data())
def test_asyncio_sends_any_layout(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rows, directory = data.draw(layouts.rows()), Path(tmp_path_factory.mktemp("aio"))
    verb, container = data.draw(st.sampled_from(["insert", "upsert", "overwrite"])), data.draw(layouts.containers(rows))

    async def main() -> None:
        async with persist.aio.connect(f"persist://{directory}") as opened:
            shard = await opened.create_shard("orders", layouts.COLUMNS, list(layouts.KEY))
            await getattr(shard, verb)(container)

    asyncio.run(main())
    with persist.connect(f"persist://{directory}") as opened:
        check_contents(opened.shard("orders"), rows)


LOSSY = pa.table({"id": pa.chunked_array([[1, 2], [3]]), "name": pa.chunked_array([["a"], ["b", "c"]])})
INLINE_VERBS = ["insert", "append", "compare_and_append", "upsert", "merge", "writer"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that encodes the first chunks of a table alone, and counts no rows."""

    def first_chunks(table: pa.Table, schema: ShardSchema, schema_id: int, part_id: PartId) -> Part:
        return codec.encode_inline(pa.Table.from_batches(table.to_batches()[:1]), schema, schema_id, part_id)

    monkeypatch.setattr(writer, "encode_inline", first_chunks)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("verb", INLINE_VERBS)
def test_a_build_that_loses_rows_while_it_encodes_them_writes_nothing(client: Client, verb: str) -> None:
    """The sum of the diffs that came is compared with that of what was encoded."""
    shard = created(client)
    with pytest.raises(Corruption) as caught:
        VERBS[verb](shard, LOSSY)
    assert (caught.value.details["given"], caught.value.details["encoded"]) == (3, 1)
    assert shard.view().upper == Antichain(0)
    VERBS[verb](shard, LOSSY.combine_chunks())
    assert shard.count() == 3


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("verb", [verb for verb in POSTS if verb != "overwrite"])  # which writes blobs
def test_a_server_that_loses_rows_while_it_encodes_them_writes_nothing(
    client: Client, http: TestClient, verb: str
) -> None:
    shard, sink = created(client), io.BytesIO()
    with pa.ipc.new_stream(sink, LOSSY.schema) as stream:
        stream.write_table(LOSSY)
    url, headers = f"/v1/shards/{shard.name}/{verb}", {"content-type": ARROW_STREAM}
    answer = http.post(url, content=sink.getvalue(), headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (500, Corruption.kind), answer.text
    assert shard.view().upper == Antichain(0)
