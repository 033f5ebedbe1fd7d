"""A server in a process of its own, for benchmarks; with `metered` it counts what it asks of the consensus store."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from blob import open_blob
from consensus import open_consensus
from consensus.metrics import MeteredConsensus
from persist.commit.location import Location, directory_urls
from rpc.app import bind, serve, url_of
from rpc.settings import ServerSettings

_SETTINGS = ServerSettings(port=0, maintenance=False)


def cpu_s_of(pid: int) -> float:
    """Seconds of the time of all threads of a process, in and out of the system, so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """`persist serve` over a directory, or over its files and another consensus store."""

    def __init__(self, directory: Path, *, consensus: str | None = None, metered: bool = False) -> None:
        self._count: Any = None
        if metered:
            context = multiprocessing.get_context("spawn")
            self._count = context.Value("q", 0)
            ours, theirs = context.Pipe()
            self._process: Any = context.Process(target=_serve_metered, args=(str(directory), theirs, self._count))
            self._process.start()
            self.url = ours.recv()
        else:
            command = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0", "--no-maintenance"]
            where = ["--dir", str(directory)]
            if consensus is not None:
                where = ["--blob", (directory / "blob").absolute().as_uri(), "--consensus", consensus]
            self._process = subprocess.Popen([*command, *where], stdout=subprocess.PIPE)
            self.url = self._process.stdout.readline().decode().strip()
        self.port = int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def kill(self) -> None:
        self._process.kill()

    def rss(self) -> int:
        """Resident bytes."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Seconds of all its threads' time, in and out of the system, so far."""
        return cpu_s_of(self.pid)

    def statements(self) -> int:
        """How many calls the server has made to the consensus store."""
        return int(self._count.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        else:
            self._process.join()


def _serve_metered(directory: str, pipe: Any, count: Any) -> None:
    blob_url, consensus_url = directory_urls(f"persist://{directory}")

    def observe(*_: object, **__: object) -> None:
        with count.get_lock():
            count.value += 1

    location = Location(open_blob(blob_url), MeteredConsensus(open_consensus(consensus_url), observe))
    listener = bind(_SETTINGS.host, 0)
    serve(location, _SETTINGS, listener, lambda: pipe.send(url_of(listener, _SETTINGS)))
    location.close()


__all__ = ["ServerProcess"]
