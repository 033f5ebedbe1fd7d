"""The services of docker-compose.yml, run one by one by the settings of the file, without an engine.

Commands, variables and health checks are those of the file. What is another one: addresses, which are of free ports of
this machine; the S3 server and its keys, since MinIO is no package of Debian's; and who starts the processes. So what
is not shown is what an engine does: images, networks, volumes, restarts.
"""

from __future__ import annotations

import graphlib
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import psycopg
import pyarrow as pa
import pytest
import yaml

import persist
from tests.services.plugin import make_bucket
from tests.services.postgres import Postgres, binaries
from tests.services.process import Server, free_ports
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.support.forked import Forked
from tests.support.pages import ROOT
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64())])
Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def services() -> Services:
    found: Services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def here(text: str, addresses: dict[str, str]) -> str:
    """A setting, with the addresses of this machine in the place of those of the file's network."""
    for theirs, ours in addresses.items():
        text = text.replace(theirs, ours)
    return text


def is_healthy(service: dict[str, Any], addresses: dict[str, str], *more: str) -> bool:
    """Whether the health check of the file says so."""
    kind, *words = service["healthcheck"]["test"]
    if kind == "CMD-SHELL":
        words = words[0].split()
    words = [sys.executable if word == "python" else here(word, addresses) for word in [*words, *more]]
    path = f"{binaries()}{os.pathsep}{os.environ['PATH']}"
    program = {**os.environ, "PATH": path}
    return subprocess.run(words, env=program, capture_output=True, check=False, timeout=WAIT_S).returncode == 0


@contextmanager
def run(service: dict[str, Any], addresses: dict[str, str]) -> Iterator[Forked]:
    """A process of persist with the command and the variables of the file, and no others of ours. SIGTERM ends it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERSIST_", "AWS_"))}
    told = {name: here(value, addresses) for name, value in service["environment"].items()}
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    words = [here(word, addresses) for word in service["command"]]
    process = Forked(words, {**kept, **told, **keys, "AWS_EC2_METADATA_DISABLED": "true"}, unread=True)
    try:
        yield process
    finally:
        process.end(signal.SIGTERM)
    assert process.poll() in (0, -signal.SIGKILL)


def make_database(service: dict[str, Any], server: Postgres) -> None:
    """What the image of PostgreSQL makes of these variables at its first start."""
    user, password, name = (service["environment"][f"POSTGRES_{what}"] for what in ("USER", "PASSWORD", "DB"))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
        connection.execute(f"CREATE DATABASE {name} OWNER {user}")


def test_no_service_waits_for_itself(services: Services) -> None:
    order = list(graphlib.TopologicalSorter({n: s.get("depends_on", {}) for n, s in services.items()}).static_order())
    assert order.index("postgres") < order.index("server") < order.index("compactor")


@pytest.mark.smoke
@pytest.mark.proof
def test_server_and_compactor_run_by_the_settings_of_the_file(
    services: Services, postgres_server: Postgres, s3_server: S3Server, aws_environment: None
) -> None:
    port, metrics_port = map(str, free_ports(2))
    addresses = {
        "http://minio:9000": s3_server.endpoint,
        "postgres:5432": f"127.0.0.1:{postgres_server.port}",
        "0.0.0.0": "127.0.0.1",
        "8787": port,
        "9187": metrics_port,
    }
    (bucket,) = re.findall(r"local/(\w+)", services["bucket"]["command"][0])
    make_bucket(boto3.session.Session(), s3_server.endpoint, bucket)
    make_database(services["postgres"], postgres_server)
    assert is_healthy(services["postgres"], addresses, "--port", str(postgres_server.port))
    server, compactor = services["server"], services["compactor"]
    assert not is_healthy(server, addresses)
    with run(server, addresses) as first:
        wait_until(lambda: is_healthy(server, addresses), "the server is healthy")
        with run(compactor, addresses), persist.connect(f"http://127.0.0.1:{port}") as client:
            orders = client.create_shard("orders", SCHEMA, key=["id"])
            for number in range(5):
                orders.insert(pa.table({"id": pa.array(range(number * 1000, (number + 1) * 1000), pa.int64())}))
            wait_until(lambda: is_healthy(compactor, addresses), "the compactor is healthy")
            first.kill()
            first.wait(WAIT_S)
            with run(server, addresses):  # `restart: unless-stopped`
                wait_until(lambda: is_healthy(server, addresses), "the server is healthy again")
                ids = orders.snapshot().to_arrow(expand=True).column("id").to_pylist()
                assert sorted(ids) == list(range(5000))
        assert not is_healthy(compactor, addresses)


def test_etcd_runs_by_the_flags_of_the_file_and_takes_the_place_of_postgres(services: Services, tmp_path: Path) -> None:
    if shutil.which("etcd") is None:
        pytest.skip("real server missing: etcd is not installed")
    client_port, peer_port = free_ports(2)
    addresses = {
        "0.0.0.0:2379": f"127.0.0.1:{client_port}",
        "etcd:2379": f"127.0.0.1:{client_port}",
        "/etcd-data": str(tmp_path / "etcd"),
    }
    words = [here(word, addresses) for word in services["etcd"]["command"]]
    words += [f"--listen-peer-urls=http://127.0.0.1:{peer_port}", "--log-level=error"]

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{client_port}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    etcd = Server("etcd", words, tmp_path / "etcd.log")
    etcd.start(answers)
    try:
        (named,) = re.findall(r"point PERSIST_CONSENSUS at (\S+) ", (ROOT / "docker-compose.yml").read_text())
        with persist.connect(blob=f"file://{tmp_path}/blobs", consensus=here(named, addresses)) as client:
            client.create_shard("orders", SCHEMA, key=["id"]).insert([{"id": 1}])
            assert client.shards()
    finally:
        etcd.stop()
