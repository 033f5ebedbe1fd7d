"""One writer over several shards: each append once, in order by key, through restarts and changes of their number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.client.client import Client
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    ConstraintViolated,
    Indeterminate,
    InvalidUsage,
    Unavailable,
    UnknownShard,
)
from persist.parts.schema_changes import AddColumn, RenameColumn
from persist.sources.partition_map import BASE, MODULUS, Routes, hashes_of
from persist.sources.routed import RoutedPosition, RoutedReader, RoutedWriter, _Lane, read_routed
from persist.sources.sequenced_writer import SequencedWriter
from tests.support.bound import Processes
from tests.support.examples import walks
from tests.support.location import client_of, memory_location

ROWS = pa.schema([("key", pa.string()), ("who", pa.string()), ("number", pa.int64())])
SHARDS = ["s0", "s1", "s2", "s3"]
STEPS = 30


class Lossy:
    """A writer before whose commits others act, or whose requests or answers are lost."""

    def __init__(self, writer: Any, act: Callable[[], None], chosen: random.Random) -> None:
        self._writer, self._act, self._chosen = writer, act, chosen

    def check(self, rows: Any) -> None:
        self._writer.check(rows)

    def insert(self, *args: Any, **options: Any) -> Any:
        fate = self._chosen.random()
        if fate < 0.1:
            self._act()
        if 0.8 < fate < 0.85:
            raise Indeterminate("nobody got it")
        found = self._writer.insert(*args, **options)
        if fate > 0.9:
            raise Indeterminate("the answer was lost")
        return found


class InTurn:
    """Sends to one shard after the other, so that a story follows from its seed."""

    def map(self, send: Callable[[int], Any], slots: Any) -> list[Any]:
        return [send(slot) for slot in slots]


class Story:
    """Writers by a seed, one acting at a time. The model: what each has appended, in the order of all."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.processes = Processes()
        client = self.processes.client()
        for name in SHARDS:
            client.create_shard(name, ROWS, ["key"], history="forever")
        Routes.open(client, "routes", SHARDS[:2], by=["key"])
        self.sources: dict[str, list[list[dict[str, Any]]]] = {"w0": [], "w1": []}
        self.order: list[dict[str, Any]] = []
        self.writers = {name: self.opened(name) for name in self.sources}
        self.reader = RoutedReader(Routes.open(self.processes.client(), "routes"))
        self.read: list[dict[str, Any]] = []
        self.epochs = 1

    def opened(self, name: str) -> RoutedWriter:
        while True:
            with suppress(Indeterminate):
                found = RoutedWriter(Routes.open(self.processes.client(), "routes"), name)
                break
        assert len(self.sources[name]) - 1 <= found.acknowledged + 1
        writers = {name: found._writers.get(name) or found.routes.of(name).open_writer() for name in SHARDS}
        lossy = {shard: Lossy(writer, self.change, self.chosen) for shard, writer in writers.items()}
        found._writers, found._pool = lossy, InTurn()  # type: ignore[assignment]
        for lane in found._lanes:
            lane._writer = lossy[lane.sequence.shard.name]  # type: ignore[assignment]
        return found

    def append(self, name: str) -> None:
        """The next append of the source, tried by one instance after the other until one has landed it."""
        source = self.sources[name]
        writer = self.writers[name]
        if writer.acknowledged == len(source):
            number = len(source)
            keys = [self.chosen.choice("abcdefgh") for _ in range(self.chosen.randint(1, 4))]
            source.append([{"key": key, "who": name, "number": 10 * number + at} for at, key in enumerate(keys)])
        while writer.acknowledged < len(source):
            rows = source[writer.acknowledged]  # after a start the last one again, which may have landed
            try:
                writer.append(rows)
            except Indeterminate:
                if self.chosen.random() < 0.5:  # killed in the middle, and started again
                    writer = self.writers[name] = self.opened(name)
                continue
            self.order += rows if rows[0] not in self.order else []

    def change(self) -> None:
        wanted = self.chosen.sample(SHARDS, self.chosen.randint(1, 4))
        routes = Routes.open(self.processes.client(), "routes")
        if self.chosen.random() < 0.5:  # who changes them dies in the middle, and whoever comes next goes on
            routes._open_proposed = lambda epochs: (_ for _ in ()).throw(Unavailable("killed"))  # type: ignore[method-assign]
        with suppress(Unavailable, Conflict):
            routes.change(wanted)

    def act(self) -> None:
        name = self.chosen.choice(sorted(self.writers))
        match self.chosen.choice(["append"] * 5 + ["kill", "change", "read"]):
            case "append":
                self.append(name)
            case "kill":
                self.writers[name] = self.opened(name)
            case "change":
                self.change()
            case "read":
                self.go_on_reading()

    def go_on_reading(self) -> None:
        for event in self.reader.next_events():
            self.read += event.updates.drop_columns(["__time", "__diff"]).to_pylist()
        position = RoutedPosition.from_json(self.reader.position.to_json())
        if self.chosen.random() < 0.5:
            self.reader = RoutedReader(Routes.open(self.processes.client(), "routes"), position)

    def check(self) -> None:
        self.go_on_reading()
        whole = read_routed(Routes.open(self.processes.client(), "routes"))
        assert set(whole.column("__diff").to_pylist()) <= {1}
        for found in (self.read, whole.select(ROWS.names).to_pylist()):
            assert by_key(found) == by_key(self.order)
        keys = whole.column("key").to_pylist()
        assert keys == sorted(keys)


def by_key(rows: list[dict[str, Any]]) -> dict[str, list[list[tuple[str, int]]]]:
    """The updates of each key, append by append: within one append they have no order."""
    found: dict[str, list[list[tuple[str, int]]]] = {}
    for row in rows:
        found.setdefault(row["key"], []).append((row["who"], row["number"]))  # type: ignore[arg-type]
    groups = {key: groupby(numbers, lambda n: (n[0], n[1] // 10)) for key, numbers in found.items()}  # type: ignore[index]
    return {key: [sorted(group) for _, group in grouped] for key, grouped in groups.items()}  # type: ignore[type-var]


def check(seed: int) -> None:
    story = Story(seed)
    for _ in range(STEPS):
        story.act()
    for name in story.sources:
        story.append(name)
    story.check()


@pytest.mark.parametrize("seeds", walks(range(4), 14))
def test_each_append_is_there_once_in_order_by_key(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check(seed)


# --- parts of it


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        for name in SHARDS:
            client.create_shard(name, ROWS, ["key"])
        yield client


def row(key: str, number: int = 0) -> dict[str, Any]:
    return {"key": key, "who": "w", "number": number}


def test_all_rows_of_a_key_go_to_one_shard(client: Client) -> None:
    with RoutedWriter(Routes.open(client, "routes", SHARDS, by=["key"]), "w") as writer:
        for number in range(3):
            assert writer.append([row(f"k{key}", number) for key in range(20)]) == number + 1
    held = [{found["key"] for found in client.shard(name).snapshot().to_arrow().to_pylist()} for name in SHARDS]
    assert sum(map(len, held)) == len(set().union(*held)) == 20
    assert all(held)


def test_a_writer_that_starts_again_ends_the_one_before_it(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:1], by=["key"])
    old = RoutedWriter(routes, "w")
    old.append([row("a")])
    new = RoutedWriter(routes, "w")
    assert new.acknowledged == 0  # the first append may be there in part
    assert new.append([row("a")]) == 1
    assert new.append([row("b")]) == 2
    with pytest.raises(AttributeMismatch, match="opened elsewhere"):
        old.append([row("c")])
    assert client.shard("s0").count() == 2


@pytest.mark.parametrize("is_created_anew", [False, True])
def test_a_shard_of_an_ended_epoch_can_be_dropped(client: Client, is_created_anew: bool) -> None:
    """No writer could be opened any more."""
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    with RoutedWriter(routes, "w") as writer:
        for number in range(1, 4):
            assert writer.append(many(number)) == number
        routes.change(SHARDS[1:3])
        assert writer.append(many(4)) == 4
    kept = client.shard("s1").count() + client.shard("s2").count()
    client.shard("s0").drop()
    if is_created_anew:
        client.create_shard("s0", ROWS, ["key"])
    with RoutedWriter(Routes.open(client, "routes"), "w") as again:
        assert again.acknowledged == 3
        assert again.append(many(4)) == 4
        assert client.shard("s1").count() + client.shard("s2").count() == kept, "it had landed"
        assert again.append(many(5)) == 5
        assert client.shard("s1").count() + client.shard("s2").count() == kept + 20


def test_a_dropped_shard_of_the_current_epoch_is_removed_by_a_change_of_the_routes(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    with RoutedWriter(routes, "w") as writer:
        assert writer.append(many(1)) == 1
        client.shard("s0").drop()
        with pytest.raises(UnknownShard):
            writer.append(many(2))
        assert routes.change(SHARDS[1:3]).shards == ("s1", "s2")
        assert writer.append(many(2)) == 2
    client.create_shard("s0", ROWS, ["key"])
    again = Routes.open(client, "routes")
    again.change(["s1"])
    again.change(SHARDS[:2])
    with RoutedWriter(again, "w") as writer:
        assert (writer.append(many(2)), writer.append(many(3))) == (2, 3)
    assert client.shard("s0").snapshot().to_arrow()["number"].unique().to_pylist() == [3]


def test_a_writer_that_cannot_be_opened_does_not_end_the_one_before_it(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    with RoutedWriter(routes, "w") as writer:
        assert writer.append(many(1)) == 1
        client.shard("s1").add_column("more", pa.int64())
        with pytest.raises(InvalidUsage, match="different schemas"):
            RoutedWriter(Routes.open(client, "routes"), "w")
        client.shard("s1").drop_column("more")
        assert writer.append(many(2)) == 2
        routes.change(SHARDS[2:])
        assert writer.append(many(3)) == 3
        client.shard("s3").drop()
        with pytest.raises(UnknownShard):
            RoutedWriter(Routes(client, client.shard("routes")), "w")
        writer._home.check()


def test_an_append_that_is_not_complete_is_repeated_first(client: Client) -> None:
    writer = RoutedWriter(Routes.open(client, "routes", SHARDS, by=["key"]), "w")
    inserts = writer._lanes[0]._writer

    class Down:
        def check(self, _: Any) -> None:
            """It fails later."""

        def insert(self, *_: Any, **__: Any) -> None:
            raise Unavailable("nobody answers")

    writer._lanes[0]._writer = Down()  # type: ignore[assignment]
    rows = [row(f"k{key}") for key in range(20)]
    with pytest.raises(Unavailable):
        writer.append(rows)
    with pytest.raises(InvalidUsage, match=r"append 1 .* is not complete"):
        writer.append([row("other")])
    writer._lanes[0]._writer = inserts
    assert writer.append(rows) == 1
    assert sum(client.shard(name).count() for name in SHARDS) == 20


def test_rows_of_an_append_that_landed_in_part_go_on_by_new_routes(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    writer = RoutedWriter(routes, "w")
    writer._pool = InTurn()  # type: ignore[assignment]
    inserts = writer._lanes[1]._writer

    class Changed:
        check = inserts.check

        def insert(self, *args: Any, **options: Any) -> Any:
            Routes.open(client, "routes").change(SHARDS[1:])
            return inserts.insert(*args, **options)

    writer._lanes[1]._writer = Changed()  # type: ignore[assignment]
    assert writer.append([row(f"k{key}") for key in range(20)]) == 1
    found = read_routed(Routes.open(client, "routes"))
    assert found.column("key").to_pylist() == sorted(f"k{key}" for key in range(20))
    assert set(found.column("__epoch").to_pylist()) == {0, 1}


def test_rows_beyond_what_is_read_at_once_are_refused(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS, by=["key"])
    RoutedWriter(routes, "w").append([row("a"), row("b"), row("c")])
    with pytest.raises(InvalidUsage, match="more than 2 updates"):
        read_routed(routes, rows_max=2)
    assert read_routed(routes, key_prefix="b", rows_max=1).column("key").to_pylist() == ["b"]
    with pytest.raises(InvalidUsage):
        read_routed(routes, rows_max=0)


def test_routes_without_rows_are_read_as_none(client: Client) -> None:
    found = read_routed(Routes.open(client, "routes", SHARDS, by=["key"]))
    assert found.num_rows == 0
    assert found.schema.names == [*ROWS.names, "__time", "__diff", "__epoch"]


# --- rows that a shard refuses: an append came to be there in part, and others were taken for it


@pytest.fixture
def writer(client: Client) -> RoutedWriter:
    for name in SHARDS:
        client.shard(name).set_constraints(checks={"small": "number < 100"}, unique=True)
    return RoutedWriter(Routes.open(client, "routes", SHARDS, by=["key"]), "w")


def many(number: int, **others: int) -> list[dict[str, Any]]:
    return [row(f"k{key}", others.get(f"k{key}", number)) for key in range(20)]


def there(client: Client) -> list[tuple[str, int]]:
    rows = [found for name in SHARDS for found in client.shard(name).snapshot().to_arrow().to_pylist()]
    return sorted((found["key"], found["number"]) for found in rows)


@pytest.mark.parametrize("bad", [many(2, k3=500), [*many(2), row("old")]], ids=["check", "unique"])
def test_an_append_that_a_shard_refuses_is_written_nowhere_and_the_writer_goes_on(
    client: Client, writer: RoutedWriter, bad: list[dict[str, Any]]
) -> None:
    writer.append([row("old")])
    with pytest.raises(ConstraintViolated, match="nothing was written"):
        writer.append(bad)
    assert there(client) == [("old", 0)]
    assert writer.append(many(3)) == 2
    assert len(there(client)) == 21


def test_a_constraint_that_came_since_is_known_before_a_row_is_written(client: Client, writer: RoutedWriter) -> None:
    client.shard("s3").set_constraints(checks={"tiny": "number < 10"})
    with pytest.raises(ConstraintViolated, match=r"'tiny' .* nothing was written"):
        writer.append(many(50))
    assert there(client) == []
    assert writer.append(many(5)) == 1


def test_an_append_that_has_landed_in_part_takes_its_own_rows_alone(client: Client, writer: RoutedWriter) -> None:
    """A constraint comes after the look: other rows must not be acknowledged while some of its rows are missing."""
    check, rows = writer._check, many(50)

    def late(pieces: Any, number: int) -> None:
        check(pieces, number)
        client.shard("s3").set_constraints(checks={"tiny": "number < 10"})

    writer._check = late  # type: ignore[method-assign]
    with pytest.raises(ConstraintViolated, match=r"append 1 .* not complete, and may have landed in part: .*'tiny'"):
        writer.append(rows)
    assert 0 < len(there(client)) < 20
    again = RoutedWriter(writer.routes, "w")
    for other in (many(5), many(50)[:-1], [*rows, row("more", 1)]):
        with pytest.raises(InvalidUsage, match=r"append 1 .* has landed with other rows, perhaps in part"):
            again.append(other)
    with pytest.raises(ConstraintViolated, match=r"append 1 .* may have landed in part"):
        again.append(rows)
    client.shard("s3").set_constraints(checks={})
    assert RoutedWriter(writer.routes, "w").append(rows[::-1]) == 1  # their order does not matter
    assert there(client) == sorted((f"k{key}", 50) for key in range(20))


def test_an_append_is_known_by_its_keys_where_columns_were_changed_since(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS, by=["key"])
    RoutedWriter(routes, "w").append(many(1))
    for name in SHARDS:
        client.shard(name).alter(RenameColumn("key", "name"), AddColumn("more", pa.int64(), default=7))
    again = RoutedWriter(Routes.open(client, "routes"), "w")
    renamed = [{"name": one["key"], "who": "w", "number": 1} for one in many(1)]
    with pytest.raises(InvalidUsage, match="has landed with other rows"):
        again.append(renamed[1:])
    assert again.append(renamed) == 1
    assert sum(client.shard(name).count() for name in SHARDS) == 20


@pytest.mark.parametrize("is_late", [False, True], ids=["nobody tells", "it lands after the look"])
def test_rows_whose_answer_was_lost_do_not_stand_in_their_own_way(
    client: Client, writer: RoutedWriter, is_late: bool
) -> None:
    """The keys of rows that had landed were taken for those of others: the append could never become complete."""
    lane = writer._lanes[0]
    inserts, last = lane._writer, lane.sequence.last

    class Lost:
        check = inserts.check

        def insert(self, *args: Any, **options: Any) -> None:
            lane._writer = inserts
            inserts.insert(*args, **options)
            raise Indeterminate("the answer was lost")

    lane._writer = Lost()  # type: ignore[assignment]
    lane.sequence.last = lambda: 0  # type: ignore[method-assign]
    with pytest.raises(Indeterminate):
        writer.append(many(1))
    lane.sequence.last = last  # type: ignore[method-assign]
    if is_late:
        writer._adopt_routes = lambda: None  # type: ignore[method-assign]
    assert writer.append(many(1)) == 1
    assert there(client) == sorted((f"k{key}", 1) for key in range(20))


def test_an_append_of_which_nothing_was_sent_is_left_for_another(client: Client, writer: RoutedWriter) -> None:
    lane = writer._lanes[0]
    inserts = lane._writer

    class Down:
        def check(self, _: Any) -> None:
            raise Unavailable("nobody answers")

    lane._writer = Down()  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        writer.append(many(1))
    lane._writer = inserts
    assert writer.append(many(2)) == 1
    assert there(client) == sorted((f"k{key}", 2) for key in range(20))


# --- shards that are closed: routes could never be used or changed again


@pytest.mark.parametrize("is_unique", [False, True])
def test_routes_that_lead_to_a_closed_shard_are_changed_and_writers_go_on(client: Client, is_unique: bool) -> None:
    for name in SHARDS[: 3 * is_unique]:
        client.shard(name).set_constraints(unique=True)
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    writer, other = RoutedWriter(routes, "w"), RoutedWriter(Routes.open(client, "routes"), "other")

    def of(number: int) -> list[dict[str, Any]]:
        return [{**one, "key": f"{one['key']} {number * is_unique}"} for one in many(number)]

    assert writer.append(of(1)) == 1
    client.shard("s1").advance_upper(None)
    with pytest.raises(Conflict, match=r"'s1' is closed.*change the routes"):
        writer.append(of(2))
    assert Routes.open(client, "routes").change(["s0", "s2"]).number == 1
    assert writer.append(of(2)) == 2
    assert other.append(of(3)) == 1
    found = read_routed(Routes.open(client, "routes")).to_pylist()
    assert Counter(one["number"] for one in found) == {1: 20, 2: 20, 3: 20}
    by_key = {key: [one["number"] for one in rows] for key, rows in groupby(found, lambda one: one["key"])}
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_no_routes_are_proposed_that_cannot_be_opened(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    client.shard("s3").advance_upper(None)
    with pytest.raises(Conflict, match="'s3' is closed"):
        routes.change(["s0", "s3"])
    assert RoutedWriter(Routes.open(client, "routes"), "w").append([row("a")]) == 1
    client.shard("s2").drop(force=True)
    with pytest.raises(UnknownShard):
        Routes.open(client, "routes").change(["s0", "s2"])
    assert Routes.open(client, "routes").current().number == 0


# --- what is wrong: what docs/streaming.md refuses


def test_routes_that_are_not_there_are_told(client: Client) -> None:
    with pytest.raises(UnknownShard):
        Routes.open(client, "routes")
    with pytest.raises(UnknownShard):
        Routes.open(client, "routes", ["s0", "nowhere"], by=["key"])
    assert "routes" not in client.shards()


@pytest.mark.parametrize(("shards", "by", "said"), [
    ([], ["key"], "0 names"),
    (["s0", "s0"], ["key"], "different ones"),
    (["s0", "other"], ["key"], "different schemas"),
    ("s0", ["key"], "list of names"),
    (["s0"], [], "by key columns"),
    (["s0"], ["who"], "by key columns"),
    (["s0"], "key", "list of names"),
    (["other"], ["key"], "by which rows cannot be routed"),
])  # fmt: skip
def test_what_are_no_routes_is_refused(client: Client, shards: Any, by: Any, said: str) -> None:
    client.create_shard("other", pa.schema([("key", pa.float64())]), ["key"])
    with pytest.raises(InvalidUsage, match=said):
        Routes.open(client, "routes", shards, by=by)
    assert "routes" not in client.shards()


def test_routes_are_not_changed_by_opening_them(client: Client) -> None:
    Routes.open(client, "routes", SHARDS[:2], by=["key"])
    with pytest.raises(InvalidUsage, match=r"Routes\.change"):
        Routes.open(client, "routes", SHARDS[:3], by=["key"])
    assert Routes.open(client, "routes", SHARDS[:2]).current().number == 0


def test_a_change_to_what_they_are_changes_nothing(client: Client) -> None:
    routes = Routes.open(client, "routes", SHARDS[:2], by=["key"])
    assert routes.change(SHARDS[:2]).number == 0
    assert routes.change(SHARDS[:3]).number == 1
    with pytest.raises(InvalidUsage):
        routes.change([])


def test_a_hash_that_this_version_does_not_know_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("persist.sources.partition_map.HASH", "other/2")
        Routes.open(client, "routes", SHARDS, by=["key"])
    with pytest.raises(InvalidUsage, match="other/2"):
        Routes.open(client, "routes")


def test_a_closed_shard_takes_no_routes(client: Client) -> None:
    client.shard("s1").advance_upper(None)
    with pytest.raises(Conflict, match="closed"):
        Routes.open(client, "routes", SHARDS, by=["key"])
    assert Routes.open(client, "routes", SHARDS[2:], by=["key"]).current().shards == ("s2", "s3")


@pytest.mark.parametrize("rows", [[{"key": "a", "__time": 0}], [{"other": 1}], [{"number": "x"}], iter([]), "text"])
def test_rows_that_do_not_fit_are_refused_and_none_is_written(client: Client, rows: Any) -> None:
    writer = RoutedWriter(Routes.open(client, "routes", SHARDS, by=["key"]), "w")
    with pytest.raises(InvalidUsage):
        writer.append(rows)
    assert writer.append([row("a")]) == 1


@pytest.mark.parametrize("name", ["", "x" * 129, 1, None])
def test_a_writer_has_a_name(client: Client, name: Any) -> None:
    with pytest.raises(InvalidUsage):
        RoutedWriter(Routes.open(client, "routes", SHARDS, by=["key"]), name)


@pytest.mark.parametrize("wrong", [{}, {"epoch": -1, "uppers": {}}, {"epoch": 0, "uppers": {"s0": -1}}, {"epoch": "0"}])
def test_what_is_no_position_of_a_reader_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        RoutedPosition.from_json(wrong)


# --- the hash


def mixed(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % MODULUS
    return number ^ (number >> 31)


def naive(values: list[Any]) -> int:
    """The hash of one row, value by value and byte by byte."""
    found = 0
    for value in values:
        if value is None:
            number = 0x6E756C6C
        elif isinstance(value, int):
            number = value % MODULUS
        else:
            content = value.encode() if isinstance(value, str) else value
            number = sum((byte + 1) * pow(BASE, -at, MODULUS) for at, byte in enumerate(content)) % MODULUS
        found = mixed((found + number + 0x9E3779B97F4A7C15) % MODULUS)
    return found


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(st.none() | st.text(), st.none() | INT64), max_size=8), st.integers(0, 3))
def test_the_hash_of_columns_is_that_of_each_row(rows: list[tuple[str | None, int | None]], skipped: int) -> None:
    table = pa.table(
        {"a": pa.array([a for a, _ in rows], pa.string()), "b": pa.array([b for _, b in rows], pa.int64())}
    ).slice(skipped)
    assert hashes_of(table, ("a", "b")).tolist() == [naive(list(row)) for row in rows[skipped:]]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (
            ["", "a", "orders", None],
            pa.string(),
            [16294208416658607535, 17360999193197444373, 10805596194968938291, 2361492071075283931],
        ),
        (
            [0, 1, -1, 2**40],
            pa.int64(),
            [16294208416658607535, 10451216379200822465, 16490336266968443936, 2296115805719413641],
        ),
    ],
)
def test_the_hash_is_the_same_for_ever(values: list[Any], kind: pa.DataType, expected: list[int]) -> None:
    assert hashes_of(pa.table({"a": pa.array(values, kind)}), ("a",)).tolist() == expected


def test_what_is_equal_in_another_type_goes_the_same_way() -> None:
    whole = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.date32(), pa.bool_()]
    texts = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
    for kinds, values in ((whole, [0, 1]), (texts, ["", "x"])):
        found = {
            tuple(hashes_of(pa.table({"a": pa.array(values).cast(kind)}), ("a",)))
            for kind in kinds
            if kind != pa.date32()
        }
        assert len(found) == 1
    day = pa.table({"a": pa.array([datetime(1970, 1, 2, tzinfo=UTC)]).cast(pa.date32())})
    assert hashes_of(day, ("a",)) == hashes_of(pa.table({"a": [1]}), ("a",))


def test_keys_are_spread_evenly() -> None:
    for values in (range(10_000), [f"customer-{n:06d}" for n in range(10_000)]):
        slots = hashes_of(pa.table({"a": list(values)}), ("a",)) % np.uint64(7)
        counts = np.bincount(slots.astype(np.int64), minlength=7)
        assert 1_200 < counts.min() <= counts.max() < 1_660


def is_caught(seed: int) -> bool:
    try:
        check(seed)
    except (AssertionError, InvalidUsage):
        return True
    return False


def test_a_build_that_does_not_look_at_numbers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SequencedWriter.conditions
    monkeypatch.setattr(SequencedWriter, "conditions", lambda self, number, _: whole(self, number)[:1])
    assert any(is_caught(seed) for seed in range(10))


def test_a_build_that_leaves_gates_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _Lane.__init__

    def ungated(self: _Lane, *args: Any) -> None:
        begun(self, *args)
        self._gate = AttributeUpdate.accumulate(named_key("no gate"), 0)

    monkeypatch.setattr(_Lane, "__init__", ungated)
    assert any(is_caught(seed) for seed in range(20))
