"""A call that was refused has changed nothing, also where it is made of several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist import Client, InvalidUsage, NotReadable, UpperMismatch
from persist.core import commands as c
from persist.core.ids import CriticalReaderId
from persist.core.transitions import reader_holds
from tests.support.embedded import client_of
from tests.support.location import memory_location
from tests.support.server import url_of
from tests.support.shard import Shard, numbered

SCHEMA = pa.schema([("id", pa.int64())])


BY_BOTH = pytest.mark.parametrize("client", ["directory", "server"], indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    with url_of(getattr(request, "param", "directory"), tmp_path) as url, persist.connect(url) as client:
        yield client


@BY_BOTH
def test_a_downgrade_that_is_refused_takes_no_hold(client: Client) -> None:
    """The cursor of a typo held since at 0 for ever, so that neither history nor the shard could go."""
    shard = client.create_shard("orders", SCHEMA, ["id"], history="none")
    for number in range(2):
        shard.insert([{"id": number}])
    with pytest.raises(InvalidUsage, match="beyond the upper"):
        shard.downgrade_since(1000, "typo")
    assert shard.downgrade_since(2, "mine").to_json() == [2]
    shard.critical_reader("mine").expire()
    shard.drop()


def test_a_shard_that_is_told_to_be_dropped_can_be_dropped(client: Client) -> None:
    """Giving up all reads of a closed shard is refused with "drop it"; the drop was refused by the hold of that."""
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.advance_upper(None)
    with pytest.raises(InvalidUsage, match="drop it"):
        shard.downgrade_since(None)
    shard.drop()


def test_a_hold_that_is_there_stays_where_it_is_when_its_downgrade_is_refused(client: Client) -> None:
    shard = client.create_shard("orders", SCHEMA, ["id"], history="none")
    shard.insert([{"id": 1}])
    assert shard.downgrade_since(1, "mine").to_json() == [1]
    with pytest.raises(InvalidUsage, match="beyond the upper"):
        shard.downgrade_since(5, "mine")
    assert shard.critical_reader("mine").since.to_json() == [1]
    assert shard.downgrade_since(5, "mine", force=True).to_json() == [5]


@BY_BOTH
def test_a_shard_is_closed_to_reads_by_force_and_never_while_it_has_a_tag(client: Client) -> None:
    """One call, of a job that had lost its time, ended a history that is kept for ever, and a tag with it."""
    shard = client.create_shard("orders", SCHEMA, ["id"], history="forever")
    for number in range(2):
        shard.insert([{"id": number}])
    shard.tag("audit", at=0)
    for close in (shard.critical_reader("mine").downgrade_since, shard.downgrade_since):
        with pytest.raises(InvalidUsage, match="to reads for ever"):
            close(None)
    assert shard.downgrade_since(None, "mine", force=True).to_json() == [0]
    assert shard.snapshot(tag="audit").to_arrow().num_rows == 1
    shard.untag("audit")
    assert shard.downgrade_since(None, "mine").to_json() == []
    with pytest.raises(NotReadable):
        shard.snapshot().to_arrow()


def test_a_cursor_has_at_most_256_characters(client: Client) -> None:
    shard = client.create_shard("orders", SCHEMA, ["id"])
    assert shard.critical_reader("c" * 256).since.to_json() == [0]
    with pytest.raises(InvalidUsage, match="the cursor has 257 characters; at most 256"):
        shard.critical_reader("c" * 257)


def test_a_writer_that_was_closed_registers_anew_when_it_is_used(client: Client) -> None:
    """It raised Expired, which no docstring names."""
    shard = client.create_shard("orders", SCHEMA, ["id"])
    writer = shard.open_writer()
    for number in range(3):
        writer.insert([{"id": number}])
        writer.close()
    assert shard.snapshot().to_arrow().num_rows == 3


def test_writes_that_are_refused_register_nobody() -> None:
    """Each refusal left a writer behind for the length of its lease: enough of them, and nobody could write."""
    location = memory_location()
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
    for _ in range(5):
        with pytest.raises(UpperMismatch):
            shard.compare_and_append([{"id": 1}], 7, 8)
    assert not location.machine("orders").state().writers


def test_cursors_of_a_shard_are_bounded_and_one_that_is_given_up_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of readers and writers are in tests/scripts/step."""
    monkeypatch.setattr(reader_holds, "CURSORS_MAX", 1)
    shard = Shard()
    first, second = (CriticalReaderId(numbered("c", n)) for n in (1, 2))
    for _ in range(2):  # the same again is no new one
        shard.one(c.RegisterCriticalReader(first, "", "one"))
    with pytest.raises(InvalidUsage, match="has 1 cursors, which is the maximum"):
        shard.one(c.RegisterCriticalReader(second, "", "two"))
    shard.one(c.ExpireCriticalReader(first, ""))
    shard.one(c.RegisterCriticalReader(second, "", "two"))


# --- what was staged is committed once, and to the shard for which it was staged


TEXTS = pa.schema([pa.field("k", pa.string())])
SMALL, LARGE = pa.table({"k": ["staged"]}), pa.table({"k": [f"{number:030}" for number in range(10_000)]})
MERGED_AFTER = 40  # inserts after which the first rows have been merged with others


def seen(shard: persist.Shard) -> list[str]:
    if shard.upper().element == 0:
        return []
    return sorted(shard.snapshot().to_arrow(expand=True).column("k").to_pylist())


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_staged_rows_are_committed_once_also_after_they_were_merged(client: Client, rows: pa.Table) -> None:
    """Small ones were inline, and once they had been merged with others they counted twice."""
    shard = client.create_shard("orders", TEXTS, ["k"])
    with closing(shard.open_writer()) as writer:
        staged = writer.stage(rows, None)
        writer.commit_insert(staged)
        with pytest.raises(InvalidUsage, match="must not count twice"):
            writer.commit_insert(staged)
        for number in range(MERGED_AFTER):
            shard.insert([{"k": f"x{number}"}])
        for again in (writer, shard.open_writer()):
            with pytest.raises(InvalidUsage, match="must not count twice"):
                again.commit_insert(staged)
    assert seen(shard) == sorted(rows.column("k").to_pylist() + [f"x{number}" for number in range(MERGED_AFTER)])


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_rows_that_were_staged_for_a_shard_go_to_no_other_one(client: Client, rows: pa.Table) -> None:
    """Small ones were inline, and went to whatever shard they were committed to."""
    orders, other = (client.create_shard(name, TEXTS, ["k"]) for name in ("orders", "other"))
    staged = orders.open_writer().stage(rows, None)
    with pytest.raises(InvalidUsage, match="does not belong to shard 'other'"):
        other.open_writer().commit_insert(staged)
    orders.open_writer().commit_insert(staged)
    assert (len(seen(orders)), seen(other)) == (len(rows), [])


@BY_BOTH
@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_rows_that_were_staged_for_an_earlier_life_go_to_no_later_one(client: Client, rows: pa.Table) -> None:
    """Small ones were inline, and the next shard of the name took them."""
    shard = client.create_shard("orders", TEXTS, ["k"])
    committed, never = (shard.open_writer().stage(rows, None) for _ in range(2))
    shard.open_writer().commit_insert(committed)
    shard.drop(force=True)
    following = client.create_shard("orders", TEXTS, ["k"])
    for staged in (committed, never):
        take: Callable[[], object] = lambda s=staged: following.open_writer().commit_insert(s)  # noqa: E731
        with pytest.raises(InvalidUsage, match="does not belong to shard 'orders'"):
            take()
    assert seen(following) == []
