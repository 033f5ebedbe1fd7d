"""What becomes of entries of the audit: they are written behind requests, in batches, once; none is lost in silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.errors import Indeterminate, Unavailable
from persist.core.ids import AUDIT_SHARD, CriticalReaderId, ReaderId, SeqNo, Token, WriterId
from persist.core.recorded import NOBODY, Caller
from persist.core.row_policy import RowPolicy
from persist.core.state import SchemaRecord
from rpc.audit import LOST, USE, USE_EVERY_S, Audit, Entry
from rpc.audited import DETAIL_CHARS_MAX, OFTEN, detail_of, did, of_command, of_query
from tests.support.location import memory_location
from tests.support.waiting import wait_until

REQUESTS = [
    # method, what is after the shard's name (or a path without a shard), query -> what it is called
    ("PUT", "", "", "create"),
    ("DELETE", "", "force=true", "drop"),
    ("GET", "", "", None),
    ("POST", "insert", "", None),
    ("POST", "append", "lower=0&upper=7", None),
    ("POST", "append", "lower=0&upper=[]", "close"),
    ("POST", "append", "lower=0&upper=closed", "close"),
    ("POST", "compare-and-append", "expected_upper=0&new_upper=7", None),
    ("POST", "compare-and-append", "expected_upper=0&new_upper=[]", "close"),
    ("GET", "snapshot", "", None),
    ("POST", "advance-upper", "upper=7", "move upper"),
    ("POST", "advance-upper", "upper=[]", "close"),
    ("POST", "advance-upper", "upper=closed", "close"),
    ("POST", "downgrade-since", "since=7", "move cursor"),
    ("POST", "forget", "before=7", "forget history"),
    ("PUT", "settings", "", "settings"),
    ("GET", "settings", "", None),
    ("PUT", "retention", "", "retention"),
    ("POST", "retention/run", "", "run retention"),
    ("PUT", "tags/x", "", "set tag"),
    ("DELETE", "tags/x", "", "remove tag"),
    ("GET", "tags/x", "", None),
    ("POST", "restore", "to=7", "restore"),
    ("POST", "truncate", "", "truncate"),
    ("POST", "overwrite", "", "overwrite"),
    ("POST", "erasures", "", "erase"),
    ("POST", "optimize", "", "optimize"),
    ("POST", "vacuum", "", "vacuum"),
    ("POST", "/v1/clones", "", "clone"),
    ("POST", "/v1/truncate", "", "truncate"),
    ("POST", "/v1/shards:delete", "", "drop"),
    ("PUT", "/nowhere", "", None),
]


@pytest.mark.parametrize(("method", "rest", "query", "what"), REQUESTS)
def test_requests_that_have_an_entry(method: str, rest: str, query: str, what: str | None) -> None:
    path, shard = (rest, None) if rest.startswith("/") else (f"/v1/shards/a/{rest}", ("a", rest))
    scope = {"method": method, "path": path, "query_string": query.encode()}
    found = did(scope, shard)
    assert (None if found is None else found[0]) == what


TOLD: list[tuple[c.Command, tuple[str, dict[str, Any]] | None]] = [
    (c.Drop(True), ("drop", {"force": True})),
    (c.AdvanceUpper(Antichain(7)), ("move upper", {"upper": [7]})),
    (c.AdvanceUpper(Antichain(None)), ("close", {})),
    (c.SetTag("x", 7), ("set tag", {"tag": "x", "time": 7})),
    (
        c.SetSettings(1, 0, 1_000, RowPolicy(age_ms=1_000)),
        ("settings", {"expected_version": 1, "history_ms": 0, "mark_every_ms": 1_000, "rows": str}),
    ),
    (
        c.CompareAndDowngradeSince(CriticalReaderId("c" + "1" * 32), "", "", Antichain(7)),
        ("move cursor", {"force": False, "reader": "c" + "1" * 32, "since": [7]}),
    ),
    (
        c.DowngradeSince(ReaderId("r" + "1" * 32), Antichain(7), SeqNo(1)),
        ("move since", {"reader": "r" + "1" * 32, "since": [7]}),
    ),
    (c.MoveHold(ReaderId("r" + "1" * 32), Antichain(7), SeqNo(1)), None),
    (c.Insert(WriterId("w" + "1" * 32), Token("i" + "1" * 32), ()), None),
    (c.ReadTags(), None),
    (c.Append(WriterId("w" + "1" * 32), Token("i" + "1" * 32), Antichain(0), Antichain(7), ()), None),
    (c.Append(WriterId("w" + "1" * 32), Token("i" + "1" * 32), Antichain(0), Antichain(None), ()), ("close", {})),
    (
        c.CompareAndAppend(WriterId("w" + "1" * 32), Token("i" + "1" * 32), Antichain(0), Antichain(None), ()),
        ("close", {}),
    ),
    (
        c.Edit(WriterId("w" + "1" * 32), Token("i" + "1" * 32), Antichain(0), 1, (), verb="overwrite"),
        ("overwrite", {"as_of": 1}),
    ),
    (c.Edit(WriterId("w" + "1" * 32), Token("i" + "1" * 32), Antichain(0), 1, (), verb="upsert"), None),
    (
        c.Reshape(
            WriterId("w" + "1" * 32),
            Token("i" + "1" * 32),
            Antichain(0),
            1,
            (),
            verb="overwrite",
            expected_id=1,
            schema=SchemaRecord(b"", ()),
        ),
        ("overwrite", {"as_of": 1}),
    ),
]


@pytest.mark.parametrize(("command", "told"), TOLD)
def test_commands_that_have_an_entry(command: c.Command, told: tuple[str, dict[str, Any]] | None) -> None:
    found = of_command(command)
    if found is not None and "rows" in found[1]:
        assert "'age_ms': 1000" in found[1]["rows"]
        found[1]["rows"] = str
    assert found == told


def test_what_is_told_has_a_bound_and_no_token_of_the_caller() -> None:
    assert of_query("tags/nightly", b"token=load-7&keep=1d") == {"tag": "nightly", "keep": "1d"}
    many = "&".join(f"n{n}={'x' * 1000}" for n in range(100)).encode()
    assert len(detail_of(of_query("", many))) <= DETAIL_CHARS_MAX


class Stores(EmbeddedTransport):
    """A location in memory, of which tests say when it takes writes."""

    def __init__(self) -> None:
        super().__init__(memory_location())
        self.open = threading.Event()
        self.open.set()
        self.unanswered = 0  # so many commits are done, and not answered

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if not self.open.is_set():
            raise Unavailable("the stores are away")
        found = super().apply(name, command, caller)
        if isinstance(command, c.Insert) and self.unanswered:
            self.unanswered -= 1
            raise Indeterminate("no answer came")
        return found

    def rows(self) -> list[dict[str, Any]]:
        shard = Client(self, HandleSettings()).shard(AUDIT_SHARD)
        with shard.snapshot() as snapshot:
            found: list[dict[str, Any]] = snapshot.to_arrow().to_pylist()
            return found


@contextmanager
def audit(stores: Stores, kept: str | None = "90d", queued_max: int = 100) -> Iterator[Audit]:
    with closing(Audit(stores, kept, queued_max=queued_max, every_s=0.001)) as found:
        yield found


@pytest.fixture
def stores() -> Iterator[Stores]:
    with closing(Stores()) as found:
        yield found


def test_entries_are_rows_of_a_shard_that_forgets_them_by_age(stores: Stores) -> None:
    with audit(stores, "30d") as found:
        found.note(Entry("etl", "drop", "eu/a", 200, "10.0.0.1", "request-1", {"force": True}))
    (row,) = stores.rows()
    assert (row["token"], row["what"], row["shard"], row["status"], row["count"]) == ("etl", "drop", "eu/a", 200, 1)
    assert (row["address"], row["request_id"], row["detail"]) == ("10.0.0.1", "request-1", '{"force":true}')
    policy = stores.location.machine(AUDIT_SHARD).state().settings.rows
    assert policy is not None
    assert (policy.age_ms, policy.mode) == (30 * 24 * 3600 * 1000, "drop")
    with audit(stores, "forever") as found:
        found.note(Entry("etl", "drop", "eu/b", 200))
    assert stores.location.machine(AUDIT_SHARD).state().settings.rows is None, (
        "the setting holds from the next start on"
    )
    assert len(stores.rows()) == 2


def test_what_was_not_answered_is_written_once(stores: Stores) -> None:
    stores.unanswered = 3
    with audit(stores) as found:
        found.note(Entry("etl", "drop", "eu/a", 200))
        wait_until(lambda: not figures(found)["persist_audit_queued"], "it is written")
    assert [row["what"] for row in stores.rows()] == ["drop"]


def test_while_the_stores_are_away_entries_wait_and_what_finds_no_room_is_told(stores: Stores) -> None:
    stores.open.clear()
    with audit(stores, queued_max=10) as found:
        for number in range(20):
            found.note(Entry("noisy", "drop", f"eu/{number}", 200))
        found.note(Entry("quiet", "drop", "eu/quiet", 200))
        wait_until(lambda: figures(found)["persist_audit_failures_total"] > 0, "it is tried")
        lost = figures(found)["persist_audit_lost_total"]
        assert 0 < lost <= 15
        stores.open.set()
    rows = stores.rows()
    assert "eu/quiet" in {row["shard"] for row in rows}, "one token takes no more than half of the room"
    assert sum(row["count"] for row in rows if row["what"] == LOST) == lost
    assert sum(row["what"] == "drop" for row in rows) == 21 - lost


@pytest.mark.parametrize("what", [*sorted(OFTEN), "drop"])
def test_what_comes_often_is_one_entry_with_a_count(what: str, stores: Stores) -> None:
    stores.open.clear()
    with audit(stores) as found:
        for number in range(1_000):
            found.note(Entry("etl", what, "eu/a", 200 if what in OFTEN else 403, request_id=str(number)))
        stores.open.set()
    rows = stores.rows()
    assert sum(row["count"] for row in rows) == 1_000
    assert len(rows) <= 2, "one may have been taken out to be written when the rest came"
    assert rows[-1]["request_id"] == "999"


def test_the_first_use_of_a_token_is_told_and_then_once_an_hour(stores: Stores) -> None:
    clock: Any = stores.location.clock
    with audit(stores) as found:
        for _ in range(10):
            found.use("etl", "10.0.0.1")
        clock.advance_ms(int(USE_EVERY_S * 1000) + 1)
        for _ in range(10):
            found.use("etl", "10.0.0.2")
    assert [(row["what"], row["count"], row["address"]) for row in stores.rows()] == [
        (USE, 1, "10.0.0.1"),
        (USE, 10, "10.0.0.2"),
    ]


def test_without_an_audit_nothing_is_made(stores: Stores) -> None:
    with audit(stores, None) as found:
        found.note(Entry("etl", "drop", "eu/a", 200))
        found.use("etl", None)
    assert stores.location.names() == []


def test_the_end_of_a_server_waits_for_no_store_that_is_away(stores: Stores) -> None:
    stores.open.clear()
    with audit(stores) as found:
        found.note(Entry("etl", "drop", "eu/a", 200))
    assert figures(found)["persist_audit_lost_total"] == 1


def figures(audit: Audit) -> dict[str, float]:
    return {family.name: float(family.samples[0][1]) for family in audit.families()}  # type: ignore[arg-type]


def test_tokens_that_fill_the_queue_push_out_no_others(stores: Stores) -> None:
    """Refused requests with made-up names each have an entry: two tokens left others 66 of 101."""
    stores.open.clear()
    with audit(stores) as found:
        for number in range(500):
            for token in ("evil-1", "evil-2"):
                found.note(Entry(token, "drop", f"x/{number}", 404))
        for number in range(20):
            found.note(Entry("good", "drop", f"good/{number}"))
        lost = figures(found)["persist_audit_lost_total"]
        stores.open.set()
    rows = stores.rows()
    assert {row["shard"] for row in rows if row["token"] == "good"} == {f"good/{number}" for number in range(20)}
    assert sum(row["count"] for row in rows if row["what"] == LOST) == lost
    assert sum(row["what"] == "drop" for row in rows) == 1_020 - lost
