"""The alert rules and the dashboard: each asks for what exists, and each alert fires when its trouble is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from starlette.testclient import TestClient

import persist
from blob import Blob
from blob.memory_blobs import MemoryBlob
from compactor.loop import RESCAN_PER_S, RESCAN_S, Loop, NameScan
from compactor.metering import MaintenanceMetrics
from compactor.monitor import of_maintenance
from compactor.on_demand import maintain
from compactor.tasks import gc_task
from consensus import Consensus
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location, LocationSettings
from persist.core.errors import PersistError
from persist.core.state import Policy
from persist.formats.exposition import exposition
from persist.maintenance.collector import Collector
from persist.regions.replica import Home, open_replica
from rpc.app import create_app
from rpc.auth import ANONYMOUS
from rpc.metrics import ServerMetrics
from rpc.prefix_usage import PrefixUsage
from rpc.quotas import QuotaFile, Quotas
from rpc.settings import Limits, ServerSettings
from rpc.tls import LOOK_AGAIN_S
from tests.integration.test_metrics import documented
from tests.support.asking import typed
from tests.support.blob_faults import FaultPlan, FaultyBlob
from tests.support.consensus_faults import FaultyConsensus
from tests.support.location import InlineBackground, TestClock
from tests.support.monitored import series
from tests.support.pages import ROOT
from tests.support.promtool import ALERTS, firing, promtool
from tests.support.waiting import wait_until

DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}, {"name": "text", "type": "string"}]}
NDJSON = {"content-type": "application/x-ndjson"}
OURS = {"instance", "job", "le", "alertname"}  # labels that Prometheus gives
Figures = dict[str, float]


# --- they ask for what exists


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    of_panels = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + [expr.replace("$__rate_interval", "5m") for expr in of_panels]


def known() -> dict[str, set[str]]:
    """The labels of every series that there is, by its name."""
    found = {"up": set[str]()}
    for name, (kind, labels, _) in documented().items():
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found.update({f"{name}{end}": set(labels) for end in ends})
    return found


def complaints(expression: str) -> list[str]:
    """Names of metrics, and labels, that no process tells."""
    metrics = set(re.findall(r"\b(?:persist|process)_\w+|\bup\b", expression))
    labels = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.findall(r"\w+", group)}
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels |= set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector)) - known().get(name, set())
    there = set().union(*(known().get(name, set()) for name in metrics)) | OURS
    return sorted(metrics - known().keys()) + sorted(labels - there)


def test_every_expression_asks_for_metrics_and_labels_that_exist() -> None:
    assert len(expressions()) > 40
    assert {expression: found for expression in expressions() if (found := complaints(expression))} == {}


def test_the_rules_and_every_expression_of_the_dashboard_can_be_read_by_prometheus(tmp_path: Path) -> None:
    promtool("check", "rules", str(ALERTS))
    recorded = [{"record": f"dashboard:{n}", "expr": expression} for n, expression in enumerate(expressions())]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", str(path))


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "remedy"}, rule["alert"]


def test_panels_have_ids_and_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)


def test_every_alert_fires_where_it_has_to_and_none_in_a_healthy_location() -> None:
    made = ALERTS.with_name("alerts_test.yaml")
    promtool("test", "rules", str(made))
    assert set(re.findall(r'alertname="(\w+)"', made.read_text())) == {rule["alert"] for rule in rules()}


# --- real troubles, by the figures of who has them


class Troubled:
    """A server over stores that fail when they are told to."""

    def __init__(self, *, settings: ServerSettings | None = None, blob: Blob | None = None, **of_location: Any) -> None:
        self.plan = FaultPlan(1, {"fail_before": 1.0}, sleep=lambda _: None)
        self.plan.heal()
        self.blob: Blob = FaultyBlob(blob or MemoryBlob("mem:"), self.plan)
        self.consensus: Consensus = FaultyConsensus(MemoryConsensus("mem:"), self.plan)
        self.location = Location(
            self.blob,
            self.consensus,
            settings=LocationSettings(metered=True, compares_clock=False, **of_location),
            clock=TestClock(),
            background=InlineBackground(),
        )
        self.app = create_app(self.location, settings)
        self.http = typed(TestClient(self.app, base_url="http://127.0.0.1"))

    def insert(self, number: int = 0) -> int:
        body = json.dumps({"id": number}).encode()
        return int(self.http.post("/v1/shards/orders/insert", content=body, headers=NDJSON).status_code)

    def scrape(self) -> Figures:
        return series(self.http.get("/metrics").text)


@contextmanager
def troubled(**how: Any) -> Iterator[Troubled]:
    made = Troubled(**how)
    with closing(made.location), made.http:
        assert made.http.put("/v1/shards/orders", json=FIELDS).status_code == 200
        yield made


def test_stores_that_fail(tmp_path: Path) -> None:
    with troubled() as server:
        for number in range(5):
            assert server.insert(number) == 200
        before = server.scrape()
        for number in range(5):
            server.plan.resume()
            assert server.insert(number) == 503
            server.plan.heal()
            server.location.clock.advance_ms(61_000)  # type: ignore[attr-defined]
        after = server.scrape()
    firing(tmp_path, ["PersistErrors", "PersistStoreFailing", "PersistRetryStorms"], before, after)


def test_something_damaged(tmp_path: Path) -> None:
    blob = MemoryBlob("mem:")
    with troubled(blob=blob) as server:
        rows = "\n".join(json.dumps({"id": n, "text": f"{n * 7919:0100d}"}) for n in range(3000))
        assert server.http.post("/v1/shards/orders/insert", content=rows, headers=NDJSON).status_code == 200
        before = server.scrape()
        (part,) = (stat.key for stat in blob.list("") if stat.key.endswith(".parquet"))
        damaged = bytearray(blob.get(part))
        damaged[len(damaged) // 2] ^= 1
        blob.delete([part])
        blob.put(part, bytes(damaged))
        assert server.http.get("/v1/shards/orders/snapshot").status_code == 500
        after = server.scrape()
    firing(tmp_path, ["PersistCorruption"], before, after)


def test_too_much_at_once(tmp_path: Path) -> None:
    settings = ServerSettings(limits=Limits(snapshots_max=1, bodies_bytes_max=200))
    with troubled(settings=settings) as server:
        before = server.scrape()
        with server.app.state.service.snapshots:
            for _ in range(100):
                body = b'{"id": 1, "text": "' + b"x" * 300 + b'"}'
                answer = server.http.post("/v1/shards/orders/insert", content=body, headers=NDJSON)
                assert answer.status_code == 429
            after = server.scrape()
    firing(tmp_path, ["PersistPoolFull", "PersistRefusals"], before, after)


def test_races_that_are_lost_to_another_server(tmp_path: Path) -> None:
    with troubled() as server:
        rival = Location(server.blob, server.consensus, settings=LocationSettings(compares_clock=False))
        with closing(rival):
            shard = Client(EmbeddedTransport(rival, maintain)).shard("orders")
            before = server.scrape()
            for number in range(70):  # more than one a second
                shard.insert([{"id": number}])
                assert server.insert(number) == 200
            after = server.scrape()
    firing(tmp_path, ["PersistRacesLost"], before, after)


def test_merges_that_nobody_does(tmp_path: Path) -> None:
    with troubled(small_merges=False) as server:
        before = server.scrape()
        shard = Client(EmbeddedTransport(server.location, maintain)).shard("orders")
        for number in range(201):
            shard.insert([{"id": number}])
        after = server.scrape()
    firing(tmp_path, ["PersistCompactionBehind"], before, after)


def test_upkeep_that_cannot_write(tmp_path: Path) -> None:
    class Full(MemoryBlob):
        is_full = False

        def put(self, key: str, data: bytes | memoryview) -> None:
            if self.is_full:
                raise PersistError("the disk is full")
            super().put(key, data)

    blob = Full("mem:")
    with troubled(blob=blob) as server:
        before = server.scrape()
        blob.is_full = True
        for number in range(Policy().inline_batches + 8):
            server.insert(number)
        failed = "persist_upkeep_failed_total"
        wait_until(lambda: server.scrape()[failed] > before[failed], "the upkeep, beside the inserts, has failed")
        after = server.scrape()
    firing(tmp_path, ["PersistUpkeepFailing"], before, after)


def test_a_reader_that_holds_the_log_back() -> None:
    """The alert wants 100,000 versions, too many for a test: what counts them is shown here, the rule by promtool."""
    with troubled() as server, closing(Client(EmbeddedTransport(server.location, maintain))) as client:
        name = 'persist_shard_held_versions{shard="orders"}'
        shard = client.shard("orders")
        server.insert()
        with shard.snapshot() as held:
            begun = server.scrape()[name]
            for number in range(50):
                server.insert(number)
            assert server.scrape()[name] >= begun + 50
            assert held.as_of == 0
        server.insert()
        assert server.scrape()[name] < begun + 50


def series_of(location: Location, loop: Loop, metrics: MaintenanceMetrics) -> Callable[[], Figures]:
    return lambda: series(exposition(of_maintenance(location, loop, metrics)).decode())


def test_collections_that_fail_and_a_loop_that_cannot_list_the_shards(tmp_path: Path) -> None:
    with troubled() as server:
        server.insert()
        location, metrics = server.location, MaintenanceMetrics()
        loop = Loop(location, gc_task(location, Collector(location, count=metrics.add), every_s=0.0))
        read = series_of(location, loop, metrics)
        before = read()
        server.plan.resume()
        for _ in range(10):
            with suppress(PersistError):
                loop._attempt("orders")
        loop._due(NameScan(loop._list_page, loop._matches, RESCAN_S, RESCAN_PER_S), 0.0, 1)
        server.plan.heal()
        after = read()
    firing(tmp_path, ["PersistGcFailing", "PersistMaintenanceFailing"], before, after, "PersistMaintenanceStuck")


def test_a_copy_whose_store_does_not_answer(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/d") as client:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
    copy = open_replica(f"file://{tmp_path}/d/blob", Home(), LocationSettings(metered=True))
    with closing(copy):
        metrics = ServerMetrics(copy, dict, 10)
        copy.follower.poll(now=True)
        before = series(metrics.text().decode())
        assert before["persist_region_link_up"] == 1
        plan = FaultPlan(1, {"fail_before": 1.0})
        copy.follower.blob = FaultyBlob(copy.follower.blob, plan)
        with suppress(PersistError):
            copy.follower.poll(now=True)
        after = series(metrics.text().decode())
        plan.heal()
    firing(tmp_path, ["PersistRegionBehind"], {**before, "persist_region_lag_seconds": 0.0}, after)


def test_quotas_that_cannot_be_read(tmp_path: Path) -> None:
    path, clock = tmp_path / "quotas.json", TestClock()
    path.write_text("{}")
    with troubled() as server, closing(PrefixUsage(server.location, threaded=False)) as tally:
        quotas = Quotas(QuotaFile(str(path), clock.monotonic), clock, tally)
        before = told(quotas)
        path.write_text("{")
        clock.advance_ms(int(LOOK_AGAIN_S * 1000) + 1)
        assert not quotas.reload(), "the rules before it hold"
        after = told(quotas)
    firing(tmp_path, ["PersistQuotasUnreadable"], before, after)


def told(quotas: Quotas) -> Figures:
    return series(exposition(quotas.families(ANONYMOUS)).decode())
