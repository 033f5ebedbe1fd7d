"""A token makes a write happen once, whoever repeats it: another handle, client, process or server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest

import persist
from persist import Client, HandleSettings, Shard, WriteSettings
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import AttributeMismatch, Indeterminate, InvalidUsage, TokenReused, Unavailable, UpperMismatch
from persist.core.ids import token_of_key
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from tests.support.clocks import World
from tests.support.server import Server, url_of

SCHEMA = pa.schema([pa.field("k", pa.string())])
VALUES = pa.schema([pa.field("k", pa.string()), pa.field("n", pa.int64())])
ROWS = [{"k": "a"}]
KEY = bytes(range(16))

WRITES: dict[str, Callable[[persist.Shard, Any], object]] = {
    "insert": lambda shard, token: shard.insert(ROWS, token=token),
    "compare_and_append": lambda shard, token: shard.compare_and_append(ROWS, 0, 1, token=token),
    "append": lambda shard, token: shard.append(ROWS, 0, 1, token=token),
}


BY_BOTH = pytest.mark.parametrize("connect", ["directory", "server"], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], persist.Client]]:
    """Opens one more client of the same shards."""
    with url_of(getattr(request, "param", "directory"), tmp_path) as url:
        yield lambda: persist.connect(url)


def fail(shard: persist.Shard) -> None:
    """A call that is refused, after which a handle takes another writer."""
    with pytest.raises(UpperMismatch):
        shard.compare_and_append(ROWS, 77, 78)


@pytest.mark.parametrize("write", WRITES)
def test_a_repeated_write_is_answered_as_the_first_time(connect: Callable[[], persist.Client], write: str) -> None:
    with connect() as client, connect() as other:
        shard, token = client.create_shard("orders", SCHEMA, ["k"]), client.new_token()
        first = WRITES[write](shard, token)
        fail(shard)
        assert WRITES[write](shard, token) == first, "on the same handle"
        shard.insert([{"k": "between"}])
        assert WRITES[write](client.shard("orders"), token) == first, "on another handle"
        assert WRITES[write](other.shard("orders"), token) == first, "by another client"
        assert shard.snapshot().to_arrow().to_pylist() == [{"k": "a", "__diff": 1}, {"k": "between", "__diff": 1}]


@BY_BOTH
def test_a_token_stands_for_one_verb_and_one_body(connect: Callable[[], persist.Client]) -> None:
    with connect() as client, connect() as other:
        shard, token = client.create_shard("orders", SCHEMA, ["k"]), client.new_token()
        first = shard.insert(ROWS, token=token)
        again = other.shard("orders")
        others: list[Callable[[], object]] = [
            lambda: again.insert([{"k": "b"}], token=token),
            lambda: again.insert([*ROWS, *ROWS], token=token),
            lambda: again.insert([], token=token),
            lambda: again.append(ROWS, 0, 1, token=token),
            lambda: again.compare_and_append(ROWS, 77, 78, token=token),
            lambda: again.insert(ROWS, token=token, attributes=persist.AttributeUpdate.replace(KEY, 1)),
            lambda: again.attributes.update(persist.AttributeUpdate.replace(KEY, 1), token=token),
        ]
        for write in others:
            with pytest.raises(TokenReused, match="has landed"):
                write()
        assert again.insert(pa.table({"k": ["a"]}), token=token) == first, "the same rows, in another form"
        with closing(again.open_writer()) as writer:
            assert writer.insert(ROWS, token=token) == first, "by a writer of its own"
        assert shard.snapshot().to_arrow().to_pylist() == [{"k": "a", "__diff": 1}]
        assert shard.attributes.get(KEY) is None


def test_a_token_tells_other_rows_also_where_they_were_staged(connect: Callable[[], persist.Client]) -> None:
    """Rows with the same count, least key and sum of diffs were taken for a retry: they were lost."""
    with connect() as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        first, other = [{"k": "a", "n": 1}, {"k": "b", "n": 2}], [{"k": "a", "n": 9}, {"k": "z", "n": 9}]
        writer, token, again = shard.open_writer(), client.new_token(), client.new_token()
        landed = writer.commit_insert(writer.stage(first, None), token=token)
        with pytest.raises(TokenReused, match="has landed"):
            writer.commit_insert(writer.stage(other, None), token=token)
        assert writer.commit_insert(writer.stage(first, None), token=token) == landed
        placed = writer.commit_compare_and_append(writer.stage(first, 1), 1, 5, token=again)
        for rows in (other, pa.table({"k": ["a", "b"], "n": [1, 2], "__time": [1, 4]})):
            with pytest.raises(TokenReused, match="has landed"):
                writer.commit_compare_and_append(writer.stage(rows, 1), 1, 5, token=again)
        assert writer.commit_compare_and_append(writer.stage(first, 1), 1, 5, token=again) == placed
        assert shard.snapshot().to_arrow().column("n").to_pylist() == [1, 2]


def test_a_token_may_stand_for_the_very_parts_that_came_with_it(connect: Callable[[], persist.Client]) -> None:
    """As in a job that makes a token for itself: its parts are known again, their rows in other parts are not."""
    with connect() as client:
        shard, token = client.create_shard("orders", VALUES, ["k"]), client.new_token()
        many = pa.table({"k": [f"k{number}" for number in range(20_000)], "n": range(20_000)})
        for rows in ([{"k": "a", "n": 1}], many):  # an inline part, and a blob
            writer, token = shard.open_writer(), client.new_token()
            runs = writer.receipted(writer.stage_for_one_commit(rows, None, by_rows=False))
            landed = writer.commit_insert(runs, token=token)
            assert shard.open_writer().commit_insert(runs, token=token) == landed
            for staged in (rows, [{"k": "z", "n": 9}]):
                with pytest.raises(TokenReused, match="has landed"):
                    writer.commit_insert(writer.stage_for_one_commit(staged, None, by_rows=False), token=token)
        assert shard.snapshot().to_arrow().num_rows == 20_001


@BY_BOTH
def test_a_retry_is_answered_however_it_brings_its_rows(connect: Callable[[], persist.Client]) -> None:
    """A retry of an insert that staged its rows first was told that its rows are other ones."""
    small_parts = HandleSettings(WriteSettings(part_bytes_target=2_000))
    with connect() as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        cut = persist.Client(client.transport, small_parts).shard("orders")
        rows = pa.table({"k": [f"{number % 100:030}" for number in range(200)], "n": range(200)})
        backwards = rows.take(list(reversed(range(len(rows)))))
        ways: list[Callable[[persist.Token], object]] = [
            lambda token: shard.insert(rows, token=token),
            lambda token: shard.insert(iter(rows.to_batches(max_chunksize=7)), token=token),
            lambda token: cut.insert(backwards, token=token),
            lambda token: shard.open_writer().commit_insert(shard.open_writer().stage(rows, None), token=token),
            lambda token: cut.open_writer().commit_insert(cut.open_writer().stage(rows, None), token=token),
        ]
        assert len(cut.open_writer().stage(rows, None)) > 1
        for number, first in enumerate(ways):
            token = client.new_token()
            answer = first(token)
            assert [way(token) for way in ways] == [answer] * len(ways)
            assert shard.upper().element == number + 1


def test_a_key_over_http_stands_for_one_verb_and_one_body(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, persist.connect(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])

        def post(verb: str, body: str, key: str) -> tuple[int, dict[str, Any]]:
            headers = {"content-type": "application/x-ndjson", "idempotency-key": key}
            request = Request(f"{server.url}/v1/shards/orders/{verb}", body.encode(), headers)
            try:
                with urlopen(request) as answer:
                    return answer.status, json.load(answer)
            except HTTPError as error:
                return error.code, json.load(error)

        first = post("insert", '{"k": "a"}', "load-17")
        assert first[0] == 200
        assert post("insert", '{"k": "a"}', "load-17") == first
        for verb, body in (("insert", '{"k": "b"}'), ("append?lower=0&upper=1", '{"k": "a"}')):
            status, told = post(verb, body, "load-17")
            assert (status, told["kind"]) == (422, "token_reused")
        token = client.new_token()
        interval = shard.insert([{"k": "c"}], token=token)
        assert post("insert", '{"k": "c"}', token)[1]["lower"] == interval.lower.to_json(), "a token of another client"
        assert shard.snapshot().to_arrow().column("k").to_pylist() == ["a", "c"]


def test_a_write_that_landed_is_told_by_its_condition_before_its_parts(
    connect: Callable[[], persist.Client],
) -> None:
    """A pipelined writer that did not hear of its write stopped: its parts were refused before its condition failed."""
    with connect() as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        rows = pa.table({"k": [f"{number:08}" for number in range(20_000)]})
        with closing(shard.open_writer()) as writer:
            runs = writer.stage(rows, None)
            assert runs[0].parts[0].key is not None
            first = persist.AttributeUpdate.replace_if_equals(KEY, 1, None)
            writer.commit_insert(runs, attributes=first)
            with pytest.raises(AttributeMismatch):
                writer.commit_insert(runs, attributes=first)
            with pytest.raises(InvalidUsage, match="is in shard 'orders' already"):
                writer.commit_insert(runs, attributes=persist.AttributeUpdate.replace_if_equals(KEY, 2, 1))
        assert shard.attributes.get(KEY) == 1


def test_what_is_no_token_is_refused(connect: Callable[[], persist.Client]) -> None:
    with connect() as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for token in (17, "i" + "\ud800" * 32, "", "x" * 201):
            for write in (shard.insert, shard.upsert):
                with pytest.raises(
                    InvalidUsage, match=r"a token (is a non-empty Unicode text|has 1 to 200 characters)"
                ):
                    write(ROWS, token=token)  # type: ignore[arg-type]
        assert shard.upper().element == 0


def test_a_token_may_be_text_of_the_callers_own(connect: Callable[[], persist.Client]) -> None:
    verbs: list[Callable[[Shard, str], Any]] = [
        lambda s, token: s.insert(ROWS, token=token),
        lambda s, token: s.upsert(ROWS, token=token),
        lambda s, token: s.overwrite(ROWS[:1], token=token),
        lambda s, token: s.restore(0, token=token),
    ]
    with connect() as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number, verb in enumerate(verbs):
            first = verb(shard, f"load {number}")
            assert verb(shard, f"load {number}").lower == first.lower
            assert verb(client.shard("orders"), token_of_key(f"load {number}")).lower == first.lower
            assert first.time in (None, shard.snapshot().as_of)
        shard.attributes.update(persist.AttributeUpdate.replace(KEY, 1), token="position")
        shard.attributes.update(persist.AttributeUpdate.replace(KEY, 1), token="position")
        assert shard.attributes.get(KEY) == 1


# --- a write that is answered with Unavailable has not happened, wherever the connection is lost


NAME = "orders"
COLUMNS = pa.schema([("id", pa.int64()), ("v", pa.int64())])
CALLS_MAX = 60  # more than a verb makes
TOKEN = token_of_key("once")
VERBS: dict[str, Callable[[Shard], object]] = {
    "insert": lambda s: s.insert([{"id": 9, "v": 1}], token=TOKEN),
    "upsert": lambda s: s.upsert([{"id": 1, "v": 7}], token=TOKEN),
    "update": lambda s: s.update({"v": 3}, where="id = 1", token=TOKEN),
    "delete": lambda s: s.delete(where="id = 1", token=TOKEN),
    "merge": lambda s: (
        s.merge([{"id": 2, "v": 3}]).when_matched_update().when_not_matched_insert().execute(token=TOKEN)
    ),
    "overwrite": lambda s: s.overwrite([{"id": 5, "v": 5}], token=TOKEN),
    "restore": lambda s: s.restore(1, token=TOKEN),
    "truncate": lambda s: s.truncate(2, token=TOKEN),
    "truncate of nothing": lambda s: s.truncate(0, token=TOKEN),
    "drop": lambda s: s.truncate(2, mode="drop", token=TOKEN),
    "drop of nothing": lambda s: s.truncate(1, mode="drop", token=TOKEN),
    "erase": lambda s: s.erase(keys=[1], token=TOKEN),
    "tag": lambda s: s.tag("month", 1),
    "add a column": lambda s: s.add_column("w", pa.int64()),
    "set constraints": lambda s: s.set_constraints(not_null=["v"]),
    "configure": lambda s: s.configure(history="9d"),
    "retain": lambda s: s.retain({"age": "900d"}),
    "compare_and_append": lambda s: s.compare_and_append([{"id": 9, "v": 1, "__time": 4}], 4, 5),
    "untag": lambda s: s.untag("first"),
    "forget": lambda s: s.forget(2),
}
FED = ("truncate", "drop", "erase")  # what a shard that is fed by `append` takes, and keeps as pending


class LostAfter(ForwardingTransport):
    """Loses its connection after so many calls, each of which was answered."""

    def __init__(self, world: World, calls: int) -> None:
        super().__init__(EmbeddedTransport(world.machine().location))
        self.calls_left = calls

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self._call()
        return super().apply(name, command, caller)

    def view(self, name: str, request: ViewRequest) -> ShardView:
        self._call()
        return super().view(name, request)

    def _call(self) -> None:
        if self.calls_left <= 0:
            raise Unavailable("the connection is lost")
        self.calls_left -= 1


def made(world: World, *, fed: bool) -> None:
    shard = world.machine().client.create_shard(NAME, COLUMNS, ["id"], history="7d")
    for number in range(4):
        rows = pa.table({"id": [number], "v": [number]}, schema=COLUMNS)
        if fed:
            shard.append(rows.append_column("__time", pa.array([number])), number, number + 1)
        else:
            shard.insert(rows)
        world.pass_ms(1_000)
    shard.tag("first", 0)


def what_is_there(world: World) -> dict[str, Any]:
    """What a write changes of the State; leases and registrations are not part of it."""
    state: State = world.machine().location.machine(NAME).refresh()
    names = ("upper", "since", "outcomes", "truncations", "drops", "erasures", "tags", "schemas", "settings", "cuts")
    kept = {name: getattr(state, name) for name in names}
    return {"rows": state.trace.batches, **{name: dict(v) if isinstance(v, Mapping) else v for name, v in kept.items()}}


@pytest.mark.parametrize(
    ("verb", "fed"), [*((verb, False) for verb in VERBS), *((verb, True) for verb in FED)], ids=str
)
def test_a_write_that_landed_is_never_answered_as_unavailable(verb: str, fed: bool) -> None:
    for calls in range(CALLS_MAX):
        world = World()
        made(world, fed=fed)
        before = what_is_there(world)
        transport = LostAfter(world, CALLS_MAX)
        shard = Client(transport).shard(NAME)
        transport.calls_left = calls
        try:
            VERBS[verb](shard)
        except Indeterminate:
            continue
        except Unavailable:
            assert what_is_there(world) == before, f"{verb} happened before the connection was lost after {calls} calls"
        else:
            return
    raise AssertionError(f"{verb} makes more than {CALLS_MAX} calls")
