"""Tables in WAL mode: each update is in the log once, and the table has at each time what the log has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from persist.client.client import Client
from persist.core.errors import AttributeMismatch, Conflict, Indeterminate, InvalidUsage, Unavailable
from persist.sources import wal
from persist.sources.wal import FrontEnd, Replica
from tests.support.bound import Processes
from tests.support.examples import walks
from tests.support.location import client_of, memory_location

ROWS = pa.schema([("id", pa.int64()), ("word", pa.string())])
STEPS = 50


class Lossy:
    """A writer that a rival comes before, and whose requests or answers are lost."""

    def __init__(self, writer: Any, act: Callable[[], None], chosen: random.Random) -> None:
        self._writer, self._act, self._chosen = writer, act, chosen

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            fate = self._chosen.random()
            if fate < 0.2:
                self._act()
            if 0.7 < fate < 0.8:
                raise Indeterminate("nobody got it")
            found = getattr(self._writer, name)(*args, **options)
            if fate > 0.8:
                raise Indeterminate("the answer was lost")
            return found

        return called


class Story:
    """Front ends and replicas by a seed. The model is a list of what was acknowledged, with its time."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.processes = Processes()
        self.processes.client().create_shard("log", ROWS, ["id"])
        self.model: list[tuple[int, dict[str, Any]]] = []
        self.acting = False
        self.replicas = [self.replica(), self.replica()]
        self.front_ends = [self.front_end("f0"), self.front_end("f1")]

    def front_end(self, name: str) -> FrontEnd:
        found = FrontEnd(self.processes.client().shard("log"), name)
        found._writer = Lossy(found._writer, self.other, self.chosen)  # type: ignore[assignment]
        return found

    def replica(self) -> Replica:
        found = Replica.open(self.processes.client(), "log", "table")
        found._writer = Lossy(found._writer, self.other, self.chosen)  # type: ignore[assignment]
        return found

    def other(self) -> None:
        if not self.acting:
            self.acting = True
            with suppress(Indeterminate):
                self.chosen.choice(self.replicas).step()
            self.acting = False

    def rows(self) -> list[dict[str, Any]]:
        held = [row for _, row in self.model if row["__diff"] == 1]
        new = [{"id": self.chosen.randrange(9), "word": f"w{len(self.model)}", "__diff": 1}]
        return new if not held or self.chosen.random() < 0.7 else [*new, {**self.chosen.choice(held), "__diff": -1}]

    def act(self) -> None:
        number = self.chosen.randrange(2)
        match self.chosen.choice(["write", "write", "apply", "kill", "restart", "advance"]):
            case "write":
                rows = self.rows()
                time = self.front_ends[number].write(rows)
                self.model += [(time, row) for row in rows]
            case "apply":
                with suppress(Indeterminate):
                    self.replicas[number].step()
            case "kill":
                self.replicas[number] = self.replica()
            case "restart":
                self.front_ends[number] = self.front_end(f"f{number}")
            case "advance":
                log = self.processes.client().shard("log")
                log.advance_upper((log.upper().element or 0) + 3)

    def check(self) -> None:
        client = self.processes.client()
        replica = Replica.open(client, "log", "table")
        while replica.step():
            pass
        log, table = client.shard("log"), client.shard("table")
        assert table.upper() == log.upper()
        expected = sorted((row["id"], row["word"], time, row["__diff"]) for time, row in self.model)
        for shard in (log, table):
            found = [row for event in shard.listen(-1, until=log.upper()) for row in event.updates.to_pylist()]
            assert sorted(tuple(row.values()) for row in found) == expected
        for time in {self.chosen.randrange(log.upper().element or 1) for _ in range(3)}:
            assert table.snapshot(as_of=time).to_arrow() == log.snapshot(as_of=time).to_arrow()


def check(seed: int) -> None:
    story = Story(seed)
    for _ in range(STEPS):
        story.act()
    story.check()


@pytest.mark.parametrize("seeds", walks(range(4), 26))
def test_the_table_has_at_each_time_what_the_log_has(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check(seed)


# --- parts of it


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        client.create_shard("log", ROWS, ["id"])
        yield client


def test_a_front_end_that_starts_again_ends_the_one_before_it_and_knows_what_has_landed(client: Client) -> None:
    old = FrontEnd(client.shard("log"), "front")
    assert [old.write([{"id": n, "word": "x"}]) for n in range(2)] == [0, 1]
    new = FrontEnd(client.shard("log"), "front")
    assert new.acknowledged == 2
    with pytest.raises(AttributeMismatch, match="opened elsewhere"):
        old.write([{"id": 3, "word": "x"}])
    assert new.write([{"id": 2, "word": "x"}]) == 2
    assert client.shard("log").count() == 3


def test_what_is_not_known_stays_so_until_a_front_end_is_opened_anew(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "WRITE_TRIES_MAX", 2)
    found = FrontEnd(client.shard("log"), "front")

    class Lost:
        def compare_and_append(self, *_: Any, **__: Any) -> None:
            raise Indeterminate("the answer was lost")

    found._writer = Lost()  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(Indeterminate):
            found.write([{"id": 1, "word": "x"}])
    assert FrontEnd(client.shard("log"), "front").acknowledged == 0


def closes(client: Client) -> None:
    client.shard("log").advance_upper(None)


def nobody_answers(client: Client) -> None:
    raise Unavailable("nobody answers")


def has_unique_keys(client: Client) -> None:
    client.shard("log").set_constraints(unique=True)


def has_a_check(client: Client) -> None:
    client.shard("log").insert([{"id": 1, "word": "x", "__diff": -1}])
    client.shard("log").set_constraints(checks={"other": "word <> 'x'"})


@pytest.mark.parametrize("then", [closes, nobody_answers, has_unique_keys, has_a_check])
def test_a_write_that_landed_is_not_called_refused_when_its_answer_was_lost(
    client: Client, then: Callable[[Client], None]
) -> None:
    """The next try was refused, and said that nothing was written. The next write was then taken for that one, and
    lost without a word."""
    found = FrontEnd(client.shard("log"), "front")
    writer = found._writer

    class Lost:
        def compare_and_append(self, *args: Any, **options: Any) -> None:
            writer.compare_and_append(*args, **options)
            found._writer = Then()  # type: ignore[assignment]
            raise Indeterminate("the answer was lost")

    class Then:
        def compare_and_append(self, *args: Any, **options: Any) -> Any:
            found._writer = writer
            then(client)
            return writer.compare_and_append(*args, **options)

    found._writer = Lost()  # type: ignore[assignment]
    assert found.write([{"id": 1, "word": "x"}]) == 0
    assert found.acknowledged == 1
    if then is not closes:
        assert found.write([{"id": 2, "word": "y"}]) > 0
        assert {row["id"] for row in client.shard("log").snapshot().to_arrow().to_pylist()} >= {2}


def test_a_front_end_does_not_go_on_where_a_lost_try_may_still_land(client: Client) -> None:
    found = FrontEnd(client.shard("log"), "front")
    errors = iter([Indeterminate("the answer was lost"), Unavailable("nobody answers")])

    class Lost:
        def compare_and_append(self, *_: Any, **__: Any) -> None:
            raise next(errors)

    found._writer = Lost()  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(Indeterminate, match="the answer was lost"):
            found.write([{"id": 1, "word": "x"}])


def test_a_front_end_that_was_interrupted_does_not_take_another_write_for_that_one(client: Client) -> None:
    found = FrontEnd(client.shard("log"), "front")
    writer = found._writer

    class Interrupted:
        def compare_and_append(self, *args: Any, **options: Any) -> None:
            writer.compare_and_append(*args, **options)
            raise KeyboardInterrupt

    found._writer = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        found.write([{"id": 1, "word": "x"}])
    found._writer = writer
    with pytest.raises(Indeterminate, match=r"write 1 .* was interrupted; reopen front end 'front'"):
        found.write([{"id": 2, "word": "y"}])
    again = FrontEnd(client.shard("log"), "front")
    assert again.acknowledged == 1
    assert again.write([{"id": 2, "word": "y"}]) == 1


def test_rivals_that_are_always_quicker_are_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "WRITE_TRIES_MAX", 3)
    log = client.shard("log")
    found = FrontEnd(log, "front")
    writer = found._writer

    class Late:
        def compare_and_append(self, *args: Any, **options: Any) -> Any:
            log.insert([{"id": 9, "word": "rival"}])
            return writer.compare_and_append(*args, **options)

    found._writer = Late()  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="faster"):
        found.write([{"id": 1, "word": "x"}])
    found._writer = writer
    assert found.write([{"id": 1, "word": "x"}]) == 3
    assert log.count("id = 1") == 1


def test_a_column_that_the_log_gains_comes_to_the_table(client: Client) -> None:
    replica = Replica.open(client, "log", "table")
    log = client.shard("log")
    front = FrontEnd(log, "front")
    front.write([{"id": 1, "word": "x"}])
    assert replica.step()
    log.evolve_schema(pa.schema([*ROWS, ("more", pa.int64())]))
    front.write([{"id": 2, "word": "y", "more": 7}])
    assert replica.step()
    assert client.shard("table").get(2) == [{"id": 2, "word": "y", "more": 7}]


def test_a_log_that_is_closed_closes_the_table(client: Client) -> None:
    front, replica = FrontEnd(client.shard("log"), "front"), Replica.open(client, "log", "table")
    front.write([{"id": 1, "word": "x"}])
    client.shard("log").advance_upper(None)
    assert replica.step()
    assert client.shard("table").upper().is_empty
    assert client.shard("table").count() == 1
    with pytest.raises(Conflict, match="closed"):
        Replica.open(client, "log", "table").step()
    with pytest.raises(Conflict, match="closed"):
        front.write([{"id": 2, "word": "x"}])


def batches() -> Iterator[pa.Table]:
    yield pa.table({"id": [1]})


@pytest.mark.parametrize(
    "rows", [[{"id": 1, "__time": 0}], [{"nothing": 1}], [{"id": "x"}], batches(), "text", pa.table({"id": [0.5]})]
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(client: Client, rows: Any) -> None:
    front = FrontEnd(client.shard("log"), "front")
    with pytest.raises(InvalidUsage):
        front.write(rows)
    assert client.shard("log").upper().element == 0
    assert front.write([{"id": 1, "word": "x"}]) == 0


@pytest.mark.parametrize("name", ["", "x" * 129, 1, None])
def test_a_front_end_has_a_name(client: Client, name: Any) -> None:
    with pytest.raises(InvalidUsage):
        FrontEnd(client.shard("log"), name)


def test_a_table_with_another_key_or_other_columns_is_none_of_this_log(client: Client) -> None:
    other = client.create_shard("table", ROWS, ["word"])
    with pytest.raises(InvalidUsage, match="they must be the same"):
        Replica(client.shard("log"), other)
    client.create_shard("wider", pa.schema([*ROWS, ("more", pa.int64())]), ["id"])
    with pytest.raises(InvalidUsage, match="never had"):
        Replica.open(client, "log", "wider")
