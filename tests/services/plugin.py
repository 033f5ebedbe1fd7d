"""Fixtures of real servers, shared by all tests of a run.

Where each comes from, in this order:
1. an environment variable that names a running one (`docker compose up -d` starts them):
   PERSIST_TEST_POSTGRES, PERSIST_TEST_ETCD and PERSIST_TEST_S3 hold consensus and blob URLs;
2. programs installed on this machine, started privately on free loopback ports;
3. else the test is skipped, and the end of the run says how many were, and why.
With CI=true nothing is skipped: a missing server is a failure.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import psycopg
import pytest
from boto3.session import Session
from xdist.scheduler import LoadScopeScheduling

from tests.services.chromium import Browser, start_chromium
from tests.services.etcd import EtcdCluster, start_etcd
from tests.services.fault_proxy import FaultProxy
from tests.services.postgres import Postgres, start_postgres
from tests.services.process import ServerError, ServerMissing, run
from tests.services.s3 import ACCESS_KEY, SECRET_KEY, S3Server, start_s3

T = TypeVar("T")
REGION = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")

_skips: Counter[str] = Counter()
"""Why and how many tests were skipped in this run."""


GROUPS = {
    "spark": re.compile(r"/spark/"),
    "s3": re.compile(r"/test_(s3_errors|presigned|compose_runs)\.py|[\[-]s3\b|s3\]"),
    "postgres": re.compile(r"/test_postgres_errors\.py|postgres"),
    "etcd": re.compile(r"/test_etcd_errors\.py|etcd"),
    "browser": re.compile(r"/test_(console|demo_figures)"),
    "regions": re.compile(r"/test_region_(servers|disaster|index)\.py"),
}
"""Tests whose ids match run in one process, so that what they share is started once: a server, a browser, a region."""


class GroupScheduling(LoadScopeScheduling):
    """As xdist's `loadgroup`, but by the ids of tests: the marks that it asks for have no effect with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for group, ids in GROUPS.items() if ids.search(nodeid)), nodeid)


@pytest.hookimpl(optionalhook=True)  # without xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Session fixtures fail or skip once per test that asks for them; that is the count to tell.
    if report.skipped and isinstance(report.longrepr, tuple) and "real server missing" in report.longrepr[2]:
        _skips[report.longrepr[2]] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skips:
        total = sum(_skips.values())
        terminalreporter.section(f"{total} tests were NOT run: real servers are missing", red=True, bold=True)
        for why, count in sorted(_skips.items()):
            terminalreporter.line(f"{count:5d}  {why}")


def _need(start: Callable[[], T]) -> T:
    try:
        return start()
    except ServerMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"real server missing: {error}")


@pytest.fixture(scope="session")
def services_dir() -> Iterator[Path]:
    """Not below pytest's directory: every run of pytest makes that private again, and PostgreSQL has another user."""
    with tempfile.TemporaryDirectory(prefix="persist-tests-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this process."""
    started = _need(start_chromium)
    yield started
    started.close()


@pytest.fixture(scope="session")
def postgres_server(services_dir: Path) -> Iterator[Postgres]:
    """A private PostgreSQL, for tests that kill or restart it, or need its replica."""
    server = _need(lambda: start_postgres(services_dir / "postgres"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_replica(postgres_server: Postgres, services_dir: Path) -> Iterator[Postgres]:
    replica = postgres_server.replica(services_dir / "replica")
    yield replica
    replica.stop()


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> str:
    """A consensus URL of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    given = os.environ.get("PERSIST_TEST_POSTGRES")
    if given is None:
        server: Postgres = request.getfixturevalue("postgres_server")
        return server.create_database(name)
    with psycopg.connect(given, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return urlsplit(given)._replace(path=f"/{name}").geturl()


@pytest.fixture(scope="session")
def etcd_server(services_dir: Path) -> Iterator[EtcdCluster]:
    """A private etcd of one node."""
    cluster = _need(lambda: start_etcd(services_dir / "etcd", 1))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd_cluster(services_dir: Path) -> Iterator[EtcdCluster]:
    """A private etcd of three nodes. A test that kills a node starts it again."""
    cluster = _need(lambda: start_etcd(services_dir / "etcd3", 3))
    yield cluster
    cluster.stop()


@pytest.fixture
def etcd_url(request: pytest.FixtureRequest) -> str:
    """A consensus URL of an empty prefix on one node (or on what PERSIST_TEST_ETCD names)."""
    prefix = f"test/{uuid.uuid4().hex}"
    given = os.environ.get("PERSIST_TEST_ETCD")
    if given is not None:
        return urlsplit(given)._replace(path=f"/{prefix}").geturl()
    server: EtcdCluster = request.getfixturevalue("etcd_server")
    return server.url(prefix)


@pytest.fixture
def etcd_cluster_url(etcd_cluster: EtcdCluster) -> str:
    """A consensus URL of an empty prefix on three nodes."""
    return etcd_cluster.url(f"test/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def s3_server(services_dir: Path) -> Iterator[S3Server]:
    """A private S3 server, for tests that kill or freeze it."""
    server = _need(lambda: start_s3(services_dir / "s3"))
    yield server
    server.stop()


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The credentials of the private server by the usual chain, and nobody's configuration files."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    if "PERSIST_TEST_S3" not in os.environ:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(scope="session")
def s3_admin(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A client that makes buckets, and the query of their URLs. Building a client takes longer than a request."""
    given = os.environ.get("PERSIST_TEST_S3")
    if given is not None:
        query = urlsplit(given).query
        endpoint, session = dict(parse_qsl(query)).get("endpoint"), Session(region_name=REGION)
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        query, endpoint, session = (
            f"endpoint={server.endpoint}",
            server.endpoint,
            Session(ACCESS_KEY, SECRET_KEY, None, REGION),
        )
    client = session.client("s3", endpoint_url=endpoint)
    yield client, query
    client.close()


@pytest.fixture
def s3_url(s3_admin: tuple[Any, str], aws_environment: None) -> str:
    """A blob URL of an empty bucket, credentials in the environment."""
    client, query = s3_admin
    bucket = f"test-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix?{query}"


def make_bucket(session: Session, endpoint: str | None, bucket: str) -> None:
    client = session.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=bucket)
    client.close()


@pytest.fixture
def fault_proxy() -> Iterator[Callable[[int], FaultProxy]]:
    """`fault_proxy(port)` puts a proxy that fails at will before a loopback port."""
    started: list[FaultProxy] = []

    def start(port: int) -> FaultProxy:
        started.append(FaultProxy(port))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()


def _mount(mounted: Path) -> None:
    try:
        run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs", str(mounted)])
    except (ServerError, OSError) as error:
        raise ServerMissing("no small disk can be mounted (needs root)") from error


@pytest.fixture
def tiny_disk(services_dir: Path) -> Iterator[Path]:
    """A file system of 1 MiB that is half full with the file `ballast`. Needs root."""
    mounted = services_dir / f"disk-{uuid.uuid4().hex}"
    mounted.mkdir()
    _need(lambda: _mount(mounted))
    try:
        (mounted / "ballast").write_bytes(b"x" * 2**19)
        yield mounted
    finally:
        run(["umount", "-l", str(mounted)])
