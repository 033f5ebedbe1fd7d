"""`persist check`: each finding is provoked for real, and a location that is well has none."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pyarrow as pa
import pytest

import persist
from persist.check.check_runner import Report, decode_report, make_report, run_check
from persist.check.findings import IDS, SEVERITIES, age, at, diagnosis, many, ranked, size, some
from persist.inspect.readonly_location import LocationSummary, open_readonly_directory
from rpc.cli.program import parser_for
from tests.support import json_schemas
from tests.support.ailments import AILMENTS, CALM, Ailment, examine, filled, made
from tests.support.ailments import at as examined_at
from tests.support.clocks import DAY_MS, HOUR_MS, World

SCHEMA = pa.schema([("id", pa.int64())])
VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schemas.CHECK.read_text(encoding="utf-8")))
PROVOKED = [(found, ailment) for found, ailments in AILMENTS.items() for ailment in ailments]


@pytest.mark.parametrize(("found", "ailment"), PROVOKED, ids=[f"{one}-{made.__name__}" for one, made in PROVOKED])
def test_a_finding_is_told_where_it_is_provoked(found: str, ailment: Ailment, tmp_path: Path) -> None:
    told = ailment(tmp_path / "location")
    document = json.loads(told.report.text())
    VALIDATOR.validate(document)
    known = [one for one in told.report.findings if one.id == found and one.shard == told.shard]
    assert [one for one in known if all(word in one.what for word in told.words)], told.report.findings
    for one in told.report.findings:
        for sentence in (one.what, one.cause, one.remedy):
            assert sentence
            assert not sentence.endswith("."), "who shows it ends the sentence"
        assert one.page == f"docs/check.md#{one.id}"
        if one.command is not None:
            can_be_typed(one.command)


def can_be_typed(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "persist"
    parser_for(words[0]).parse_args(words)


def test_every_finding_is_provoked() -> None:
    assert set(AILMENTS) == set(IDS)


# --- what is well


def test_a_healthy_location_has_no_finding(tmp_path: Path) -> None:
    place = tmp_path / "location"
    with persist.connect(f"persist://{place}") as client:
        shard = client.create_shard("eu/orders", SCHEMA, ["id"])
        for number in range(50):
            shard.insert([{"id": number}])
        shard.tag("eom")
        shard.retain({"age": "90d"})
        shard.snapshot().to_arrow()
        client.create_shard("empty", SCHEMA, ["id"])
        client.clone("eu/orders", "copy")
        client.create_shard("gone", SCHEMA, ["id"]).drop()
        reader, cursor = shard.open_reader(purpose="report"), shard.critical_reader("nightly")
        assert beside_writers(place).findings == []
        cursor.downgrade_since(40)
        reader.close()
    told = examined_at(place)
    assert (told.findings, told.shards, told.left_out) == ([], 3, 0)


def beside_writers(place: Path) -> Report:
    """While the program that writes is there: it may write at any moment."""
    look = open_readonly_directory(place)
    try:
        return run_check(look, None, CALM)
    finally:
        look.close()


def test_a_location_without_a_shard_has_no_finding(tmp_path: Path) -> None:
    persist.connect(f"persist://{tmp_path / 'location'}").close()
    assert examined_at(tmp_path / "location").findings == []


def test_what_lasts_for_a_moment_only_is_no_finding() -> None:
    """Readers, claims, merges that are due and cursors all are there in a location that is well."""
    world = World()
    machine = world.machine()
    shard = made(machine, rows=30, history="1d")
    shard.open_reader(0, purpose="now")
    shard.critical_reader("nightly")
    filled(machine, shard, 10)
    world.pass_ms(HOUR_MS)
    assert examine(world).findings == []


def test_history_that_is_kept_on_purpose_is_no_finding() -> None:
    world = World()
    machine = world.machine()
    shard = made(machine, history="forever")
    shard.tag("eom", at=1)
    world.pass_ms(100 * DAY_MS)
    filled(machine, shard, 1)
    assert examine(world).findings == []


def test_a_cursor_at_the_latest_time_is_not_still() -> None:
    world = World()
    shard = made(world.machine())
    latest = shard.upper().element
    assert latest is not None
    shard.critical_reader("nightly").downgrade_since(latest - 1)
    world.pass_ms(100 * DAY_MS)
    assert [one.id for one in examine(world).findings] == []


def test_a_cursor_that_moved_lately_is_not_still() -> None:
    world = World()
    machine = world.machine()
    shard = made(machine)
    cursor = shard.critical_reader("nightly")
    world.pass_ms(9 * DAY_MS)
    filled(machine, shard, 1)
    cursor.downgrade_since(1)
    assert "cursor-still" not in [one.id for one in examine(world).findings]


# --- reports


def test_the_worst_comes_first() -> None:
    found = [
        diagnosis(one, "x", cause="x", remedy="x", shard=shard) for one in reversed(IDS) for shard in ("b", "a", None)
    ]
    told = ranked(iter(found))
    assert [SEVERITIES.index(one.severity) for one in told] == sorted(SEVERITIES.index(one.severity) for one in told)
    assert [one.shard for one in told[:3]] == [None, "a", "b"]
    assert list(dict.fromkeys(one.id for one in told)) == list(IDS)
    assert list(IDS.values()) == sorted(IDS.values(), key=SEVERITIES.index)


def test_a_report_tells_no_more_than_its_bound() -> None:
    found = [diagnosis("log-long", "x", cause="x", remedy="x", shard=f"s{n}") for n in range(10_003)]
    told = make_report(None, LocationSummary(None, None, None), 1, found, 1)
    assert (len(told.findings), told.left_out) == (10_000, 3)


def test_a_report_comes_back_from_its_json() -> None:
    found = [diagnosis("since-held", "x", cause="y", remedy="z", command="persist shards", shard="a")]
    told = make_report("a*", LocationSummary("l", 1, 5), 3, found, 1_760_000_000_000)
    assert decode_report(json.loads(told.text())) == told
    later = json.loads(told.text())
    later["more"] = later["findings"][0]["more"] = 1
    assert decode_report(later) == told, "a later build adds fields"


@pytest.mark.parametrize("document", [None, [], {}, {"persist": "inspect"}, {"persist": "check", "version": 2}])
def test_what_is_no_report_is_refused(document: object) -> None:
    with pytest.raises(persist.InvalidUsage, match="not a report"):
        decode_report(document)


def test_the_published_schema_is_that_of_the_records() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert json_schemas.CHECK.read_text(encoding="utf-8") == json_schemas.check_schema(), "run `make docs`"


def test_the_schema_refuses_what_is_no_report() -> None:
    told: Report = make_report(None, LocationSummary(None, None, None), 0, [], 1)
    document = json.loads(told.text())
    VALIDATOR.validate(document)
    for wrong in ({"version": 2}, {"persist": "inspect"}, {"findings": [{"id": "x"}]}, {"shards": "1"}):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({**document, **wrong})


def test_ages_and_sizes_are_told_in_words() -> None:
    ages = {0: "0 seconds", 999: "0 seconds", 1_000: "1 second", 90_000: "90 seconds", 60_000: "1 minute"}
    ages |= {
        120_000: "2 minutes",
        HOUR_MS: "1 hour",
        47 * HOUR_MS: "47 hours",
        9 * DAY_MS + 1: "9 days",
        -5: "0 seconds",
    }
    assert {ms: age(ms) for ms in ages} == ages
    assert [size(n) for n in (0, 1023, 1024, 3 * 1024**3)] == ["0 bytes", "1023 bytes", "1.0 KiB", "3.0 GiB"]
    assert [many(1, "entry"), many(2, "entry"), many(2, "batch"), many(1_000, "blob")] == [
        "1 entry", "2 entries", "2 batches", "1,000 blobs",
    ]  # fmt: skip
    assert (some(["a", "b"]), some(list("abcde"))) == ("a, b", "a, b, c and 2 more")
    assert (at(None), at(1_760_000_000_123)) == ("an unknown time", "2025-10-09T08:53:20Z")
