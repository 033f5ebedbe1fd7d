"""The file of quotas, what each quota counts, and when what is beyond it may succeed. The clock is moved by hand."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from persist.client.shard import HandleSettings
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import replace
from rpc import quotas as quotas_module
from rpc.auth import ANONYMOUS, MAINTENANCE, Principal
from rpc.prefix_usage import PrefixUsage
from rpc.quotas import (
    BURST_S,
    COUNTS,
    FREED_BYTES,
    RATES,
    REFUNDS,
    SHOWN_MAX,
    STAGED_S,
    QuotaFile,
    QuotaFull,
    Quotas,
    RateBucket,
    read_rules,
)
from tests.support.location import TestClock, client_of, memory_location
from tests.support.pages import page
from tests.support.shard import make_part

SCHEMA = pa.schema([("id", pa.int64())])
ETL = Principal("etl", frozenset({"read", "write"}), ("eu/",))
WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)
PART = make_part(1, rows=500)


class House:
    """Quotas by a file, and a tally of a location in memory that looks only when it is told to."""

    def __init__(self, directory: Path, rules: dict[str, Any]) -> None:
        self.clock = TestClock()
        self.location = memory_location()
        self.tally = PrefixUsage(self.location, threaded=False)
        self.client = client_of(self.location, HandleSettings())
        self.path = directory / "quotas.json"
        self.path.write_text(json.dumps(rules))
        self.quotas = Quotas(QuotaFile(str(self.path), self.clock.monotonic), self.clock, self.tally)

    def says(self, rules: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(rules) + " " * len(rules))
        self.clock.advance_ms(1_000)
        assert self.quotas.reload()

    def admit(self, command: c.Command, shard: str = "eu/a", principal: Principal = ETL) -> Callable[[], None] | None:
        """What gives back what was counted, where that is possible."""
        charged: list[Callable[[], None]] = []
        REFUNDS.set(charged)
        self.quotas.admit(principal, shard, command)
        return charged[0] if charged else None

    def shown(self, principal: Principal = ANONYMOUS) -> dict[tuple[str, ...], float]:
        families = {family.name: family for family in self.quotas.families(principal)}
        return {labels: float(value) for labels, value in families["persist_quota_used"].samples}  # type: ignore[arg-type]


def insert(number: int = 0) -> c.Insert:
    return c.Insert(WRITER, TOKEN, (Run((make_part(number, rows=500),)),))


# quota -> the most, what uses it up by the first call and is refused the second time, and what the sentence says
CASES: dict[str, tuple[int, Callable[[House, Principal, int], object], str]] = {
    "requests_per_s": (
        1,
        lambda house, who, _: house.quotas.count_request(who),
        "1 requests a second are allowed; slow",
    ),
    "rows_per_s": (5, lambda house, who, n: house.admit(insert(n), principal=who), "5 rows a second are allowed; slow"),
    "shards": (
        1,
        lambda house, who, n: house.quotas.count_shard(who, f"eu/new-{n}"),
        "1 of 1 shards are used; drop some",
    ),
    "bytes": (
        PART.size,
        lambda house, who, n: house.admit(insert(n), principal=who),
        "delete rows, forget history, or drop shards",
    ),
}


def test_every_quota_has_a_case() -> None:
    assert tuple(CASES) == (*RATES, *COUNTS)


@pytest.mark.parametrize(
    ("kind", "quota"),
    [*(("tokens", q) for q in RATES), *(("default", q) for q in RATES), *(("prefixes", q) for q in COUNTS)],
)
def test_what_is_beyond_a_quota_is_refused_and_says_what_helps(quota: str, kind: str, tmp_path: Path) -> None:
    most, use, said = CASES[quota]
    name = "eu/" if kind == "prefixes" else "etl"
    limits: dict[str, Any] = {quota: most}
    house = House(tmp_path, {"ask": "ops@example.org", kind: limits if kind == "default" else {name: limits}})
    uses_up = int(BURST_S) if quota == "requests_per_s" else 1
    for number in range(uses_up):
        use(house, ETL, number)
    with pytest.raises(QuotaFull, match=said) as refused:
        use(house, ETL, uses_up)
    told, details = str(refused.value), refused.value.details
    of = "the prefix 'eu/' has" if kind == "prefixes" else "the token 'etl' has"
    assert told.startswith(f"{of} no {quota} left: ")
    assert told.endswith("or ask ops@example.org for more")
    assert (details["quota"], details["most"], details["of"]) == (quota, most, name)
    if quota in COUNTS:
        assert details["retry_after_s"] == 60
    else:
        assert details["retry_after_s"] > 0
        house.clock.advance_ms(int(details["retry_after_s"] * 1000) + 1)
        use(house, ETL, uses_up)
    assert house.shown()[("prefix" if kind == "prefixes" else "token", name, quota)] > 0
    for number in range(100, 120):
        use(house, MAINTENANCE, number)  # the server's own maintenance has no quota


def test_more_is_allowed_as_soon_as_the_file_says_so(tmp_path: Path) -> None:
    house = House(tmp_path, {"prefixes": {"eu/": {"shards": 1}}})
    house.quotas.count_shard(ETL, "eu/1")
    with pytest.raises(QuotaFull):
        house.quotas.count_shard(ETL, "eu/2")
    house.says({"prefixes": {"eu/": {"shards": 2}}, "tokens": {}})
    house.quotas.count_shard(ETL, "eu/2")
    with pytest.raises(QuotaFull):
        house.quotas.count_shard(ETL, "eu/3")
    house.says({})
    for number in range(4, 100):
        house.quotas.count_shard(ETL, f"eu/{number}")


def test_what_is_there_is_what_the_shards_hold(tmp_path: Path) -> None:
    house = House(tmp_path, {"prefixes": {"eu/": {"shards": 2, "bytes": 10_000}}})
    for name in ("eu/a", "eu/b", "us/a"):
        house.client.create_shard(name, SCHEMA, key=["id"])
    house.client.shard("eu/a").insert([{"id": 1}])
    state = house.location.machine("eu/a").state()
    size = sum(part.size for part in state.trace.parts())
    house.tally.refresh()
    assert house.shown() == {("prefix", "eu/", "shards"): 2, ("prefix", "eu/", "bytes"): size}
    house.quotas.count_shard(ETL, "eu/a")  # it is there
    with pytest.raises(QuotaFull, match="2 of 2 shards are used"):
        house.quotas.count_shard(ETL, "eu/c")
    house.client.shard("eu/b").drop()
    house.tally.refresh()
    house.quotas.count_shard(ETL, "eu/c")


FULL = {"prefixes": {"eu/": {"bytes": 0}}}


def truncate(size: int, **said: int) -> c.Rewrite:
    part = replace(PART, **{"size": size, "diff_min": -1, "diff_max": -1, "diff_sum": -5, **said})
    return c.Rewrite(WRITER, TOKEN, Antichain(9), 8, c.TRUNCATE, (Run((part,)),), truncates=2)


def test_where_no_bytes_are_left_rows_can_be_taken_away(tmp_path: Path) -> None:
    house = House(tmp_path, FULL)
    with pytest.raises(QuotaFull):
        house.admit(insert())
    house.admit(truncate(1_000))


def test_what_adds_rows_under_the_name_of_a_truncation_needs_room(tmp_path: Path) -> None:
    house = House(tmp_path, FULL)
    with pytest.raises(QuotaFull):
        house.admit(truncate(1_000, diff_max=1))


def test_retractions_without_room_are_bounded_by_what_was_there(tmp_path: Path) -> None:
    """Of rows that are not there, too: they are bytes as others are."""
    house = House(tmp_path, {"prefixes": {"eu/": {"bytes": 10 << 20}}})
    house.admit(replace(insert(), runs=(Run((replace(PART, size=10 << 20),)),)))
    for _ in range(21):  # twice of what was there, and a little
        house.admit(truncate(1 << 20))
    with pytest.raises(QuotaFull):
        house.admit(truncate(1 << 20))


def test_a_truncation_that_was_refused_gives_its_room_back(tmp_path: Path) -> None:
    house = House(tmp_path, FULL)
    for _ in range(50):
        give_back = house.admit(truncate(FREED_BYTES))
        assert give_back is not None
        give_back()
    house.admit(truncate(FREED_BYTES))
    with pytest.raises(QuotaFull):
        house.admit(truncate(FREED_BYTES))


def test_a_caller_sees_its_own_figures_and_of_at_most_so_many(tmp_path: Path) -> None:
    tokens = {f"t{n}": {"requests_per_s": 5} for n in range(SHOWN_MAX + 50)}
    prefixes = {"eu/": {"shards": 5}, "us/": {"shards": 5}}
    house = House(tmp_path, {"tokens": tokens, "prefixes": prefixes})
    for name in tokens:
        house.quotas.count_request(Principal(name, ETL.scopes, ("eu/",)))
    mine = Principal("t7", ETL.scopes, ("eu/",))
    assert set(house.shown(mine)) == {("token", "t7", "requests_per_s"), ("prefix", "eu/", "shards")}
    assert len(house.shown()) == SHOWN_MAX + 2


def test_without_a_file_nothing_is_counted() -> None:
    location = memory_location()
    quotas = Quotas(None, TestClock(), PrefixUsage(location, threaded=False))
    for _ in range(1_000):
        quotas.count_request(ETL, writes=True)
    assert not quotas.bounds_bytes(ETL, "eu/a")
    assert not quotas.reload()


def test_a_request_larger_than_a_burst_is_possible_and_paid_off() -> None:
    bucket = RateBucket(10, 0.0)
    assert bucket.wait_s(0.0) == 0
    bucket.take(150)
    assert bucket.wait_s(0.0) == pytest.approx(10.1)
    assert bucket.wait_s(10.0) > 0
    assert bucket.wait_s(10.2) == 0
    bucket.take(10**12)
    assert bucket.wait_s(10.2) <= 3_601


def test_parts_that_are_not_committed_count_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiny ones made the server forget a large one."""
    monkeypatch.setattr(quotas_module, "STAGED_MAX", 3)
    house = House(tmp_path, {"prefixes": {"eu/": {"bytes": 1_000}}})
    house.quotas.count_upload(ETL, "eu/a", "large", 900)
    for number in range(20):
        house.quotas.count_upload(ETL, "eu/a", f"tiny-{number}", 1)
    with pytest.raises(QuotaFull):
        house.quotas.count_upload(ETL, "eu/a", "another", 200)
    house.clock.advance_ms(int(STAGED_S * 1000) + 1)
    house.quotas.count_upload(ETL, "eu/a", "another", 900)


def test_a_part_that_did_not_get_there_counts_no_more(tmp_path: Path) -> None:
    house = House(tmp_path, {"prefixes": {"eu/": {"bytes": 1_000}}})
    charged: list[Callable[[], None]] = []
    REFUNDS.set(charged)
    house.quotas.count_upload(ETL, "eu/a", "one", 900)
    for give_back in charged:
        give_back()
    house.quotas.count_upload(ETL, "eu/a", "two", 900)


# --- the file of quotas: what it may say, and that a bad one leaves the last good one in force

BAD_FILES: list[tuple[Any, str]] = [
    (b"", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    ([], "Expected `object`"),
    ({"token": {}}, "unknown field `token`"),
    (b'{"default": {}, "default": {}}', "is not JSON"),
    ({"default": []}, r"default"),
    ({"default": {"request_per_s": 1}}, "unknown field `request_per_s`"),
    ({"tokens": {"etl": {"shards": 1}}}, "tokens 'etl' in .* unknown field `shards`"),
    ({"prefixes": {"eu/": {"rows_per_s": 1}}}, "prefixes 'eu/' in .* unknown field `rows_per_s`"),
    ({"default": {"requests_per_s": 0}}, ">= 1 .*default.requests_per_s"),
    ({"prefixes": {"eu/": {"shards": -1}}}, "prefixes 'eu/' in .* >= 0 .*shards"),
    ({"prefixes": {"eu/": {"shards": True}}}, "shards"),
    ({"prefixes": {"eu/": {"shards": 1.5}}}, "shards"),
    ({"default": {"rows_per_s": 2**60}}, "default.rows_per_s"),
    ({"tokens": []}, "tokens"),
    ({"tokens": {"a_b": {}}}, "key.*tokens"),
    ({"tokens": {"a": 7}}, "tokens 'a' in .* Expected `object`"),
    ({"prefixes": {"": {}}}, "key.*prefixes"),
    ({"prefixes": {"a b": {}}}, "key.*prefixes"),
    ({"ask": ""}, "ask"),
    ({"ask": "a\nb"}, "ask in .* printable"),
    ({"tokens": {f"t{n}": {} for n in range(10_001)}}, "length <= 10000 .*tokens"),
]


def written_file(path: Path, content: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


@pytest.mark.parametrize(("content", "said"), BAD_FILES)
def test_bad_files_are_refused_by_a_sentence_that_names_the_place(content: Any, said: str, tmp_path: Path) -> None:
    path = written_file(tmp_path / "quotas.json", content)
    with pytest.raises(InvalidUsage, match=said) as refused:
        read_rules(path)
    assert path in str(refused.value)


def test_what_is_no_regular_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "nowhere"):
        with pytest.raises(InvalidUsage, match="cannot be read"):
            read_rules(str(tmp_path / name))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    """They would give themselves what they like."""
    path = written_file(tmp_path / "quotas.json", {"default": {"rows_per_s": 1}})
    os.chmod(path, mode)
    with pytest.raises(InvalidUsage, match=f"the mode {mode:04o}, so others may write it: run chmod go-w {path}"):
        read_rules(path)


def test_a_token_has_the_defaults_but_for_what_its_entry_says(tmp_path: Path) -> None:
    every = dict.fromkeys(RATES, 5)
    found = read_rules(
        written_file(
            tmp_path / "quotas.json",
            {
                "default": every,
                "tokens": {"etl": {"requests_per_s": 9, "rows_per_s": None}},
                "prefixes": {"eu/": {"shards": None}},
            },
        )
    )
    assert found.of_token("anybody-else") == every
    assert found.of_token("etl") == {"requests_per_s": 9}
    assert found.of_prefix("eu/") == {}


def test_a_bad_file_keeps_the_last_good_one_and_says_so_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "quotas.json", [0.0]
    file = QuotaFile(written_file(path, {"default": {"rows_per_s": 1}}), lambda: now[0])
    written_file(path, {"default": {"rows_per_s": 20}})
    assert not file.reload(), "it has just looked"
    now[0] += 1
    assert file.reload()
    assert file.rules.of_token("a") == {"rows_per_s": 20}
    for content in (b'{"default": {"sha', b""):
        written_file(path, content)
        now[0] += 1
        with caplog.at_level(logging.ERROR):
            assert not file.reload()
        assert file.rules.of_token("a") == {"rows_per_s": 20}
        assert "is not JSON" in file.unreadable
    assert [record.message for record in caplog.records] == [
        "the quotas file is invalid; the previous quotas apply"
    ] * 2
    path.unlink()
    now[0] += 1
    assert not file.reload()
    assert "cannot be read" in file.unreadable
    written_file(path, {})
    now[0] += 1
    assert file.reload()
    assert (file.rules.of_token("a"), file.unreadable) == ({}, "")


def test_quotas_of_tokens_bind_nobody_where_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, now = tmp_path / "quotas.json", [0.0]
    for rules in ({"default": {"rows_per_s": 1}}, {"tokens": {"etl": {"rows_per_s": 1}}}):
        with pytest.raises(InvalidUsage, match="give --tokens FILE"):
            QuotaFile(written_file(path, rules), lambda: now[0], has_tokens=False)
        QuotaFile(written_file(path, rules), lambda: now[0])
    prefixes = {"prefixes": {"eu/": {"shards": 1}}}
    file = QuotaFile(written_file(path, prefixes), lambda: now[0], has_tokens=False)
    written_file(path, {**prefixes, "default": {"rows_per_s": 20}})
    now[0] += 1
    assert file.reload()
    assert [record.levelname for record in caplog.records if "limits tokens" in record.message] == ["WARNING"]


def test_the_page_names_every_quota_and_its_example_can_be_read(tmp_path: Path) -> None:
    text = page("docs/operations.md")
    section = text[text.index("### Quotas") : text.index("### Audit")]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) == {*RATES, *COUNTS}
    example = section[section.index("```json") + 7 : section.index("```", section.index("```json") + 7)]
    found = read_rules(written_file(tmp_path / "quotas.json", example.encode()))
    assert found.ask == "ops@example.org"
    assert found.of_token("etl") == {"rows_per_s": 100_000}
