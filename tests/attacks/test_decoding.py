"""Who sends few bytes that become many, many times at once."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from persist.codecs.rows import MEDIA_TYPES
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.blob_keys import part_key
from persist.core.ids import PartId, Token, WriterId, shard_id_of
from persist.formats.http_messages import RECORD
from persist.formats.records import encoded
from persist.parts import DIFF, TIME, ShardSchema, codec, encode_parquet
from tests.attacks import harness
from tests.attacks.harness import EVIL_SHARD, FIELDS, Evil, House
from tests.support.bombs import file, named, stream, viewed, zeros
from tests.support.waiting import WAIT_S

MIB = 1 << 20
ARROW, PARQUET, NDJSON, CSV = MEDIA_TYPES.values()
CALLERS, MANY_CALLERS = 2, 6
PARTS_SHARD = "evil/parts"
Body = tuple[str, bytes]


def bombs(rows: int) -> list[Body]:
    """Bodies of less than 4 MiB that become far more: `rows` of 8 bytes, or as many bytes for each of 2,000."""
    many = pa.table({"id": zeros(rows), "text": pa.nulls(rows, pa.string())})
    texts = pa.table({"id": zeros(2_000), "text": named(2_000, rows // 20)})
    views = pa.table({"id": zeros(2_000), "text": viewed(2_000, rows // 20)})
    return [
        (ARROW, stream(many)),
        (ARROW, stream(texts)),
        (ARROW, stream(views)),
        (PARQUET, file(many)),
        (PARQUET, file(texts, store_schema=False)),
        (NDJSON, b'{"id":1,"text":' + b"[" * 3 * MIB),
        (NDJSON, b'{"id":1,"text":[' + b"{}," * MIB + b"{}]}\n"),
        (CSV, b"id,text\n" + b"1,\n" * MIB),
    ]


def posted(evil: Evil, bodies: Sequence[Body], count: int = CALLERS) -> list[int]:
    """The statuses of all of them, sent from several threads, each beginning with another one."""
    told: list[int] = []
    path = f"/v1/shards/{evil.shard}/insert"

    def post(first: int) -> None:
        for number in range(len(bodies)):
            media, body = bodies[(first + number) % len(bodies)]
            told.append(evil.ask("POST", path, body, {"content-type": media})[0])

    callers = [threading.Thread(target=post, args=(first,)) for first in range(count)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert len(told) == count * len(bodies)
    return told


@pytest.mark.smoke
@pytest.mark.proof
def test_bodies_that_become_large(house: House) -> None:
    """37 kB took 1.3 GB, and 32 such at once were allowed."""

    def attack(house: House, evil: Evil) -> None:
        assert set(posted(evil, bombs(4_000_000))) <= {413, 429}
        house.others_work()
        assert house.pools()["decoded_bytes"] == 0

    house.withstands(attack)


def test_bodies_as_large_as_they_may_be(house: House) -> None:
    """They are written, some at a time, and others' rows are never kept out."""

    def attack(house: House, evil: Evil) -> None:
        rows = pa.table({"id": zeros(90_000), "text": ["x"] * 90_000})
        found = posted(evil, [(ARROW, stream(rows)), (PARQUET, file(rows))])
        assert set(found) <= {200, 429}
        assert 200 in found
        house.others_work()

    house.withstands(attack)


def _empty_things() -> list[tuple[str, str, str, bytes]]:
    """Token, method, path and body of requests that become far more than they are: half a gigabyte each."""
    many = 4 * MIB
    array = b"\xdd" + many.to_bytes(4, "big")
    runs, texts = array + b"\x91\x90" * many, array + b"\xa1x" * many
    writer, token = b"\xd9\x21w" + b"1" * 32, b"\xd9\x21i" + b"1" * 32
    shard, lists = f"/v1/shards/{EVIL_SHARD}", b"[" + b"[]," * (many - 1) + b"[]]"
    return [
        ("evil", "POST", f"{shard}/commands", b"\x94\xa6insert" + writer + token + runs),
        ("evil", "POST", f"{shard}/commands", b"\x95\xaemerge_progress" + texts),
        ("evil", "POST", f"{shard}/receipts", b"\x91" + runs),
        ("evil-reader", "POST", "/v1/cuts", b'{"shards":' + lists + b"}"),
        ("evil", "POST", "/v1/truncate", b'{"v":1,"shards":' + lists + b"}"),
        ("evil", "PUT", "/v1/shards/evil/new", b'{"fields":' + lists[: 3 * MIB] + b"[]]}"),
        ("admin", "POST", "/v1/shards:delete", b'{"shards":' + lists[: 3 * MIB] + b"[]]}"),
    ]


@pytest.mark.smoke
@pytest.mark.proof
def test_commands_and_json_of_many_empty_things(house: House) -> None:
    """Four commands of 16 MiB took 4 GB, and the event loop stood still for 9 s; a reader did so by JSON."""
    bodies = _empty_things()

    def attack(house: House, evil: Evil) -> None:
        told: list[tuple[str, int]] = []

        def send(first: int) -> None:
            for number in range(len(bodies)):
                token, method, path, body = bodies[(first + number) % len(bodies)]
                try:
                    told.append((path, house.ask(token, method, path, body)[0]))
                except ConnectionError:  # it is refused before all of it is sent
                    told.append((path, 413))

        senders = [threading.Thread(target=send, args=(first,)) for first in range(CALLERS)]
        for sender in senders:
            sender.start()
        house.others_work()
        for sender in senders:
            sender.join(WAIT_S)
        assert len(told) == CALLERS * len(bodies)
        assert {status for _, status in told} <= {400, 413, 429}, told
        assert house.pools()["decoded_bytes"] == 0

    house.withstands(attack)


def _staged(house: House, rows: pa.Table, number: int, monkeypatch: pytest.MonkeyPatch) -> c.Insert:
    """A part in the blob store, of a writer that makes row groups of any size, and what commits it."""
    writer = WriterId("w" + "1" * 32)
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())]), ("id",))
    key = part_key(shard_id_of(PARTS_SHARD), writer, PartId(f"p{number:032x}"))
    with monkeypatch.context() as patch:
        patch.setattr(codec, "ROW_GROUP_BYTES", 1 << 40)
        patch.setattr(codec, "ROW_GROUP_ROWS", len(rows))
        part, data = encode_parquet(rows.cast(schema.updates_schema), schema, 1, PartId(f"p{number:032x}"), key)
    assert house.ask("evil", "PUT", f"/v1/blobs/{key}", data)[0] == 204
    return c.Insert(writer, Token(f"i{number:032x}"), (Run((part,)),))


@pytest.mark.smoke
@pytest.mark.proof
def test_parts_that_become_large(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 3,632 bytes took 2 GiB when it was committed. Of one beyond 1 MiB only times are read then."""
    count, chance = 250_000, random.Random(1)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int8()), pa.array(["x" * 700])).cast(pa.string())
    many = {"id": sorted(chance.getrandbits(62) for _ in range(count)), "text": text}
    large = pa.table({**many, TIME: [0] * count, DIFF: [1] * count})
    small = large.slice(0, 200_000).set_column(0, "id", pa.array(range(200_000)))
    assert house.ask("evil", "PUT", f"/v1/shards/{PARTS_SHARD}", json.dumps(FIELDS).encode())[0] == 200
    commits = [_staged(house, rows, number, monkeypatch) for number, rows in enumerate((small, large), 1)]
    del many, small, large, text

    def attack(house: House, evil: Evil) -> None:
        path = f"/v1/shards/{PARTS_SHARD}/commands"
        told = [evil.ask("POST", path, encoded(commit), {"content-type": RECORD})[0] for commit in commits]
        assert told == [400, 200]
        house.others_work()
        for _ in range(3):
            assert evil.ask("GET", f"/v1/shards/{PARTS_SHARD}/snapshot?format=csv")[0] == 400
        house.others_work()

    house.withstands(attack)


@pytest.mark.proof
def test_large_rows_by_the_limits_that_servers_have(tmp_path: Path) -> None:
    """As many as there may be are decoded, sorted and written at once, beside parts and bodies that are refused."""

    def attack(house: House, evil: Evil) -> None:
        rows = pa.table({"id": zeros(1_500_000), "text": ["x"] * 1_500_000})
        large = [(ARROW, stream(rows, None)), (PARQUET, file(rows)), *bombs(4_900_000)]
        found = posted(evil, large, MANY_CALLERS)
        assert set(found) <= {200, 413, 429}
        house.others_work()
        assert posted(evil, large[:2], 1) == [200, 200], "they are refused only beside one another"

    with harness.house(tmp_path, {}) as house:
        house.withstands(attack)
