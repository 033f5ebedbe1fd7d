"""Every failure of this store in docs/troubleshooting.md, provoked on a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy as sa

from consensus import (
    Consensus,
    ConsensusDamaged,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    open_consensus,
)
from consensus.postgres import PostgresConsensus
from tests.services.fault_proxy import FaultProxy
from tests.services.load import Load
from tests.services.postgres import Postgres, start_postgres
from tests.services.process import free_ports, wait_until

pytestmark = pytest.mark.services


@pytest.fixture
def url(postgres_server: Postgres) -> str:
    """Of an empty database on the private server, whatever the environment names."""
    return postgres_server.create_database(f"errors_{free_ports(1)[0]}_{threading.get_native_id()}_{next(_numbers)}")


_numbers = iter(range(1_000_000))


@pytest.fixture
def direct(url: str) -> Iterator[Consensus]:
    store = open_consensus(url)
    store.check()
    assert store.compare_and_set("k", 1, b"first")
    yield store
    store.close()


@pytest.fixture
def proxy(postgres_server: Postgres, fault_proxy: Callable[[int], FaultProxy]) -> FaultProxy:
    return fault_proxy(postgres_server.port)


@pytest.fixture
def behind(url: str, direct: Consensus, proxy: FaultProxy) -> Iterator[Consensus]:
    """The same database through the proxy, impatient, with a connection open."""
    store = PostgresConsensus(sa.make_url(_with_port(url, proxy.port)), connect_timeout_s=4, statement_timeout_s=2)
    assert store.head("k") is not None
    yield store
    proxy.mode("pass")
    store.close()


def _with_port(url: str, port: int) -> str:
    return urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition(":")[0] + f":{port}").geturl()


def refused_at_start(url: str, setting: str) -> None:
    with closing(open_consensus(url)) as store:
        with pytest.raises(ConsensusMisconfigured, match=setting) as refused:
            store.check()
        assert "right" not in str(refused.value), "no password in messages"


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def test_connection_refused(url: str) -> None:
    with closing(open_consensus(_with_port(url, free_ports(1)[0]))) as store:
        for call in (store.check, lambda: store.head("k"), lambda: store.compare_and_set("k", 1, b"x")):
            with pytest.raises(ConsensusUnavailable, match="refused"):
                call()


@pytest.mark.parametrize(("given", "setting"), [
    ({"password": "wrong"}, "password"),
    ({"user": "nobody", "password": "x"}, "user"),
    ({"database": "no_such_database"}, "database name"),
    ({"database": "postgres?no_such_option=1"}, "option"),
])  # fmt: skip
def test_a_wrong_setting_is_named(postgres_server: Postgres, given: dict[str, str], setting: str) -> None:
    refused_at_start(postgres_server.url(**given), setting)


def test_wrong_host() -> None:
    refused_at_start("postgresql://postgres:x@no-such-host.invalid/postgres", "host name")


@pytest.mark.parametrize(
    "url", ["postgresql:///database", "postgresql://host", "postgresql+other://host/db", "oracle://h/d"]
)
def test_a_url_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(ConsensusMisconfigured):
        open_consensus(url)


def test_read_only_replica(direct: Consensus, url: str, postgres_replica: Postgres) -> None:
    replica_url = _with_port(url, postgres_replica.port)
    with closing(open_consensus(replica_url)) as store:
        wait_until(lambda: _has_table(replica_url), "the replica has caught up")
        with pytest.raises(ConsensusMisconfigured, match="read-only"):
            store.check()
        with pytest.raises(ConsensusNotWritable, match="read-only"):
            store.compare_and_set("k", 2, b"x")
    assert direct.head("k") == direct.scan("k", 1, 1)[0]


def _has_table(url: str) -> bool:
    with suppress(psycopg.Error), psycopg.connect(url) as connection:
        return bool(connection.execute("SELECT count(*) FROM consensus_log").fetchone()[0])  # type: ignore[index]
    return False


def test_a_user_without_rights(direct: Consensus, url: str, postgres_server: Postgres) -> None:
    name = urlsplit(url).path.strip("/")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE reader_{name} LOGIN PASSWORD 'r'")
        admin.execute(f"GRANT SELECT ON consensus_log TO reader_{name}")
    refused_at_start(postgres_server.url(name, user=f"reader_{name}", password="r"), "INSERT")


def test_too_many_connections(direct: Consensus, url: str, postgres_server: Postgres) -> None:
    name = urlsplit(url).path.strip("/")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE busy_{name} LOGIN PASSWORD 'b' CONNECTION LIMIT 1")
    busy = postgres_server.url(name, user=f"busy_{name}", password="b")
    with psycopg.connect(busy), closing(open_consensus(busy)) as store, pytest.raises(ConsensusUnavailable):
        store.compare_and_set("k", 2, b"x")
    assert direct.compare_and_set("k", 2, b"not taken")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
@pytest.mark.parametrize("where", ["database", "url"])
def test_commits_are_durable_whatever_the_server_is_set_to(where: str, setting: str, wanted: str, url: str) -> None:
    name = urlsplit(url).path.strip("/")
    if where == "url":
        url += f"?options=-c%20synchronous_commit%3D{setting}"
    else:
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
    with closing(PostgresConsensus(sa.make_url(url))) as store:
        store.check()
        with store._connection("read") as first, store._connection("read") as second:
            for connection in (first, second):
                assert connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)


def test_commits_stay_durable_when_the_server_is_set_otherwise_meanwhile(
    direct: Consensus, postgres_server: Postgres
) -> None:
    """The setting was looked at once, at the start. Rows that were acknowledged after that were lost."""
    assert isinstance(direct, PostgresConsensus)
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET synchronous_commit = off")
        try:
            admin.execute("SELECT pg_reload_conf()")
            wait_until(lambda: admin.execute("SHOW synchronous_commit").fetchone() == ("off",), "it is off")
            with direct._connection("read") as connection:
                assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
            direct.check()
            assert direct.compare_and_set("k", 2, b"durable")
        finally:
            admin.execute("ALTER SYSTEM RESET synchronous_commit")
            admin.execute("SELECT pg_reload_conf()")


def test_reset_before_the_server_saw_it(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("hang")
    thread, failures = in_background(lambda: behind.compare_and_set("k", 2, b"lost on the way"))
    wait_until(lambda: proxy.held, "the statement is on its way")
    proxy.cut()
    thread.join()
    assert isinstance(failures[0], ConsensusIndeterminate)
    proxy.mode("pass")
    assert direct.compare_and_set("k", 2, b"not taken")


def test_reset_after_the_commit(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("swallow")
    thread, failures = in_background(lambda: behind.compare_and_set("k", 2, b"landed"))
    wait_until(lambda: len(direct.scan("k", 2, 1)) == 1, "the append has landed")
    proxy.cut()
    thread.join()
    assert isinstance(failures[0], ConsensusIndeterminate)
    proxy.mode("pass")
    head = behind.head("k")
    assert head is not None
    assert head.data == b"landed"


def test_a_frozen_network_ends_by_the_clients_timeout(behind: Consensus, proxy: FaultProxy) -> None:
    proxy.mode("hang")
    with pytest.raises(ConsensusIndeterminate):
        behind.compare_and_set("k", 2, b"x")
    with pytest.raises(ConsensusUnavailable):
        behind.head("k")
    proxy.mode("pass")
    wait_until(lambda: _answers(behind), "it answers again")


def _answers(store: Consensus) -> bool:
    with suppress(ConsensusUnavailable):
        return store.head("k") is not None
    return False


def test_a_dead_pooled_connection_is_replaced_for_readers(behind: Consensus, proxy: FaultProxy) -> None:
    proxy.cut()
    assert behind.head("k") is not None


def test_a_lock_that_is_held_too_long_is_definite(behind: Consensus, direct: Consensus, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE consensus_log IN EXCLUSIVE MODE")
        with pytest.raises(ConsensusUnavailable, match="timeout"):
            behind.compare_and_set("k", 2, b"x")
        other.rollback()
    assert direct.compare_and_set("k", 2, b"not taken")


def test_the_disk_is_full(tiny_disk: Path, services_dir: Path, postgres_server: Postgres) -> None:
    # On a server of its own: PostgreSQL does not survive the removal of such a disk.
    del postgres_server
    server = start_postgres(services_dir / "postgres-on-a-full-disk")
    (tiny_disk / "space").mkdir()
    server.own(tiny_disk / "space")
    try:
        with closing(open_consensus(server.url())) as store:
            store.check()
            with psycopg.connect(server.url(), autocommit=True) as admin:
                admin.execute(f"CREATE TABLESPACE tiny LOCATION '{tiny_disk}/space'")
                admin.execute("ALTER TABLE consensus_log SET TABLESPACE tiny")
                admin.execute("ALTER TABLE consensus_log ALTER COLUMN data SET STORAGE EXTERNAL")
            with pytest.raises(ConsensusNotWritable, match="No space left"):
                store.compare_and_set("k", 1, b"x" * 2**21)
            (tiny_disk / "ballast").unlink()
            assert store.compare_and_set("k", 1, b"it was not taken, and there is room again")
    finally:
        server.server.kill()


def test_lost_notifications_cost_nothing_but_time(behind: Consensus, direct: Consensus, proxy: FaultProxy) -> None:
    heard = threading.Event()
    unsubscribe = behind.subscribe(lambda _key: heard.set())
    assert unsubscribe is not None
    proxy.cut()
    proxy.mode("refuse")
    assert direct.compare_and_set("k", 2, b"unheard")
    proxy.mode("pass")
    head = behind.head("k")
    assert head is not None
    assert head.seqno == 2
    for seqno in range(3, 200):
        assert direct.compare_and_set("k", seqno, b"heard, once the channel stands again")
        if heard.wait(0.1):
            break
    assert heard.is_set()
    unsubscribe()


@pytest.fixture(scope="module")
def crashing_postgres(services_dir: Path, postgres_server: Postgres) -> Iterator[Postgres]:
    """A server to kill: crash recovery goes through every file, and this one has few."""
    del postgres_server
    server = start_postgres(services_dir / "postgres-to-crash")
    yield server
    server.stop()


@pytest.mark.parametrize("crash", [Postgres.restart_immediately, Postgres.kill_and_restart])
def test_a_crash_under_load_loses_nothing(crashing_postgres: Postgres, crash: Callable[[Postgres], None]) -> None:
    url = crashing_postgres.create_database(f"load_{next(_numbers)}")
    with closing(open_consensus(url)) as store, closing(open_consensus(url)) as reader:
        store.check()
        load = Load(store)
        try:
            load.wait_for(40)
            crash(crashing_postgres)
            load.wait_for(40)
        finally:
            load.stop()
        assert sum(tally.indeterminate + tally.unavailable for tally in load.tallies.values()) > 0
        load.verify(reader)


DAWDLE = (
    "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF NEW.data = 'slow'::bytea THEN PERFORM pg_sleep(1.5); END IF; RETURN NEW; END $$"
)
TRIGGER = "CREATE TRIGGER dawdle BEFORE INSERT ON consensus_log FOR EACH ROW EXECUTE FUNCTION dawdle()"
SLEEPING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"


@contextmanager
def dawdling(url: str, begin: Callable[[], bool]) -> Iterator[list[bool]]:
    """A first entry of the data `slow` is under way, by another thread; whether it won, in the end."""
    won: list[bool] = []
    writer = threading.Thread(target=lambda: won.append(begin()))
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(DAWDLE)
        admin.execute(TRIGGER)
        writer.start()
        wait_until(lambda: bool(admin.execute(SLEEPING).fetchone()[0]), "the slow statement is under way")  # type: ignore[index]
    yield won
    writer.join()


def test_who_begins_a_log_waits_for_its_turn(url: str) -> None:
    with closing(open_consensus(url)) as slow, closing(open_consensus(url)) as quick:
        quick.check()
        with dawdling(url, lambda: slow.begin("k", 5, b"slow")) as won:
            assert not quick.begin("k", 7, b"quick")
            assert not quick.compare_and_set("k", 1, b"quick")
        assert won == [True]
        assert [entry.seqno for entry in quick.scan("k", 0, 10)] == [5]


def test_a_statement_slower_than_two_commits_and_a_truncation_loses(url: str) -> None:
    with closing(open_consensus(url)) as slow, closing(open_consensus(url)) as quick:
        assert quick.compare_and_set("k", 1, b"first")
        with dawdling(url, lambda: slow.compare_and_set("k", 2, b"slow")) as won:
            assert quick.compare_and_set("k", 2, b"quick")
            assert quick.compare_and_set("k", 3, b"quick")
            assert quick.truncate("k", 3) == 2
        assert won == [False]
        assert [entry.seqno for entry in quick.scan("k", 0, 10)] == [3]


@pytest.mark.parametrize("state", ["XX001", "XX002"])
def test_the_server_finds_its_pages_damaged(direct: Consensus, url: str, state: str) -> None:
    """Raised by a trigger: it was Indeterminate, which clients repeat for minutes."""
    with psycopg.connect(url, autocommit=True) as admin:
        raised = f"BEGIN RAISE EXCEPTION 'invalid page in block 7' USING ERRCODE = '{state}'; END"
        admin.execute(f"CREATE FUNCTION damaged() RETURNS trigger LANGUAGE plpgsql AS $$ {raised} $$")
        admin.execute(
            "CREATE TRIGGER damaged BEFORE INSERT ON consensus_log FOR EACH STATEMENT EXECUTE FUNCTION damaged()"
        )
    with pytest.raises(ConsensusDamaged, match="backup"):
        direct.compare_and_set("k", 2, b"x")


@pytest.mark.parametrize("code", ["42P07", "42710", "23505"])
def test_another_process_makes_the_table_at_the_same_moment(url: str, code: str) -> None:
    """PostgreSQL says so in three ways: by the table, by its row type, or by the catalogue's index."""

    class Second:
        """A connection to which the table is not there yet, and then is."""

        def execute(self, statement: str, _values: object = None) -> Second:
            if statement.strip().startswith("CREATE TABLE"):
                raise psycopg.errors.lookup(code)("already exists")
            return self

        def fetchone(self) -> tuple[None]:
            return (None,)

    with closing(open_consensus(url)) as store:
        assert isinstance(store, PostgresConsensus)
        store._create_table(Second())
