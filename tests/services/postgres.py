"""A private PostgreSQL on a free loopback port, and a streaming replica of it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psycopg

from tests.services.process import Server, ServerMissing, free_ports, run, wait_until

PASSWORD = "right"

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 100
shared_buffers = 32MB
max_wal_senders = 5
password_encryption = 'scram-sha-256'
"""


def binaries() -> Path | None:
    """The newest PostgreSQL's programs, or None if there is none on this machine."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[4]))
    on_path = shutil.which("postgres")
    if found:
        return found[-1].parent
    return Path(on_path).resolve().parent if on_path else None


class Postgres:
    """One PostgreSQL server below `directory`. Root drops to the user `postgres`, which it insists on."""

    def __init__(self, directory: Path, bin_dir: Path) -> None:
        self.directory = directory
        self.port = free_ports(1)[0]
        self._bin = bin_dir
        self._data = directory / "data"
        self._user = "postgres" if os.getuid() == 0 else None
        self.server = Server(
            "postgres",
            [str(bin_dir / "postgres"), "-D", str(self._data), "-p", str(self.port)],
            directory / "postgres.log",
            user=self._user,
            end_signal=signal.SIGQUIT,
        )

    def url(self, database: str = "postgres", password: str = PASSWORD, user: str = "postgres") -> str:
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def initialise(self) -> None:
        self.own(self.directory)
        secret = self.directory / "password"
        secret.write_text(PASSWORD)
        self.own(secret)
        initdb = [str(self._bin / "initdb"), "-D", str(self._data), "-U", "postgres", "--locale=C", "-E", "UTF8"]
        run([*initdb, "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync"], user=self._user)
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(SETTINGS)

    def start(self) -> None:
        self.server.start(self.answers)

    def answers(self) -> bool:
        try:
            with psycopg.connect(self.url(), connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def restart_immediately(self) -> None:
        """What `pg_ctl restart -m immediate` does: every backend quits at once, recovery runs at the start."""
        self.server.signal(signal.SIGQUIT)
        wait_until(lambda: not self.server.running, "PostgreSQL ended")
        self.start()

    def kill_and_restart(self) -> None:
        """SIGKILL to the postmaster: its backends notice and end by themselves; then start on the same data."""
        self.server.kill()
        wait_until(lambda: not _processes_in(self._data), "the backends of the killed PostgreSQL ended")
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        self.start()

    def create_database(self, name: str) -> str:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def replica(self, directory: Path) -> Postgres:
        """A hot standby that follows this server."""
        directory.mkdir(parents=True, exist_ok=True)
        copy = Postgres(directory, self._bin)
        copy.own(directory)
        source = f"host=127.0.0.1 port={self.port} user=postgres password={PASSWORD}"
        backup = [str(self._bin / "pg_basebackup"), "-d", source, "-D", str(copy._data), "-R", "-X", "stream"]
        run([*backup, "-c", "fast", "--no-sync"], user=self._user)
        copy.start()
        return copy

    def stop(self) -> None:
        self.server.stop()

    def own(self, path: Path) -> None:
        """Give a file or directory to the user the server runs as."""
        if self._user:
            shutil.chown(path, self._user, self._user)


def _processes_in(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(directory):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def start_postgres(directory: Path) -> Postgres:
    """Make and start a server; ServerMissing if none is installed."""
    bin_dir = binaries()
    if bin_dir is None:
        raise ServerMissing("PostgreSQL is not installed (no postgres program found)")
    directory.mkdir(parents=True, exist_ok=True)
    server = Postgres(directory, bin_dir)
    server.initialise()
    server.start()
    return server
