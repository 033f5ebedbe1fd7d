"""What a server counts, and what bounds how many series it tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from blob.cache import CachedBlob
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.embedded import location_families
from persist.commit.location import Location, LocationSettings
from persist.core import commands as c
from persist.formats.exposition import Spread, exposition, figures
from persist.formats.http_messages import RECORD
from persist.formats.records import encoded
from persist.telemetry.metrics import OTHER, SERIES_MAX, Durations
from rpc import app_state
from rpc.app import create_app
from rpc.metrics import COUNTED_TOKENS_MAX, TokenFigures
from rpc.settings import ServerSettings
from tests.support.asking import typed
from tests.support.location import InlineBackground

FIELDS = {"fields": [{"name": "id", "type": "string", "key": True}]}
NDJSON = {"content-type": "application/x-ndjson"}


def location(blob: MemoryBlob | CachedBlob | None = None) -> Location:
    settings = LocationSettings(metered=True)
    return Location(blob or MemoryBlob(), MemoryConsensus(), settings=settings, background=InlineBackground())


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(app_state, "METRIC_SHARDS_MAX", 3)
    with (
        closing(location()) as opened,
        typed(TestClient(create_app(opened, ServerSettings()), base_url="http://127.0.0.1")) as client,
    ):
        yield client


def told(http: TestClient) -> dict[str, float]:
    """All series, by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        durations.observe(("get",), seconds, 10)
    family = durations.family("x_seconds", "How long", ("verb",))
    assert family.samples == [(("get",), Spread((0.1, 1.0), (2, 1, 1), pytest.approx(2.65)))]
    assert durations.totals() == {("get",): (4, pytest.approx(2.65), 40)}
    lines = exposition([family]).decode().splitlines()
    assert [line for line in lines if "_bucket" in line] == [
        'x_seconds_bucket{le="0.1",verb="get"} 2.0',
        'x_seconds_bucket{le="1.0",verb="get"} 3.0',
        'x_seconds_bucket{le="+Inf",verb="get"} 4.0',
    ]


def test_a_histogram_has_a_bounded_number_of_series() -> None:
    durations = Durations()
    for number in range(SERIES_MAX + 10):
        durations.observe((str(number),), 0.0)
    assert len(durations.totals()) == SERIES_MAX + 1
    assert durations.totals()[(OTHER,)][0] == 10


def test_tokens_beyond_the_bound_are_counted_together() -> None:
    tokens = TokenFigures(tokens_max=2)
    for name in ("a", "b", "c", "d", "a"):
        tokens.observe(name, 5, 7)
        tokens.refused(name, "forbidden")
    assert figures(tokens.families(None)) == {
        'persist_token_requests_total{token="a"}': 2,
        'persist_token_requests_total{token="b"}': 1,
        'persist_token_requests_total{token="_other"}': 2,
        **{
            f'persist_token_bytes_total{{direction="{way}",token="{name}"}}': size * times
            for way, size in (("in", 5), ("out", 7))
            for name, times in (("a", 2), ("b", 1), ("_other", 2))
        },
        **{
            f'persist_token_refusals_total{{kind="forbidden",token="{name}"}}': times
            for name, times in (("a", 2), ("b", 1), ("_other", 2))
        },
    }
    assert all('token="a"' in series for series in figures(tokens.families("a")))
    assert COUNTED_TOKENS_MAX == 100


def test_requests_and_bytes_of_bodies_are_counted_by_token(http: TestClient) -> None:
    body = b'{"id": "a"}\n' * 100
    http.put("/v1/shards/x", json=FIELDS)
    before = told(http)['persist_token_bytes_total{direction="in",token="_anybody"}']
    assert http.post("/v1/shards/x/insert", content=body, headers=NDJSON).status_code == 200
    assert http.get("/v1/shards/nope").status_code == 404
    after = told(http)
    assert after['persist_token_bytes_total{direction="in",token="_anybody"}'] == before + len(body)
    assert after['persist_token_refusals_total{kind="unknown_shard",token="_anybody"}'] == 1
    assert after['persist_token_requests_total{token="_anybody"}'] == 4, "this look at /metrics is not over"


def test_commits_and_calls_to_the_stores_are_timed(http: TestClient) -> None:
    http.put("/v1/shards/x", json=FIELDS)
    http.post("/v1/shards/x/insert", content=b'{"id": "a"}', headers=NDJSON)
    found = told(http)
    commits = found["persist_commits_total"]
    assert found['persist_commit_seconds_count{outcome="committed"}'] == commits
    assert found["persist_queue_seconds_count"] >= found["persist_commands_total"]
    calls = 'outcome="ok",store="consensus",verb="compare_and_set"'
    assert found[f"persist_store_calls_total{{{calls}}}"] == found[f"persist_store_seconds_count{{{calls}}}"] > 0
    assert (
        found[f'persist_store_seconds_bucket{{le="+Inf",{calls}}}'] == found[f"persist_store_seconds_count{{{calls}}}"]
    )


def test_every_pool_tells_its_size_and_what_is_in_use(http: TestClient) -> None:
    found = told(http)
    pools = {series for series in found if series.startswith("persist_pool_used{")}
    assert {series.replace("_used", "_size") for series in pools} == {
        series for series in found if series.startswith("persist_pool_size{")
    }
    assert all(found[series] <= found[series.replace("_used", "_size")] for series in pools)
    assert found['persist_pool_used{pool="io_queue"}'] == 1, "this very request"


def test_only_the_shards_used_last_have_series(http: TestClient) -> None:
    for number in range(5):
        http.put(f"/v1/shards/s{number}", json=FIELDS)
    found = told(http)
    for name in ("persist_shard_upper", "persist_shard_commits_total", "persist_shard_commit_seconds_total"):
        assert {series for series in found if series.startswith(f"{name}{{")} == {
            f'{name}{{shard="s{number}"}}' for number in (2, 3, 4)
        }


def test_names_of_shards_that_are_not_there_have_no_series(http: TestClient) -> None:
    """Who asked for many of them pushed out the series of real shards. A token sent as a name became a label."""
    for number in range(2):
        http.put(f"/v1/shards/s{number}", json=FIELDS)
    http.post("/v1/shards/s1/commands", content=encoded(c.Drop(True)), headers={"content-type": RECORD})
    for number in range(10):
        for path in (f"no-such-{number}", f"pt_secret-{number}/snapshot", f"no-such-{number}/listen", "s1"):
            assert http.get(f"/v1/shards/{path}").status_code == 404
    found = told(http)
    assert 'persist_shard_upper{shard="s0"}' in found
    assert not [series for series in found if "no-such" in series or "pt_" in series or 'shard="s1"' in series]


def test_a_shard_that_leaves_the_cache_takes_no_count_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that goes back looks like a server that was started anew."""
    monkeypatch.setattr("persist.commit.location.MACHINES_MAX", 2)
    with (
        closing(location()) as opened,
        typed(TestClient(create_app(opened), base_url="http://127.0.0.1")) as http,
    ):
        for number in range(6):
            http.put(f"/v1/shards/s{number}", json=FIELDS)
            http.post(f"/v1/shards/s{number}/insert", content=b'{"id": "a"}', headers=NDJSON)
        found = told(http)
    assert found["persist_machines"] == 2
    assert found["persist_commits_total"] >= 6


def test_what_the_cache_answers_is_no_call_to_the_store() -> None:
    with closing(location(CachedBlob(MemoryBlob(), 1_000_000))) as opened:
        opened.blob.put("k", b"0123456789")
        for _ in range(3):
            assert opened.blob.get("k") == b"0123456789"
        found = figures(location_families(opened))
    assert found['persist_store_calls_total{outcome="ok",store="blob",verb="get"}'] == 1
    assert (found['persist_cache_hits_total{cache="blobs"}'], found['persist_cache_misses_total{cache="blobs"}']) == (
        2,
        1,
    )
    assert found['persist_cache_bytes{cache="blobs"}'] > 10


def test_what_is_not_metered_counts_nothing() -> None:
    with closing(Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())) as opened:
        opened.blob.put("k", b"")
        assert not any(
            value for series, value in figures(location_families(opened)).items() if "seconds_count" in series
        )
