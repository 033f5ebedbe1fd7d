"""Reads that select rows, keys and columns: the same rows at every door, and no more read than they need."""

from __future__ import annotations

import datetime as dt
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import persist
from blob import BlobNotFound
from persist import Antichain, Client, LocationSettings, Shard
from persist.core.errors import Corruption, Expired, InvalidUsage, NegativeMultiplicity, NotReadable
from persist.core.state import Policy
from persist.parts import codec, part_files
from persist.parts.part_files import PartFiles

KEYS = pa.schema([pa.field("region", pa.string(), nullable=False), pa.field("id", pa.int64(), nullable=False)])
SCHEMA = pa.schema([*KEYS, ("name", pa.string()), ("n", pa.int32())])
REGIONS = ["", "de", "de-be", "fr", "pt"]


@pytest.fixture
def client() -> Iterator[Client]:
    with persist.connect(blob="mem:", consensus="mem:") as client:
        yield client


@pytest.fixture
def shard(client: Client) -> Shard:
    return client.create_shard("orders", SCHEMA, ["region", "id"])


def row(region: str, number: int, name: str | None = None, n: int | None = None) -> dict[str, Any]:
    return {"region": region, "id": number, "name": name, "n": n}


def filled(shard: Shard, seed: int = 1) -> list[dict[str, Any]]:
    """Some inserts, with retractions; the rows that are there, in key order."""
    rng, there = random.Random(seed), []
    for _ in range(6):
        fresh = [
            row(rng.choice(REGIONS), rng.randrange(40), rng.choice(["a", "ab", None]), rng.choice([None, 1, 2, 3]))
            for _ in range(30)
        ]
        gone = [there.pop(rng.randrange(len(there))) for _ in range(min(7, len(there)))]
        shard.insert([*fresh, *({**one, "__diff": -1} for one in gone)])
        there += fresh
    return sorted(there, key=order)


def order(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["region"], one["id"], str(one["name"]), str(one["n"])


def rows_of(snapshot: persist.Snapshot) -> list[dict[str, Any]]:
    return sorted(snapshot.to_arrow(expand=True).to_pylist(), key=order)


SELECTIONS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({}, lambda r: True),
    ({"where": "n >= 2"}, lambda r: r["n"] is not None and r["n"] >= 2),
    ({"where": "name LIKE 'a%' AND NOT n = 1"}, lambda r: r["name"] is not None and r["n"] not in (1, None)),
    ({"where": "region = 'fr' AND id < 20"}, lambda r: r["region"] == "fr" and r["id"] < 20),
    ({"where": "region LIKE 'de%' OR n IS NULL"}, lambda r: r["region"].startswith("de") or r["n"] is None),
    ({"start_key": "de-be"}, lambda r: r["region"] >= "de-be"),
    ({"start_key": ("de", 10), "end_key": ("fr", 3)}, lambda r: ("de", 10) <= (r["region"], r["id"]) < ("fr", 3)),
    ({"key_prefix": "de"}, lambda r: r["region"].startswith("de")),
    ({"key_prefix": ["de", 7]}, lambda r: (r["region"], r["id"]) == ("de", 7)),
    ({"start_key": "fr", "end_key": "de"}, lambda r: False),
    ({"key_prefix": "de", "end_key": ("de", 9), "where": "n = 2"},
     lambda r: r["region"] == "de" and r["id"] < 9 and r["n"] == 2),
]  # fmt: skip


@pytest.fixture
def in_blobs(tmp_path: Path) -> Iterator[Shard]:
    """A shard whose parts are blobs, some of them in bundles, some of them merged."""
    settings = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=1))
    with persist.connect(f"persist://{tmp_path}/blobs", location=settings) as client:
        yield client.create_shard("orders", SCHEMA, ["region", "id"])


@pytest.mark.parametrize("where", ["shard", "in_blobs"])
def test_reads_hold_exactly_the_rows_that_are_selected(request: pytest.FixtureRequest, where: str) -> None:
    shard: Shard = request.getfixturevalue(where)
    there = filled(shard)
    for given, wanted in SELECTIONS:
        expected = [one for one in there if wanted(one)]
        assert rows_of(shard.snapshot(**given)) == expected, given
        for splits in (2, 5):
            with shard.snapshot(num_splits=splits, **given) as snapshot:
                assert 1 <= len(snapshot.splits) <= splits
                travelled = [pickle.loads(pickle.dumps(split)) for split in snapshot.splits]
                tables = [t for split in travelled for t in split.read(snapshot._transport)]
            found = pa.concat_tables([snapshot.empty(), *tables]).to_pylist()
            repeated = [one for one in found for _ in range(one.pop("__diff"))]
            assert sorted(repeated, key=order) == expected, (given, splits)
        assert net(list(shard.listen(None, until=6, **given))) == expected, given
        assert net(list(shard.subscribe(3, until=6, **given))) == expected, given
        whole = shard.snapshot(**given).to_arrow(expand=True).to_pylist()
        assert shard.snapshot(limit=5, num_splits=3, **given).to_arrow(expand=True).to_pylist() == whole[:5]
    key = there[0]["region"], there[0]["id"]
    assert sorted(shard.get(key), key=order) == [one for one in there if (one["region"], one["id"]) == key]


def net(events: list[persist.ListenEvent]) -> list[dict[str, Any]]:
    """The rows that updates add up to, each as often as it is there."""
    counts: dict[tuple[Any, ...], int] = {}
    for event in events:
        for one in event.updates.to_pylist():
            key = tuple(value for name, value in one.items() if name not in ("__time", "__diff"))
            counts[key] = counts.get(key, 0) + one["__diff"]
    assert min(counts.values(), default=0) >= 0
    found = [dict(zip(SCHEMA.names, key, strict=True)) for key, count in counts.items() for _ in range(count)]
    return sorted(found, key=order)


def test_a_listener_with_where_reports_progress_also_where_no_row_matches(shard: Shard) -> None:
    with shard.listen(None, where="n = 99", columns=["id"]) as listening:
        for time in range(3):
            shard.insert([row("de", time, n=time)])
            [event] = listening.next_events(0)
            assert (event.lower, event.upper) == (Antichain(time), Antichain(time + 1))
            assert event.updates.column_names == ["id", "__time", "__diff"]
            assert len(event.updates) == 0


def test_columns_need_not_have_those_of_where_and_come_in_the_order_given(shard: Shard) -> None:
    shard.insert([row("de", 1, "a", 1), row("de", 2, "b", 2)])
    found = shard.snapshot(where="n = 2", columns=["name", "region"]).to_arrow()
    assert found.column_names == ["name", "region", "__diff"]
    assert found.to_pylist() == [{"name": "b", "region": "de", "__diff": 1}]
    empty = shard.snapshot(where="n = 3", columns=["name"])
    assert empty.to_arrow().column_names == ["name", "__diff"]
    assert shard.snapshot(where="n = 2", columns=[]).to_arrow().to_pylist() == [{"__diff": 1}]
    [event] = shard.listen(None, until=1, where="n = 2", columns=["name"])
    assert event.updates.to_pylist() == [{"name": "b", "__time": 0, "__diff": 1}]


def test_what_a_drop_took_away_reaches_a_listener_by_the_same_selection(shard: Shard) -> None:
    shard.insert([row("de", 1, n=1), row("fr", 2, n=1), row("fr", 3, n=2)])
    shard.insert([row("fr", 4, n=1)])
    shard.truncate(1, mode="drop")
    events = list(shard.listen(0, until=3, where="n = 1", key_prefix=("fr",), columns=["id"]))
    found = [(one["id"], one["__diff"]) for event in events for one in event.updates.to_pylist()]
    assert found == [(4, 1), (2, -1)]


# --- limit


def test_a_dot_in_a_name_needs_backquotes(client: Client) -> None:
    """Spark takes `st.street` for a field of `st`, so a delete by it took the wrong row."""
    street = pa.struct([("street", pa.string())])
    shard = client.create_shard(
        "d", pa.schema([("id", pa.int64()), ("st", street), ("st.street", pa.string())]), ["id"]
    )
    shard.insert([{"id": 1, "st": {"street": "x"}}, {"id": 2, "st": {"street": "y"}, "st.street": "x"}])
    for where in ("st.street = 'x'", "st . street = 'x'", "`st`.street = 'x'", "'x' = st.`street`", "id.x IS NULL"):
        with pytest.raises(InvalidUsage):
            shard.delete(where)
    assert shard.count() == 2
    assert shard.delete("`st.street` = 'x'").removed == 1
    assert shard.get(2) == []


RAW: dict[str, list[int] | None] = {  # None: refused, since Spark would read it otherwise, or not at all
    r"v = r'C:\Users'": [1],
    r"v IN (r'C:\Users', 'a_b', R'it''s')": None,
    r"v IN (r'C:\Users', 'a_b')": [1, 4],
    r"v <> r'C:\Users'": [2, 3, 4],
    r"v LIKE r'C:\\U%'": [1],
    r"v LIKE r'a\_b'": [4],
    r"v LIKE r'a\_%' OR v LIKE r'5\%'": [2, 4],
    r"v LIKE r'C:\Users'": None,
    r"v LIKE r'C:\'": None,
    "v LIKE 'a_b'": None,
    r"v = 'C:\Users'": None,
    r"v = 'C:\\Users'": None,
}


def test_a_text_with_a_backslash_is_a_raw_text_as_in_spark(client: Client) -> None:
    shard = client.create_shard("paths", pa.schema([("id", pa.int64()), ("v", pa.string())]), ["id"])
    shard.insert([{"id": n, "v": v} for n, v in enumerate(["C:\\Users", "5%", "C:/Users", "a_b"], 1)])
    for where, ids in RAW.items():
        with nullcontext() if ids is not None else pytest.raises(InvalidUsage):
            assert shard.snapshot(where=where).to_arrow()["id"].to_pylist() == ids, where


def test_a_limit_gives_the_first_rows_each_as_often_as_it_is_there(shard: Shard) -> None:
    there = filled(shard)
    shard.insert([{**row("", -1), "__diff": 4}])
    there = [row("", -1)] * 4 + there
    whole = shard.snapshot().to_arrow(expand=True).to_pylist()
    for limit in (0, 1, 3, 4, 5, 50, len(there), len(there) + 1, 2**31 - 1):
        for splits in (1, 3):
            found = shard.snapshot(limit=limit, num_splits=splits).to_arrow(expand=True).to_pylist()
            assert found == whole[:limit]
    selected = [one for one in whole if one["n"] == 2]
    assert shard.snapshot(limit=5, where="n = 2").to_arrow(expand=True).to_pylist() == selected[:5]
    assert shard.head(7, where="n = 2", columns=["id"]) == [{"id": one["id"]} for one in selected[:7]]
    assert len(shard.head()) == 20


ROWS, GROUP_ROWS = 40_000, 6_500


@pytest.fixture
def large(client: Client, monkeypatch: pytest.MonkeyPatch) -> Shard:
    """One part in several row groups, of which none is read with another one."""
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", GROUP_ROWS)
    monkeypatch.setattr(part_files, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(part_files, "GAP_BYTES_MAX", 0)
    for module in ("snapshot", "shared_lease_reads"):
        monkeypatch.setattr(f"persist.client.{module}.FEW_MEMORY_BYTES", 1_600_000)
    found = client.create_shard(
        "large", pa.schema([("id", pa.int64()), ("at", pa.int64()), ("pad", pa.string())]), ["id"]
    )
    rng = random.Random(3)
    pad = pa.array([f"{rng.getrandbits(128):032x}" for _ in range(ROWS)])
    found.insert(pa.table({"id": pa.array(range(ROWS)), "at": pa.array(range(ROWS)), "pad": pad}))
    return found


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a blob."""
    sizes: list[int] = []
    real = PartFiles.fetch

    def fetch(self: PartFiles, part: Any, start: int, length: int) -> bytes:
        sizes.append(length)
        return real(self, part, start, length)

    monkeypatch.setattr(PartFiles, "fetch", fetch)
    return sizes


def test_a_read_of_few_rows_reads_few_bytes(large: Shard, fetched: list[int]) -> None:
    def bytes_of(read: Callable[[], object]) -> int:
        fetched.clear()
        read()
        return sum(fetched)

    whole = bytes_of(lambda: large.snapshot().to_arrow())
    group = whole * GROUP_ROWS // ROWS
    assert large.get(27_182)[0]["at"] == 27_182
    assert bytes_of(lambda: large.get(27_182)) < 1.5 * group
    assert bytes_of(lambda: large.get(ROWS + 7)) < 1.5 * group
    assert bytes_of(lambda: large.snapshot(key_prefix=(5,)).to_arrow()) < 1.5 * group
    assert bytes_of(lambda: large.snapshot(where="id = 5").to_arrow()) < 1.5 * group
    assert bytes_of(lambda: large.snapshot(where="at BETWEEN 7000 AND 7010").to_arrow()) < 1.5 * group
    assert bytes_of(lambda: large.head(20)) < 4 * group
    assert bytes_of(lambda: large.snapshot(limit=10).to_arrow()) < 4 * group
    assert bytes_of(lambda: large.count()) < whole / 4
    assert bytes_of(lambda: list(large.listen(None, until=1, where="at = 5", columns=["at"]))) < 1.5 * group


# --- one line each


def test_get_gives_the_rows_of_a_key_each_as_often_as_it_is_there(shard: Shard) -> None:
    shard.insert([row("de", 1, "a"), {**row("de", 2, "b"), "__diff": 2}, row("de", 2, "c"), row("d", 1), row("dee", 1)])
    shard.insert([{**row("de", 1, "a"), "__diff": -1}])
    assert shard.get(("de", 2)) == [row("de", 2, "b"), row("de", 2, "b"), row("de", 2, "c")]
    assert shard.get(["de", 2], columns=["name"]) == [{"name": "b"}, {"name": "b"}, {"name": "c"}]
    assert shard.get(("de", 1)) == shard.get(("de", 99)) == []
    assert shard.get(("de", 1), as_of=0) == [row("de", 1, "a")]


def test_get_of_keys_of_many_types_and_of_null(client: Client) -> None:
    keys = [
        (pa.binary(), b"a\x00"), (pa.date32(), dt.date(2024, 1, 31)), (pa.float64(), 0.1), (pa.bool_(), True),
        (pa.timestamp("us", "UTC"), dt.datetime(2024, 1, 31, tzinfo=dt.UTC)), (pa.decimal128(5, 2), Decimal("1.50")),
        (pa.string(), "a\x00"), (pa.uint64(), 2**64 - 1),
    ]  # fmt: skip
    for number, (kind, value) in enumerate(keys):
        shard = client.create_shard(f"key{number}", pa.schema([("k", kind), ("v", pa.int64())]), ["k"])
        shard.insert([{"k": value, "v": 1}, {"k": None, "v": 2}])
        assert shard.get(value) == [{"k": value, "v": 1}]
        assert shard.get(None) == [{"k": None, "v": 2}]


def test_get_and_head_commit_nothing(shard: Shard) -> None:
    """Each read was three commits: a hold, its renewal, its end."""
    filled(shard)
    before = shard.view().seqno
    assert len(shard.head(10)) == 10
    for number in range(20):
        shard.get(("de", number))
    shard.get(("de", 1), as_of=3)
    assert shard.view().seqno == before


def test_get_reads_again_where_maintenance_was_quicker(large: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = PartFiles.fetch, []

    def fetch(self: PartFiles, part: Any, start: int, length: int) -> bytes:
        tries.append(part)
        if len(tries) == 1:
            raise BlobNotFound("the part was merged into another one, and deleted")
        return real(self, part, start, length)

    monkeypatch.setattr(PartFiles, "fetch", fetch)
    assert [one["at"] for one in large.get(7)] == [7]
    assert len(tries) > 1


def test_get_of_a_part_that_is_gone_for_good_is_corruption(large: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: PartFiles, part: Any, start: int, length: int) -> bytes:
        raise BlobNotFound("gone")

    monkeypatch.setattr(PartFiles, "fetch", fetch)
    with pytest.raises(Corruption, match="shard 'large'"):
        large.get(7)


def test_get_of_a_time_that_a_tag_keeps_or_that_is_to_come(shard: Shard) -> None:
    shard.configure(history="none")
    for number in range(3):
        shard.insert([row("de", number)])
    shard.tag("first", 0)
    shard.downgrade_since(2)
    assert shard.get(("de", 0), as_of=0) == [row("de", 0)]
    assert shard.get(("de", 1), as_of=0) == []
    with pytest.raises(NotReadable):
        shard.get(("de", 0), as_of=1)
    later = threading.Timer(0.2, lambda: shard.insert([row("de", 9)]))
    later.start()
    assert shard.get(("de", 9), as_of=3) == [row("de", 9)]
    later.join()


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_splits_that_one_process_reads_come_in_key_order(in_blobs: Shard, timeout_s: float | None) -> None:
    filled(in_blobs)
    shard = in_blobs if timeout_s is None else in_blobs.with_timeout(timeout_s)  # then one after the other
    whole = shard.snapshot().to_arrow()
    with shard.snapshot(num_splits=9) as snapshot:
        assert pa.concat_tables(snapshot.batches()).to_pylist() == whole.to_pylist()
    with shard.snapshot(num_splits=9) as given_up:
        pieces = given_up.batches()
        assert len(next(pieces)) > 0
        pieces.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("persist-ahead") for thread in threading.enumerate())


# --- a shard to which nothing was written


def test_an_empty_shard_reads_as_empty_as_of_a_time_that_is_always_empty(shard: Shard) -> None:
    first = shard.snapshot(num_splits=3)
    assert (first.as_of, len(first.splits), first.to_arrow().num_rows) == (-1, 3, 0)
    assert shard.snapshot().to_pandas().shape == (0, 4)
    assert (shard.count(), shard.head(), shard.get(("de", 1))) == (0, [], [])
    shard.compare_and_append([row("de", 1)], first.as_of + 1, 1)
    assert shard.snapshot(first.as_of).to_arrow().num_rows == 0
    assert (shard.count(as_of=-1), shard.count()) == (0, 1)
    [event] = shard.listen(first.as_of, until=1)
    assert event.updates.num_rows == 1


# --- subscribe


def test_a_subscription_is_the_contents_and_then_every_change(shard: Shard) -> None:
    shard.insert([row("de", 1, "a"), row("de", 2, "b")])
    shard.insert([{**row("de", 2, "b"), "__diff": -1}])
    with shard.subscribe(columns=["id"]) as subscription:
        shard.insert([row("de", 3)])
        assert subscription.as_of == 1
        [contents] = subscription.next_events(0)
        assert (contents.lower, contents.upper) == (Antichain(0), Antichain(2))
        assert contents.updates.to_pylist() == [{"id": 1, "__time": 1, "__diff": 1}]
        [change] = subscription.next_events(0)
        assert (change.lower, change.upper) == (Antichain(2), Antichain(3))
        assert change.updates.to_pylist() == [{"id": 3, "__time": 2, "__diff": 1}]
        assert list(subscription.next_events(0)) == []


def test_a_subscription_holds_from_the_beginning(shard: Shard) -> None:
    shard.configure(history="none")
    shard.insert([row("de", 1)])
    subscription = shard.subscribe(until=4)
    for number in (2, 3, 4):
        shard.insert([row("de", number)])
    shard.downgrade_since(3)
    assert shard.since() == Antichain(0)
    assert net(list(subscription)) == [row("de", number) for number in (1, 2, 3, 4)]


def test_a_loop_that_is_left_and_entered_again_is_given_nothing_twice(shard: Shard) -> None:
    shard.insert([row("de", 1)])
    subscription = shard.subscribe(until=2)
    first = list(subscription.next_events(0))
    shard.insert([row("de", 2)])
    assert net([*first, *subscription]) == [row("de", 1), row("de", 2)]


def test_a_subscription_that_was_closed_says_so(shard: Shard) -> None:
    shard.insert([row("de", 1)])
    subscription = shard.subscribe()
    subscription.close()
    with pytest.raises((InvalidUsage, Expired)):
        list(subscription.next_events(0))


def test_a_time_that_a_tag_alone_keeps_cannot_be_subscribed_to(shard: Shard) -> None:
    shard.configure(history="none")
    for number in range(3):
        shard.insert([row("de", number)])
    shard.tag("first", 0)
    shard.downgrade_since(2)
    assert shard.snapshot(0).to_arrow().num_rows == 1
    with pytest.raises(NotReadable, match=r"keeps only \[0\]"):
        shard.subscribe(0)


# --- pandas


def test_a_frame_is_inserted_again_as_equal_rows_and_nullable_columns_keep_their_types(client: Client) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False), ("n", pa.int32()), ("b", pa.bool_()), ("s", pa.string()),
            ("u", pa.uint64()), ("f", pa.float64()), ("d", pa.decimal128(10, 2)), ("t", pa.timestamp("us", "UTC")),
            ("day", pa.date32()), ("l", pa.list_(pa.int64())), ("raw", pa.binary()),
            ("st", pa.struct([("x", pa.int8())])),
        ]
    )  # fmt: skip
    source, copy = (client.create_shard(name, schema, ["id"]) for name in ("source", "copy"))
    source.insert(
        [
            {"id": 1, "n": 1, "b": True, "s": "", "u": 2**64 - 1, "f": float("nan"), "d": Decimal("1.50"),
             "t": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "day": dt.date(2024, 1, 1), "l": [1, None], "raw": b"\xff",
             "st": {"x": None}},
            {"id": 2, "__diff": 2},
            {"id": 2**53 + 1, "b": False},
        ]
    )  # fmt: skip
    frame = source.snapshot().to_pandas()
    assert str(frame["n"].dtype) == "int32[pyarrow]"
    assert str(frame["b"].dtype) == "bool[pyarrow]"
    assert len(frame) == 4
    assert frame["id"].tolist() == [1, 2, 2, 2**53 + 1]
    copy.insert(frame)
    assert repr(copy.snapshot().to_arrow().to_pylist()) == repr(source.snapshot().to_arrow().to_pylist())
    copy.insert(frame[frame["n"].isna()])
    assert copy.count() == 7
    nullable = pd.DataFrame({"id": [9], "n": pd.array([None], "Int32"), "b": pd.array([None], "boolean")})
    copy.insert(nullable.assign(**{name: None for name in schema.names if name not in nullable}))
    assert copy.get(9) == [dict.fromkeys(schema.names) | {"id": 9}]


# --- what is refused


def test_a_stray_retraction_is_told_with_the_number_of_rows_and_the_remedy(shard: Shard) -> None:
    shard.insert([{**row("de", 1), "__diff": -2}, {**row("de", 2), "__diff": -1}, row("de", 3)])
    for read in (lambda: shard.snapshot().to_pandas(), lambda: shard.head(10)):
        with pytest.raises(
            NegativeMultiplicity, match=r"2 of 3 rows.*the first is there -2 times; insert what is missing"
        ):
            read()
    with pytest.raises(NegativeMultiplicity, match=r"1 of 1 rows.*it is there -1 times") as refused:
        shard.get(("de", 2))
    assert "corrupt" not in str(refused.value).lower()
    shard.insert([{**row("de", 1), "__diff": 2}, row("de", 2)])
    assert shard.head() == [row("de", 3)]


REFUSED: list[tuple[Callable[[Shard], object], str]] = [
    (lambda s: s.snapshot(s.upper()), r"as_of is the frontier \[1\]"),
    (lambda s: s.listen(s.since()), r"as_of is the frontier \[0\]"),
    (lambda s: s.snapshot(-2), r"must be a time in \[-1"),
    (lambda s: s.snapshot(where=" "), "where is empty"),
    (lambda s: s.count("n ="), "instead of a literal"),
    (lambda s: s.subscribe(where="n = 1.5"), "cannot compare column 'n'"),
    (lambda s: s.snapshot(where="n < 1e400"), "larger than any double"),
    (lambda s: s.count("st.street = 'x'"), "backquotes"),
    (lambda s: s.listen(None, columns=["nome"]), "no column 'nome'"),
    (lambda s: s.head(columns=["n", "n"]), "named twice"),
    (lambda s: s.snapshot(columns="n"), r"such as \['n'\]"),
    (lambda s: s.snapshot(start_key=("de", 1, 2)), "start_key has 3 values"),
    (lambda s: s.listen(0, end_key=("de", "x")), "end_key: 'x' is text"),
    (lambda s: s.get("de"), "key has 1 values"),
    (lambda s: s.get(("de", None)), "which is never null"),
    (lambda s: s.snapshot(limit=-1), "limit is -1"),
    (lambda s: s.subscribe(0, until=0), "until is .0."),
]


def test_bad_input_is_refused_and_no_hold_is_left(shard: Shard) -> None:
    shard.insert([row("de", 1)])
    for act, message in REFUSED:
        with pytest.raises(InvalidUsage, match=message):
            act(shard)
    shard._transport.leases.let_go("orders")  # type: ignore[attr-defined]
    assert not shard._transport.inner.location.machine("orders").refresh().leased_readers  # type: ignore[attr-defined]
