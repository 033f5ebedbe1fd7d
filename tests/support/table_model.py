"""Verbs on a table of `k` (the key), `a` and `b`, and what each of them makes of a plain bag of rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.merge import source, target
from persist.client.optimistic_edit import Edited
from persist.client.shard import Shard
from persist.core.ids import Token

COLUMNS = pa.schema([("k", pa.int64()), ("a", pa.int64()), ("b", pa.string())])
KEY = ["k"]
KEYS = 6
Row = tuple[int, int | None, str | None]
Bag = Counter[Row]


@dataclass(frozen=True)
class Verb:
    """One call: how it is made on a shard, and what it makes of a bag. `reads`: it takes a `read_time`."""

    name: str
    run: Callable[[Shard, dict[str, Any]], Any]
    model: Callable[[Bag], Bag]
    reads: bool = True


def _dicts(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"k": k, "a": a, "b": b} for k, a, b in rows]


def _table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(_dicts(rows), schema=COLUMNS)


def _rows(rng: random.Random, *, single: bool) -> list[Row]:
    keys = [rng.randrange(KEYS) for _ in range(rng.randrange(1, 4))]
    if single:
        keys = list(dict.fromkeys(keys))
    return [(k, rng.choice([None, 0, 1, 2]), rng.choice([None, "x", "y"])) for k in keys]


def _clean(bag: Bag) -> Bag:
    return Counter({row: count for row, count in bag.items() if count})


def insert(rng: random.Random) -> Verb:
    rows = _rows(rng, single=False)
    return Verb("insert", lambda s, o: s.insert(_table(rows), **o), lambda bag: bag + Counter(rows), reads=False)


def insert_new(rng: random.Random) -> Verb:
    """A key that no other verb writes: it concerns few of them."""
    row: Row = (KEYS + rng.randrange(1000), 5, "new")
    return Verb("insert new", lambda s, o: s.insert(_table([row]), **o), lambda bag: bag + Counter([row]), reads=False)


def upsert(rng: random.Random) -> Verb:
    rows = _rows(rng, single=True)
    keys = {k for k, _, _ in rows}

    def model(bag: Bag) -> Bag:
        return Counter({row: n for row, n in bag.items() if row[0] not in keys}) + Counter(rows)

    return Verb("upsert", lambda s, o: s.upsert(_dicts(rows), **o), model)


def upsert_deleting(rng: random.Random) -> Verb:
    rows = _rows(rng, single=True)
    gone = {k: rng.random() < 0.5 for k, _, _ in rows}
    given = [{**row, "gone": gone[row["k"]]} for row in _dicts(rows)]

    def model(bag: Bag) -> Bag:
        kept = Counter({row: n for row, n in bag.items() if row[0] not in gone})
        return kept + Counter([row for row in rows if not gone[row[0]]])

    return Verb("upsert, deleting", lambda s, o: s.upsert(given, delete_column="gone", **o), model)


def delete(rng: random.Random) -> Verb:
    k = rng.randrange(KEYS)
    where, is_meant = rng.choice(
        [
            (f"k = {k}", lambda row: row[0] == k),
            ("a IS NULL", lambda row: row[1] is None),
            (f"k >= {k} AND b = 'x'", lambda row: row[0] >= k and row[2] == "x"),
        ]
    )

    def model(bag: Bag) -> Bag:
        return Counter({row: n for row, n in bag.items() if not is_meant(row)})

    return Verb("delete", lambda s, o: s.delete(where, **o), model)


def delete_keys(rng: random.Random) -> Verb:
    keys = [rng.randrange(KEYS) for _ in range(2)]
    return Verb(
        "delete keys",
        lambda s, o: s.delete(keys=keys, **o),
        lambda bag: Counter({row: n for row, n in bag.items() if row[0] not in keys}),
    )


def update(rng: random.Random) -> Verb:
    k = rng.randrange(KEYS)

    def model(bag: Bag) -> Bag:
        found: Bag = Counter()
        for (key, a, b), n in bag.items():
            found[(key, None if a is None else a + 1, "u") if key <= k else (key, a, b)] += n
        return found

    sets = {"a": pc.field("a") + 1, "b": "u"}
    return Verb("update", lambda s, o: s.update(sets, f"k <= {k}", **o), model)


def replace_where(rng: random.Random) -> Verb:
    k = rng.randrange(KEYS)
    rows: list[Row] = [(k, rng.randrange(3), "r")] * rng.randrange(3)
    return Verb(
        "replace_where",
        lambda s, o: s.replace_where(f"k = {k}", _table(rows), **o),
        lambda bag: Counter({row: n for row, n in bag.items() if row[0] != k}) + Counter(rows),
    )


def overwrite(rng: random.Random) -> Verb:
    rows = _rows(rng, single=False)
    return Verb("overwrite", lambda s, o: s.overwrite(_table(rows), **o), lambda bag: Counter(rows))


def merge(rng: random.Random) -> Verb:
    """Matched rows with a smaller `a` grow, with none they go; new ones come; of the others those with `b` null go."""
    rows = _rows(rng, single=True)
    by_key = {row[0]: row for row in rows}
    purges = rng.random() < 0.5

    def model(bag: Bag) -> Bag:
        found: Bag = Counter()
        for (k, a, b), n in bag.items():
            if k not in by_key:
                if not (purges and b is None):
                    found[k, a, b] += n
                continue
            other = by_key[k][1]
            if a is None:
                continue
            if other is not None and a < other:
                found[k, a + other, by_key[k][2]] += n
            else:
                found[k, a, b] += n
        met = {k for k, _, _ in bag}
        return found + Counter([row for row in rows if row[0] not in met])

    def run(shard: Shard, options: dict[str, Any]) -> Edited:
        wanted = (
            shard.merge(_dicts(rows))
            .when_matched_delete("target.a IS NULL")
            .when_matched_update({"a": source("a") + target("a"), "b": source("b")}, target("a") < source("a"))
            .when_not_matched_insert()
        )
        if purges:
            wanted = wanted.when_not_matched_by_source_delete("target.b IS NULL")
        return wanted.execute(**options)

    return Verb("merge", run, model)


VERBS = (
    insert, insert_new, upsert, upsert_deleting, overwrite, delete, delete_keys, update, replace_where, merge
)  # fmt: skip


class Story:
    """What happened to one table: each commit by its time, and each call that changed nothing."""

    def __init__(self) -> None:
        self.commits: dict[int, Verb] = {}
        self.idle: list[tuple[int, Verb]] = []
        self.retries = 0

    def tell(self, verb: Verb, done: Any) -> None:
        """A call came back. Every time is taken by one call."""
        time = done.lower.element
        assert time is not None
        self.retries += getattr(done, "retries", 0)
        if done.lower == done.upper:
            self.idle.append((time, verb))
            return
        assert time not in self.commits, f"time {time} was given to {self.commits[time].name} and to {verb.name}"
        self.commits[time] = verb

    def check(self, read: Callable[[int], Bag], upper: int) -> None:
        """At every time the table is what the verbs, one after the other, make of nothing."""
        bag: Bag = Counter()
        bags = [bag]
        for time in range(upper):
            bag = _clean(self.commits[time].model(bag))
            found = read(time)
            assert found == bag, f"at {time}, after {self.commits[time].name}: {found} is not {bag}"
            bags.append(bag)
        for time, verb in self.idle:
            assert _clean(verb.model(bags[time])) == bags[time], f"{verb.name} should have changed {bags[time]}"


def contents(shard: Shard, as_of: int) -> Bag:
    """The rows of a shard as a bag."""
    found: Bag = Counter()
    for row in shard.snapshot(as_of).to_arrow().to_pylist():
        found[row["k"], row["a"], row["b"]] += row["__diff"]
    return found


def options(rng: random.Random, shard: Shard, verb: Verb, token: Callable[[], Token]) -> dict[str, Any]:
    """How it is called: perhaps with a token, or only if nothing was written since now."""
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["token"] = token()
    if verb.reads and rng.random() < 0.3:
        upper = shard.upper().element
        assert upper is not None
        found["read_time"] = upper - 1
    return found
