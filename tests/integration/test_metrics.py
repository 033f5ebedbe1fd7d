"""What servers, workers and clients tell of themselves, and that docs/metrics.md says all of it and nothing else."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

import persist
from compactor.loop import Loop
from compactor.metering import MaintenanceMetrics
from compactor.monitor import Monitor, of_maintenance
from persist import InvalidUsage, LocationSettings
from persist.commit.location import Location
from persist.formats.exposition import Family
from persist.regions.replica import Home, open_replica
from rpc.app_state import Service
from rpc.settings import ServerSettings
from tests.support.monitored import maintenance, scraped, series, types
from tests.support.pages import page
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
PLACES = {"S": "a server", "R": "a server of a copy", "M": "maintenance", "E": "an embedded client", "C": "a client"}


def documented() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """By name: the kind, the labels, and the letters of the places, as the tables of the page say."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*) \| ([A-Z]+) \|", page("docs/metrics.md"), re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), places) for name, kind, labels, places in rows}


def shown(families: Iterable[Family]) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {family.name: (family.kind, family.labels) for family in families}


def served(location: Location) -> list[Family]:
    with closing(Service(location, ServerSettings(), "")) as service:
        return list(service.metrics.families())


def at(place: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (kind, labels) for name, (kind, labels, places) in documented().items() if place in places}


def test_the_page_has_exactly_the_metrics_of_each_place(tmp_path: Path) -> None:
    client = persist.connect(f"persist://{tmp_path}/d")
    with client, Server(tmp_path / "d") as server, persist.connect(server.url) as far:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
        location = client.transport.location  # type: ignore[attr-defined]
        copy = open_replica(f"file://{tmp_path}/d/blob", Home(), LocationSettings(metered=True))
        with closing(copy):
            found = {
                "S": served(location),
                "R": served(copy),
                "M": of_maintenance(location, Loop(location, lambda _: None), MaintenanceMetrics(), far.transport),
                "E": client.transport.families(),
                "C": far.transport.families(),
            }
            for place, families in found.items():
                assert shown(families) == at(place), PLACES[place]


def test_a_server_process_tells_what_the_page_says(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server:
        assert types(scraped(server.url)) == {name: kind for name, (kind, _) in at("S").items()}


@pytest.mark.parametrize("command", [("maintain", "run"), ("maintain", "gc")])
def test_a_process_of_maintenance_tells_what_the_page_says(command: tuple[str, ...], tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/d") as client:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
    with maintenance(*command, "--dir", str(tmp_path / "d")) as process:
        text = scraped(process.url)
        assert list(text_string_to_metric_families(text))
        of_client = {name for name in types(text) if name.startswith("persist_client_")}
        assert of_client == set(), "it commits by itself"
        told = {name: kind for name, (kind, _) in at("M").items() if not name.startswith("persist_client_")}
        assert types(text) == told
        process.wait(lambda: process.series().get("persist_maintenance_gc_runs_total", 0) > 0, "it collects")
        found = process.series()
        assert found['persist_maintenance_look_seconds_count{outcome="ok"}'] > 0
        assert found["persist_maintenance_round_timestamp_seconds"] > 1_000_000_000
        assert found['persist_shard_upper{shard="orders"}'] == 1
        assert any(name.startswith("persist_store_calls_total{") for name in found)
        health = process.url.replace("/metrics", "/healthz")
        with urllib.request.urlopen(health) as answer:
            assert answer.read() == b'{"status": "ok"}'
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(process.url.replace("/metrics", "/secrets"))
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(WAIT_S) == 0


@pytest.mark.smoke
@pytest.mark.proof
def test_maintenance_beside_a_server_tells_its_metrics_at_the_port_that_was_asked_for(tmp_path: Path) -> None:
    with closing(Monitor("127.0.0.1", 0, lambda: b"")) as taken:
        port = taken.url.rpartition(":")[2]
    with Server(tmp_path / "d", "--maintenance-metrics-port", port, maintenance="own") as server:

        def answers() -> bool:
            try:
                return "persist_maintenance_failures_total 0.0" in scraped(f"http://127.0.0.1:{port}")
            except OSError:
                return False

        wait_until(answers, "its maintenance answers")
        assert "persist_client_requests_total" in scraped(f"http://127.0.0.1:{port}"), "it commits through the server"
        assert server.stop() == 0


def test_a_monitor_hears_of_a_bug_and_maintenance_goes_on() -> None:
    def broken() -> bytes:
        raise ZeroDivisionError

    with closing(Monitor("127.0.0.1", 0, broken)) as monitor:
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="500"):
                urllib.request.urlopen(f"{monitor.url}/metrics")


def test_a_monitor_that_says_nothing_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off after some seconds. The probe that a container lives on waited for so long, and failed."""
    monkeypatch.setattr("compactor.monitor.REQUEST_S", 3_600.0)
    with closing(Monitor("127.0.0.1", 0, lambda: b"")) as monitor:
        address = ("127.0.0.1", int(monitor.url.rpartition(":")[2]))
        with socket.create_connection(address), socket.create_connection(address) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            with urllib.request.urlopen(f"{monitor.url}/healthz") as answer:
                assert answer.read() == b'{"status": "ok"}'


def test_monitors_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compactor.monitor.REQUEST_S", 3_600.0)
    monkeypatch.setattr("compactor.monitor.REQUESTS_MAX", 2)
    with closing(Monitor("127.0.0.1", 0, lambda: b"")) as monitor:
        address = ("127.0.0.1", int(monitor.url.rpartition(":")[2]))
        with socket.create_connection(address) as one, socket.create_connection(address):
            with socket.create_connection(address) as third:
                assert third.recv(1) == b"", "it is closed"
            one.shutdown(socket.SHUT_WR)
            assert one.recv(1) == b""

            def answers() -> bool:
                try:
                    with urllib.request.urlopen(f"{monitor.url}/healthz") as answer:
                        return answer.status == 200
                except OSError:
                    return False

            wait_until(answers, "there is room for one again")


def test_a_port_that_is_taken_is_told() -> None:
    with closing(Monitor("127.0.0.1", 0, lambda: b"")) as monitor:
        port = int(monitor.url.rpartition(":")[2])
        with pytest.raises(InvalidUsage, match=f"metrics cannot be served at 127.0.0.1:{port}"):
            Monitor("127.0.0.1", port, lambda: b"")


def test_an_embedded_program_reads_its_own_figures(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/d") as client:
        shard = client.create_shard("orders", SCHEMA, key=["id"])
        before = client.metrics()
        shard.insert([{"id": 1}])
        after = client.metrics()
        assert after == client.metrics(), "asking costs no request"
    wins = 'persist_store_calls_total{outcome="ok",store="consensus",verb="compare_and_set"}'
    moved = wins.replace("calls", "bytes")
    assert after[wins] > before[wins]
    assert after[moved] > before[moved]
    assert after["persist_queue_seconds_count"] > before["persist_queue_seconds_count"]
    assert not any("_bucket" in name for name in after)


def test_a_client_of_a_server_reads_its_own_figures(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server, persist.connect(server.url) as client:
        client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
        asked = series(scraped(server.url))
        found = client.metrics()
        assert found == client.metrics(), "asking costs no request"
    posts = found['persist_client_requests_total{method="POST",outcome="2xx"}']
    assert posts == sum(n for name, n in asked.items() if 'verb="commands"' in name and "requests_total" in name)
    assert found['persist_client_request_seconds_count{method="POST",outcome="2xx"}'] == posts
    assert found['persist_client_bytes_total{direction="out"}'] > 0
    assert found['persist_client_bytes_total{direction="in"}'] > 0


@pytest.mark.smoke
@pytest.mark.proof
def test_clients_need_no_library_of_prometheus_or_of_traces(tmp_path: Path) -> None:
    program = (
        "import sys, pyarrow as pa, persist; client = persist.connect(sys.argv[1]); client.metrics();"
        "client.create_shard('orders', pa.schema([('id', pa.int64())]), key=['id']).insert([{'id': 1}]);"
        "client.close();"
        "sys.exit(any(name.startswith(('prometheus_client', 'opentelemetry')) for name in sys.modules))"
    )
    with Server(tmp_path / "d") as server:
        for url in (server.url, f"persist://{tmp_path}/e"):
            subprocess.run([sys.executable, "-c", program, url], check=True)
