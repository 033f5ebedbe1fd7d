"""Pipelined writers land every event exactly once and in order, whatever dies and whichever answers are lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist import EVENT_COUNT, AttributeUpdate, PipelinedWriter, PipelineSettings, Shard, WriteHandle
from persist.core.errors import AttributeMismatch, ConstraintViolated, Indeterminate, InvalidUsage, PersistError
from persist.parts.schema_changes import AddColumn, RenameColumn
from tests.support.examples import size
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("writer", pa.string()), ("number", pa.int64())])
WRITERS = 16
NAME = "events"


def event(writer: str, number: int) -> list[dict[str, object]]:
    return [{"writer": writer, "number": number}]


def landed(shard: Shard) -> dict[str, list[tuple[int, int]]]:
    """By writer, the time and number of each event, ordered; an event that is there twice fails."""
    found: dict[str, list[tuple[int, int]]] = {}
    for heard in shard.listen(None, until=shard.upper()):
        for row in heard.updates.to_pylist():
            assert row["__diff"] == 1, f"{row} is there {row['__diff']} times"
            found.setdefault(row["writer"], []).append((row["__time"], row["number"]))
    return {writer: sorted(events) for writer, events in found.items()}


def check(shard: Shard, count: int, writers: int = WRITERS) -> None:
    """Every event of every writer is there once, and at no earlier time than the one before it."""
    found = landed(shard)
    assert sorted(found) == sorted(f"w{n}" for n in range(writers))
    for writer, events in found.items():
        assert [number for _, number in events] == list(range(1, count + 1)), f"{writer} lost, doubled or reordered"
    assert shard.attributes.get(EVENT_COUNT) == writers * count


def write_all(shard: Shard, writer: str, count: int, dies: Callable[[], bool], seen: list[int]) -> None:
    """Append the events 1 to `count`, as a program that is killed now and then and goes on where the shard says."""
    while True:
        try:
            pipe = shard.pipelined_writer(writer, PipelineSettings(window_appends_max=40))
            assert pipe.acknowledged >= max(seen, default=0), "an acknowledged event is gone"
            for number in range(pipe.acknowledged + 1, count + 1):
                assert pipe.append(event(writer, number)) == number
                if dies():
                    break
            else:
                pipe.close()
                seen.append(pipe.acknowledged)
                return
            seen.append(pipe.acknowledged)
            abandoned.append(pipe)  # as after a crash: what is under way may land later
        except AttributeMismatch:
            raise
        except PersistError:
            continue  # open anew


abandoned: list[PipelinedWriter] = []


@pytest.fixture(autouse=True)
def stop_the_abandoned() -> Iterator[None]:
    yield
    while abandoned:
        abandoned.pop().abandon()


def run_writers(shards: list[Shard], count: int, seed: int, death: float) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        generator = random.Random(seed * 100 + number)
        try:
            write_all(shards[number % len(shards)], f"w{number}", count, lambda: generator.random() < death, [])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.smoke
@pytest.mark.proof
def test_sixteen_writers_through_two_servers_that_are_killed(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    appends = size(40, 150)
    servers = [Server(directory), Server(directory)]
    ports = [server.port for server in servers]
    done = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        generator = random.Random(1)
        while not done.wait(1.0):
            victim = generator.randrange(2)
            servers[victim].kill()
            kills += 1
            servers[victim] = Server(directory, "--port", str(ports[victim]))

    killer = threading.Thread(target=kill)
    try:
        with persist.connect(",".join(server.url for server in servers)) as client:
            shard = client.create_shard(NAME, SCHEMA, ["writer"])
            killer.start()
            run_writers([shard], appends, seed=3, death=0.005)
            while kills < 2:  # the writers may have been faster than the killer
                done.wait(0.1)
            done.set()
            killer.join()
            check(shard, appends)
    finally:
        done.set()
        for server in servers:
            server.kill()


@pytest.fixture
def shard() -> Iterator[Shard]:
    with persist.connect(blob="mem:", consensus="mem:") as client:
        yield client.create_shard(NAME, SCHEMA, ["writer"])


def test_appends_are_numbered_and_acknowledged(shard: Shard) -> None:
    with shard.pipelined_writer("w") as writer:
        assert writer.acknowledged == 0
        assert [writer.append(event("w", n)) for n in range(1, 6)] == [1, 2, 3, 4, 5]
        writer.flush()
        assert writer.acknowledged == 5
    with shard.pipelined_writer("w") as again, shard.pipelined_writer("other") as other:
        assert (again.acknowledged, other.acknowledged) == (5, 0)
        assert again.append(event("w", 6)) == 6
    assert [number for _, number in landed(shard)["w"]] == [1, 2, 3, 4, 5, 6]


def test_rows_that_do_not_fit_are_refused_at_once_and_harm_nothing(shard: Shard) -> None:
    with shard.pipelined_writer("w") as writer:
        writer.append(event("w", 1))
        for rows in ([{"writer": "w", "number": "x"}], [{"nobody": 1}], 7, pa.table({"__time": [1]})):
            with pytest.raises(InvalidUsage):
                writer.append(rows)
        assert writer.append(pa.RecordBatch.from_pylist(event("w", 2), schema=SCHEMA)) == 2
        assert writer.append(iter(event("w", 3))) == 3
        assert writer.append(tuple(event("w", 4))) == 4
    assert [number for _, number in landed(shard)["w"]] == [1, 2, 3, 4]


def test_equal_rows_of_several_appends_may_come_to_more_than_one_part_takes(shard: Shard) -> None:
    """They were put in one part, whose sum was refused: that stopped the writer, with whatever came after."""
    most, row = 2**32, {"writer": "w", "number": 1}
    with shard.pipelined_writer("w") as writer:
        for diff in (most, 1, 2, -5):
            writer.append([{**row, "__diff": diff}])
        for rows in ([{**row, "__diff": most + 1}], [{**row, "__diff": most}, {**row, "__diff": 1}]):
            with pytest.raises(InvalidUsage, match="multiplicity"):
                writer.append(rows)
        writer.append([{**row, "__diff": most}, {**row, "__diff": -1}])
    found = shard.snapshot().to_arrow().to_pylist()
    assert found == [{**row, "__diff": most + 1 + 2 - 5 + most - 1}]


def test_a_second_instance_ends_the_first(shard: Shard) -> None:
    first = shard.pipelined_writer("w")
    first.append(event("w", 1))
    first.flush()
    second = shard.pipelined_writer("w")
    first.append(event("w", 2))
    with pytest.raises(AttributeMismatch, match="opened elsewhere"):
        first.flush()
    with pytest.raises(AttributeMismatch):
        first.append(event("w", 3))
    first.abandon()
    assert second.append(event("w", 2)) == 2
    second.close()
    assert [number for _, number in landed(shard)["w"]] == [1, 2]


def test_a_closed_writer_takes_no_more(shard: Shard) -> None:
    writer = shard.pipelined_writer("w")
    writer.close()
    with pytest.raises(InvalidUsage, match="closed"):
        writer.append(event("w", 1))


def hold_commits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Inserts of writers set the first event, and wait for the second before they commit."""
    sending, go_on = threading.Event(), threading.Event()
    commit = WriteHandle.commit_insert

    def held_up(self: WriteHandle, *args: Any, **given: Any) -> Any:
        sending.set()
        assert go_on.wait(WAIT_S)
        return commit(self, *args, **given)

    monkeypatch.setattr(WriteHandle, "commit_insert", held_up)
    return sending, go_on


def test_a_writer_that_was_abandoned_with_appends_not_sent_says_so(shard: Shard, monkeypatch: Any) -> None:
    """Flush and close waited for ever for appends that no thread was going to send."""
    sending, go_on = hold_commits(monkeypatch)
    writer = shard.pipelined_writer("w")
    told: list[BaseException] = []

    def flush() -> None:
        try:
            writer.flush()
        except PersistError as error:
            told.append(error)

    writer.append(event("w", 1))
    assert sending.wait(WAIT_S)
    for number in range(2, 5):
        writer.append(event("w", number))
    threads = [threading.Thread(target=work, daemon=True) for work in (flush, writer.abandon)]
    for thread in threads:
        thread.start()
    wait_until(lambda: writer._closing, "the writer is told to end")
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in told] == [InvalidUsage], "who waits already hears of it, too"
    for ends in (writer.flush, writer.close, lambda: writer.append(event("w", 5))):
        with pytest.raises(InvalidUsage, match="abandoned with 3 appends not sent"):
            ends()
    writer.abandon()
    assert writer.acknowledged == 1
    assert landed(shard) == {"w": [(0, 1)]}


def test_a_shard_that_is_closed_stops_the_writer(shard: Shard) -> None:
    writer = shard.pipelined_writer("w")
    shard.advance_upper(None)
    writer.append(event("w", 1))
    with pytest.raises(PersistError, match="closed"):
        writer.flush()
    writer.abandon()


def test_a_try_without_an_answer_is_not_denied_by_the_end_of_the_client(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [Indeterminate("no answer"), InvalidUsage("this client was closed")]

    def commit(*_given: object, **_options: object) -> None:
        raise tries.pop(0)

    pipe = shard.pipelined_writer("w")
    monkeypatch.setattr(WriteHandle, "commit_insert", commit)
    pipe.append(event("w", 1))
    with pytest.raises(Indeterminate, match="no answer"):
        pipe.flush()
    assert not tries


def test_constraints_that_become_stricter_stop_only_rows_that_break_them(shard: Shard) -> None:
    writer = shard.pipelined_writer("w")
    writer.append(event("w", 1))
    writer.flush()
    shard.set_constraints(checks={"few": "number < 100"})
    writer.append(event("w", 2))
    writer.flush()
    shard.set_constraints(checks={"few": "number < 90"})
    writer.append(event("w", 95))
    with pytest.raises(ConstraintViolated):
        writer.flush()
    writer.abandon()
    with shard.pipelined_writer("w") as again:  # by the handle from before
        assert again.acknowledged == 2
        again.append(event("w", 3))
    assert len(landed(shard)["w"]) == 3


def test_rows_that_wait_keep_the_columns_that_they_had_when_they_were_appended(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were staged by the names of later rows, by which two columns had exchanged theirs."""
    sending, go_on = hold_commits(monkeypatch)
    with shard.pipelined_writer("w") as writer:
        writer.append(event("w", 1))
        assert sending.wait(WAIT_S)
        shard.alter(AddColumn("p", pa.string()), AddColumn("q", pa.string()))
        writer.append([{**event("w", 2)[0], "p": "P", "q": "Q"}])
        shard.alter(RenameColumn("p", "p2"), RenameColumn("q", "q2"))
        writer.append([{**event("w", 3)[0], "p2": "P", "q2": "Q"}])
        shard.alter(RenameColumn("p2", "q"), RenameColumn("q2", "p"))
        writer.append([{**event("w", 4)[0], "q": "P", "p": "Q"}])
        go_on.set()
    rows = {row["number"]: (row["p"], row["q"]) for row in shard.snapshot().to_arrow().to_pylist()}
    assert rows == {1: (None, None), 2: ("Q", "P"), 3: ("Q", "P"), 4: ("Q", "P")}


def test_the_window_is_bounded(shard: Shard) -> None:
    settings = PipelineSettings(window_appends_max=3)
    with shard.pipelined_writer("w", settings) as writer:
        for number in range(1, 30):
            writer.append(event("w", number))
            assert number - writer.acknowledged <= 3
    assert len(landed(shard)["w"]) == 29


def test_attributes_through_handles(shard: Shard) -> None:
    keys = [f"{number:032x}" for number in range(1 << 20, (1 << 20) + 2_500)]
    for first in range(0, 2_500, 500):
        shard.attributes.update([AttributeUpdate.replace(key, first) for key in keys[first : first + 500]])
    assert shard.attributes.get_many(keys) == {key: index // 500 * 500 for index, key in enumerate(keys)}
    assert list(shard.attributes.scan(keys[1_000], keys[1_500])) == [(key, 1_000) for key in keys[1_000:1_500]]
    assert [key for key, _ in shard.attributes.scan()] == keys
    with pytest.raises(AttributeMismatch) as refused:
        shard.insert(event("w", 1), attributes=AttributeUpdate.replace_if_equals(keys[0], 1, 7))
    assert refused.value.details == {"actual": {keys[0]: 0}}
    assert shard.attributes.get(EVENT_COUNT) == 0
