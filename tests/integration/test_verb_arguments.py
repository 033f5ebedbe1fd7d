"""What a hostile caller of the verbs found. Each test is named by what was wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fastapi.testclient import TestClient

from persist import (
    AttributeUpdate,
    Client,
    InvalidUsage,
    Shard,
    TokenReused,
    Unavailable,
    UpperMismatch,
    connect,
    named_key,
    source,
    target,
)
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from tests.support.clocks import Machine
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("s", pa.string()), ("d", pa.float64()), ("f", pa.float32())])
PATH = "/v1/shards/t"


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard("t", SCHEMA, ["k"])
    found.insert([{"k": 1, "n": 5, "s": "7", "d": 1e300, "f": 1.0}])
    return found


FIRST = list(range(40))
SECOND = [*FIRST[:15], *range(100, 110), *FIRST[25:]]  # others in the middle, which `repr` leaves out
EXPRESSIONS = [
    (pc.if_else(pc.field("k").isin(FIRST), 1, 0), pc.if_else(pc.field("k").isin(SECOND), 1, 0)),
    (pc.divide(pc.scalar(7), pc.scalar(2)), pc.divide(pc.scalar(7), pc.scalar(2.0))),
]


@pytest.mark.parametrize(("one", "other"), EXPRESSIONS)
def test_a_token_stood_for_the_text_of_an_expression(machine: Machine, shard: Shard, one: Any, other: Any) -> None:
    token = machine.client.new_token()
    column = "d" if "divide" in str(one) else "n"
    done = shard.update({column: one}, token=token)
    assert shard.update({column: one}, token=token).lower == done.lower
    with pytest.raises(TokenReused):
        shard.update({column: other}, token=token)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda shard: shard.drop(force="no"), "force is 'no'"),
        (lambda shard: shard.attributes.update(AttributeUpdate.replace(named_key("a"), 1.0)), "attribute .* 1.0"),
        (lambda shard: shard.merge([{"k": 1}], on=[]).when_matched_delete().execute(), "on is empty"),
        (lambda shard: source(7), "column is 7"),
        (lambda shard: target(7), "column is 7"),
        (lambda shard: shard.configure(history="0d"), "history is '0d'"),
        (lambda shard: shard.configure(history="0ms"), "history is '0ms'"),
    ],
)
def test_what_is_refused_is_named(shard: Shard, call: Callable[[Shard], object], named: str) -> None:
    """Some named "a command of 44 bytes"; an age of zero meant no history."""
    with pytest.raises(InvalidUsage, match=named):
        call(shard)


def test_no_history_is_a_word_or_a_timedelta(shard: Shard) -> None:
    assert shard.configure(history="none").history_ms == 0
    assert shard.configure(history=timedelta(0)).history_ms == 0


@pytest.mark.parametrize("name", ["x" * 129, "eu/" + "x" * 129])
def test_a_name_that_is_too_long_is_told_its_length(machine: Machine, name: str) -> None:
    with pytest.raises(InvalidUsage, match="129 characters; at most 128"):
        machine.client.shard(name)


@pytest.mark.parametrize(("column", "of"), [("f", "d"), ("n", "s"), ("s", "d"), ("n", "d")])
def test_what_an_expression_gives_was_cast_with_a_loss(shard: Shard, column: str, of: str) -> None:
    merge = shard.merge([{"k": 9}]).when_not_matched_by_source_update({column: pc.field(f"target.{of}")})
    with pytest.raises(InvalidUsage, match=f"column '{column}'"):
        merge.execute()
    with pytest.raises(InvalidUsage, match=f"column '{column}'"):
        shard.update({column: pc.field(of)})
    assert shard.upper().element == 1


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_that_is_no_double_became_null_over_http(http: TestClient, shard: Shard, number: str) -> None:
    headers = {"content-type": "application/json"}
    merge = f'{{"rows": [{{"k": 1, "d": {number}}}], "clauses": [{{"when": "matched", "then": "update"}}]}}'
    for verb, body in (("update", f'{{"set": {{"d": {number}}}}}'), ("merge", merge)):
        answer = http.post(f"{PATH}/{verb}", content=body, headers=headers)
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
    assert http.post(f"{PATH}/update", json={"set": {"d": "NaN"}}).status_code == 200
    [row] = shard.get(1)
    assert row["d"] != row["d"]


def merging(**clause: Any) -> tuple[str, dict[str, Any]]:
    return "merge", {"rows": [{"k": 1}], "clauses": [{"when": "matched", "then": "update", **clause}]}


BAD_JSON = [
    ("update", {"set": {"n": 2**64}}),
    ("merge", {"rows": [{"k": 2**64}], "clauses": [{"when": "matched", "then": "delete"}]}),
    *(merging(**clause) for clause in ({"when": []}, {"then": {}}, {"set": {"n": {"value": 2**64}}})),
]


@pytest.mark.parametrize(("verb", "body"), BAD_JSON)
def test_bad_json_was_answered_as_a_fault_of_the_server(http: TestClient, verb: str, body: dict[str, Any]) -> None:
    answer = http.post(f"{PATH}/{verb}", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text


BAD_ROWS = [
    [{"k": "abc"}], [{"k": 1, "d": 2**53 + 1}], [{"k": 1, "s": "\ud800"}], [{"k": 1}, 5], [[1]], [{1: 1, "k": 2}],
    [{"k": 1, "e": 1}, {"k": 2, "e": "x"}], pa.Table.from_arrays([pa.array([1]), pa.array([1])], names=["k", "k"]),
]  # fmt: skip


@pytest.mark.parametrize("rows", BAD_ROWS)
def test_bad_rows_of_a_merge_raised_errors_of_arrow_and_python(machine: Machine, shard: Shard, rows: Any) -> None:
    merge = shard.merge(rows).when_matched_update().when_not_matched_insert()
    with pytest.raises(InvalidUsage):
        merge.execute(token=machine.client.new_token())
    assert shard.upper().element == 1


VERBS: dict[str, Callable[[Shard, Any], Any]] = {
    "upsert": lambda s, t: s.upsert([{"k": 2, "n": 2}], token=t),
    "overwrite": lambda s, t: s.overwrite([{"k": 3, "n": 3}], token=t),
    "delete": lambda s, t: s.delete("k = 9", token=t),
    "merge": lambda s, t: s.merge([{"k": 3, "n": 4}]).when_matched_update().execute(token=t),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_retry_of_what_landed_was_refused_after_a_drop(machine: Machine, shard: Shard, verb: str) -> None:
    token = machine.client.new_token()
    done = VERBS[verb](shard, token)
    shard.drop(force=True)
    again = VERBS[verb](shard, token)
    assert (again.lower, again.upper) == (done.lower, done.upper)


def test_head_without_columns_showed_no_rows(shard: Shard) -> None:
    shard.insert([{"k": 1}, {"k": 2}])
    assert shard.head(2, columns=[]) == [{}, {}]
    assert shard.head(5, columns=[]) == [{}, {}, {}]


# --- what was left behind


class Rivals(ForwardingTransport):
    """Somebody writes before each of the next commits of a verb."""

    def __init__(self, inner: EmbeddedTransport, write: Callable[[], object]) -> None:
        super().__init__(inner)
        self.left = 0
        self._write = write

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if isinstance(command, c.Rewrite) and self.left:
            self.left -= 1
            self._write()
        return super().apply(name, command, caller)


def test_workings_out_and_refusals_left_writers_registered(machine: Machine, shard: Shard) -> None:
    rivals = Rivals(EmbeddedTransport(machine.location), lambda: shard.insert([{"k": 1, "n": 1}]))
    table = Client(rivals).shard("t")
    before = len(machine.location.machine("t").refresh().writers)
    rivals.left = 10
    assert table.update({"n": pc.add(pc.field("n"), 1)}).retries == 10
    rivals.left = 1
    with pytest.raises(UpperMismatch):
        table.update({"n": 5}, read_time=shard.upper().element - 1)  # type: ignore[operator]
    assert len(machine.location.machine("t").refresh().writers) == before


@pytest.mark.parametrize("call", [lambda s: s.update({"n": 1}), lambda s: s.snapshot(0).to_arrow()])
def test_a_call_that_was_given_up_left_its_hold(tmp_path: Path, call: Callable[[Shard], object]) -> None:
    with connect(f"persist://{tmp_path}") as client:
        shard = client.create_shard("t", SCHEMA, ["k"])
        shard.insert([{"k": 1}])
        location = client.transport.location  # type: ignore[attr-defined]
        plain, came, goes_on, landed = location.consensus.compare_and_set, *(threading.Event() for _ in range(3))

        def late(*args: Any, **options: Any) -> Any:
            came.set()
            goes_on.wait(WAIT_S)
            found = plain(*args, **options)
            landed.set()
            return found

        location.consensus.compare_and_set = late
        while not came.is_set():  # a slow machine may give up before anything is committed
            with pytest.raises(Unavailable):
                call(shard.with_timeout(0.3))
        goes_on.set()
        assert landed.wait(WAIT_S)
        wait_until(lambda: not location.machine("t").refresh().leased_readers, "the hold is given back")
        shard.drop()
