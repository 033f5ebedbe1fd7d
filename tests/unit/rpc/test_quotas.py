"""What each quota counts, and when what is beyond it may succeed. The clock stands until a test moves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.attribute import AttributeKey, AttributeUpdate
from persist.core.batch import Run
from persist.core.ids import CriticalReaderId, ReaderId, Token, WriterId
from persist.core.record import replace
from persist.core.state import State, blank_state
from rpc import quotas as quotas_module
from rpc.admitting import admit, settle
from rpc.auth import ANYBODY, MAINTENANCE, Principal
from rpc.quota_file import COUNTS, QUOTAS, RATES, QuotaFile
from rpc.quotas import CHARGED, FREED_BYTES, SHOWN_MAX, STAGED_S, QuotaFull, Quotas
from rpc.rates import BURST_S, Bucket
from rpc.tally import Tally
from tests.support.location import TestClock, memory_location
from tests.support.shard import make_part

SCHEMA = pa.schema([("id", pa.int64())])
ETL = Principal("etl", frozenset({"read", "write"}), ("eu/",))
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)


class House:
    """Quotas by a file, and a tally of a location in memory that looks only when it is told to."""

    def __init__(self, directory: Path, rules: dict[str, Any]) -> None:
        self.clock = TestClock()
        self.location = memory_location()
        self.tally = Tally(self.location, threaded=False)
        self.client = Client(EmbeddedTransport(self.location), HandleSettings())
        self.path = directory / "quotas.json"
        self.path.write_text(json.dumps(rules))
        self.quotas = Quotas(QuotaFile(str(self.path), self.clock.monotonic), self.clock, self.tally)

    def says(self, rules: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(rules) + " " * len(rules))
        self.clock.advance_ms(1_000)
        assert self.quotas.look()

    def admit(
        self, command: c.Command, shard: str = "eu/a", principal: Principal = ETL, state: State | None = None
    ) -> Callable[[], None] | None:
        """What gives back what was counted, where that is possible."""
        charged: list[Callable[[], None]] = []
        CHARGED.set(charged)
        admit(self.quotas, principal, shard, command, lambda: state)
        return charged[0] if charged else None

    def shown(self, principal: Principal = ANYBODY) -> dict[tuple[str, ...], float]:
        families = {family.name: family for family in self.quotas.families(principal)}
        return {labels: float(value) for labels, value in families["persist_quota_used"].samples}  # type: ignore[arg-type]


def insert(number: int = 0, attributes: tuple[AttributeUpdate, ...] = ()) -> c.Insert:
    return c.Insert(WRITER, TOKEN, (Run((make_part(number, rows=500),)),), attributes)


def reader(number: int) -> c.RegisterReader:
    return c.RegisterReader(ReaderId(f"r{number:032x}"), Antichain(0), 60_000, "test")


def cursor(number: int) -> c.RegisterCriticalReader:
    return c.RegisterCriticalReader(CriticalReaderId(f"c{number:032x}"), "", "test")


def update(number: int) -> c.UpdateAttributes:
    changed = AttributeUpdate.replace(AttributeKey(f"{number + 1:032x}"), 1)
    return c.UpdateAttributes(WRITER, TOKEN, (changed,))


PART = make_part(1, rows=500)
# quota -> the most, what uses it up by the first call and is refused the second time, and what the sentence says
CASES: dict[str, tuple[int, Callable[[int], c.Command] | None, str]] = {
    "requests_per_s": (1, None, "1 requests a second are allowed; slow down"),
    "rows_per_s": (max(1, PART.rows // 100), insert, "rows a second are allowed; slow down"),
    "bytes_per_s": (max(1, PART.size // 100), insert, "bytes a second are allowed; slow down"),
    "shards": (1, lambda _: c.Recreate, "1 shards are there, 1 are allowed; drop some"),  # type: ignore[dict-item,return-value]
    "bytes": (PART.size, insert, "delete rows, let history go, or drop shards"),
    "leases": (1, reader, "1 leases are there, 1 are allowed; give some up, or wait until they lapse"),
    "cursors": (1, cursor, "1 cursors are there, 1 are allowed; give some up"),
    "attributes": (1, update, "1 attributes are there, 1 are allowed; unset some"),
    "writers": (
        1,
        lambda n: c.RegisterWriter(WriterId(f"w{n:032x}"), 60_000),
        "1 writers are there, 1 are allowed; expire some, or wait until they lapse",
    ),
}


def test_every_quota_has_a_case() -> None:
    assert tuple(CASES) == QUOTAS


def use(house: House, quota: str, principal: Principal) -> Callable[[int], object]:
    """What uses one of a quota."""
    command = CASES[quota][1]
    if quota == "shards":
        return lambda number: house.quotas.creates(principal, f"eu/new-{number}")
    if command is None:
        return lambda _: house.quotas.request(principal, "eu/a")
    return lambda number: house.admit(command(number), principal=principal)


@pytest.mark.parametrize("kind", ["token", "prefix", "default"])
@pytest.mark.parametrize("quota", QUOTAS)
def test_what_is_beyond_a_quota_is_refused_and_says_what_helps(quota: str, kind: str, tmp_path: Path) -> None:
    most, _, said = CASES[quota]
    limits = {quota: most}
    rules: dict[str, Any] = {"default": limits} if kind == "default" else {f"{kind}s": {"etl": limits}}
    if kind == "prefix":
        rules = {"prefixes": {"eu/": limits}}
    house = House(tmp_path, {"ask": "ops@example.org", **rules})
    uses, others = use(house, quota, ETL), use(house, quota, MAINTENANCE)
    uses_up = int(BURST_S) if quota == "requests_per_s" else 1
    for number in range(uses_up):
        uses(number)
    with pytest.raises(QuotaFull, match=said) as refused:
        uses(uses_up)
    told, details = str(refused.value), refused.value.details
    of = "all shards under 'eu/' together has" if kind == "prefix" else "the token 'etl' has"
    assert told.startswith(f"{of} no {quota} left: ")
    assert told.endswith("or ask ops@example.org for more")
    assert (details["quota"], details["most"]) == (quota, most)
    if quota in COUNTS:
        assert details["retry_after_s"] == 60
    else:
        assert details["retry_after_s"] > 0
        house.clock.advance_ms(int(details["retry_after_s"] * 1000) + 1)
        uses(uses_up)
    assert house.shown()[("prefix" if kind == "prefix" else "token", "eu/" if kind == "prefix" else "etl", quota)] > 0
    for number in range(100, 120):
        others(number)  # the server's own maintenance has no quota


def test_more_is_allowed_as_soon_as_the_file_says_so(tmp_path: Path) -> None:
    house = House(tmp_path, {"tokens": {"etl": {"cursors": 1, "requests_per_s": 1}}})
    house.admit(cursor(1))
    with pytest.raises(QuotaFull):
        house.admit(cursor(2))
    house.says({"tokens": {"etl": {"cursors": 2}}, "prefixes": {}})
    house.admit(cursor(2))
    with pytest.raises(QuotaFull):
        house.admit(cursor(3))
    house.says({})
    for number in range(4, 100):
        house.admit(cursor(number))


def test_leases_count_until_they_are_given_up_or_lapse_and_not_at_all_where_they_are_refused(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"leases": 1}})
    give_back = house.admit(reader(1))
    assert give_back is not None
    give_back()  # the shard refused it
    house.admit(reader(2))
    assert house.admit(reader(2)) is None, "the same again is no new one"
    house.clock.advance_ms(50_000)
    house.admit(c.HeartbeatReader(ReaderId(f"r{2:032x}")))
    house.clock.advance_ms(50_000)
    with pytest.raises(QuotaFull):
        house.admit(reader(3))
    house.clock.advance_ms(10_001)
    house.admit(reader(3))
    expire = c.ExpireReader(ReaderId(f"r{3:032x}"))
    settle(house.quotas, ETL, "eu/a", expire, lambda: None)  # nobody knows yet whether the shard has it
    with pytest.raises(QuotaFull):
        house.admit(reader(4))
    settle(house.quotas, ETL, "eu/a", expire, lambda: blank_state("eu/a"))
    house.admit(reader(4))


def test_what_is_there_is_what_the_shards_hold(tmp_path: Path) -> None:
    house = House(tmp_path, {"prefixes": {"eu/": {"shards": 2, "bytes": 10_000}}})
    for name in ("eu/a", "eu/b", "us/a"):
        house.client.create_shard(name, SCHEMA, key=["id"])
    house.client.shard("eu/a").insert([{"id": 1}])
    state = house.location.machine("eu/a").state()
    size = sum(part.size for part in state.trace.parts())
    house.tally.look()
    assert house.shown() == {("prefix", "eu/", "shards"): 2, ("prefix", "eu/", "bytes"): size}
    house.quotas.creates(ETL, "eu/a")  # it is there
    with pytest.raises(QuotaFull, match="2 shards are there, 2 are allowed"):
        house.quotas.creates(ETL, "eu/c")
    house.client.shard("eu/b").drop()
    house.tally.look()
    house.quotas.creates(ETL, "eu/c")


def test_a_token_counts_under_each_of_its_prefixes_once(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"shards": 3}})
    many = Principal("many", ETL.scopes, ("eu/", "eu/x", "us/"))
    for name in ("eu/a", "eu/xa", "us/a"):
        house.client.create_shard(name, SCHEMA, key=["id"])
    house.quotas.owners(many, None)
    house.tally.look()
    assert house.shown()["token", "many", "shards"] == 3


def test_unsetting_attributes_takes_nothing_and_setting_one_again_neither(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"attributes": 1}})
    shard = house.client.create_shard("eu/a", SCHEMA, key=["id"])
    shard.open_writer().update_attributes(AttributeUpdate.replace("a" * 32, 1))
    state = house.location.machine("eu/a").state()
    for _ in range(3):
        gone = AttributeUpdate.delete("b" * 32)
        house.admit(c.UpdateAttributes(WRITER, TOKEN, (gone, AttributeUpdate.replace("a" * 32, 2))), state=state)
    house.admit(update(1), state=state)
    with pytest.raises(QuotaFull):
        house.admit(update(2), state=state)


def test_where_no_bytes_are_left_rows_can_be_taken_away(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"bytes": 0}})
    with pytest.raises(QuotaFull):
        house.admit(insert())
    house.admit(truncate(1_000))


def truncate(size: int, **said: int) -> c.Truncate:
    part = replace(PART, **{"size": size, "diff_min": -1, "diff_max": -1, "diff_sum": -5, **said})
    return c.Truncate(WRITER, TOKEN, Antichain(9), 1, (Run((part,)),))


def test_what_adds_rows_under_the_name_of_a_truncation_needs_room(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"bytes": 0}})
    with pytest.raises(QuotaFull):
        house.admit(truncate(1_000, diff_max=1))


def test_retractions_without_room_are_bounded_by_what_was_there(tmp_path: Path) -> None:
    """Of rows that are not there, too: they are bytes as others are."""
    house = House(tmp_path, {"default": {"bytes": 10 << 20}})
    house.admit(replace(insert(), runs=(Run((replace(PART, size=10 << 20),)),)))
    for _ in range(21):  # twice of what was there, and a little
        house.admit(truncate(1 << 20))
    with pytest.raises(QuotaFull):
        house.admit(truncate(1 << 20))


def test_a_part_that_came_through_the_server_is_not_counted_twice(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"bytes_per_s": PART.size}})
    assert PART.key is not None
    for _ in range(2):
        house.quotas.uploads(ETL, "eu/a", PART.key, 0)
        house.admit(insert(1))
    assert house.shown()["token", "etl", "bytes_per_s"] == 0


def test_a_caller_sees_its_own_figures_and_of_at_most_so_many(tmp_path: Path) -> None:
    limits = {"requests_per_s": 5}
    tokens = {f"t{n}": limits for n in range(SHOWN_MAX + 50)}
    house = House(tmp_path, {"tokens": tokens, "prefixes": {"eu/": limits, "us/": limits}})
    for name in tokens:
        house.quotas.request(Principal(name, ETL.scopes, ("eu/",)), None)
    mine = Principal("t7", ETL.scopes, ("eu/",))
    assert set(house.shown(mine)) == {("token", "t7", "requests_per_s"), ("prefix", "eu/", "requests_per_s")}
    assert len(house.shown()) == SHOWN_MAX + 2


def test_without_a_file_nothing_is_counted() -> None:
    location = memory_location()
    quotas = Quotas(None, TestClock(), Tally(location, threaded=False))
    assert quotas.owners(ETL, "eu/a") == []
    assert not quotas.look()


def test_a_request_larger_than_a_burst_is_possible_and_paid_off() -> None:
    bucket = Bucket(10, 0.0)
    assert bucket.wait_s(0.0) == 0
    bucket.take(150)
    assert bucket.wait_s(0.0) == pytest.approx(10.1)
    assert bucket.wait_s(10.0) > 0
    assert bucket.wait_s(10.2) == 0
    bucket.take(10**12)
    assert bucket.wait_s(10.2) <= 3_601


def test_rates_are_those_of_the_names_of_quotas() -> None:
    assert all(quota.endswith("_per_s") for quota in RATES)


def test_parts_that_are_not_committed_count_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiny ones made the server forget a large one."""
    monkeypatch.setattr(quotas_module, "UPLOADED_MAX", 3)
    house = House(tmp_path, {"default": {"bytes": 1_000}})
    house.quotas.uploads(ETL, "eu/a", "large", 900)
    for number in range(20):
        house.quotas.uploads(ETL, "eu/a", f"tiny-{number}", 1)
    with pytest.raises(QuotaFull):
        house.quotas.uploads(ETL, "eu/a", "another", 200)
    house.clock.advance_ms(int(STAGED_S * 1000) + 1)
    house.quotas.uploads(ETL, "eu/a", "another", 900)


def test_a_part_that_did_not_get_there_counts_no_more(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"bytes": 1_000}})
    charged: list[Callable[[], None]] = []
    CHARGED.set(charged)
    house.quotas.uploads(ETL, "eu/a", "one", 900)
    for give_back in charged:
        give_back()
    house.quotas.uploads(ETL, "eu/a", "two", 900)


def test_a_truncation_that_was_refused_gives_its_room_back(tmp_path: Path) -> None:
    house = House(tmp_path, {"default": {"bytes": 0}})
    for _ in range(50):
        give_back = house.admit(truncate(FREED_BYTES))
        assert give_back is not None
        give_back()
    house.admit(truncate(FREED_BYTES))
    with pytest.raises(QuotaFull):
        house.admit(truncate(FREED_BYTES))
