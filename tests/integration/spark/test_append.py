"""Replicated Spark jobs call `append` over HTTP: identical definite data, cut into tasks as each likes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import persist
from persist.parts import DIFF
from tests.support.append_driver import END, SHARD, definite
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.spark

RUNS_MAX = 10  # of a driver to its end


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data") as server:
        yield server


def contents(shard: persist.Shard, as_of: int) -> Counter[tuple[int, int]]:
    rows = shard.snapshot(as_of).to_arrow().to_pylist()
    return Counter({(row["k"], row["v"]): row[DIFF] for row in rows})


class Driver:
    """A Spark driver in a process group of its own. To write everything once more changes nothing."""

    def __init__(self, url: str, step: int, partitions: int) -> None:
        self._command = [sys.executable, "-m", "tests.support.append_driver", url, str(step), str(partitions)]
        self.begin()

    def begin(self) -> None:
        self._process = subprocess.Popen(self._command, start_new_session=True, stderr=subprocess.DEVNULL)

    def begin_again(self) -> None:
        """If it has ended: Spark gives a Python process ten seconds to start."""
        if self._process.poll() is not None:
            self.begin()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)

    def finish(self) -> None:
        for _ in range(RUNS_MAX):
            if self._process.wait(WAIT_S) == 0:
                return
            self.begin()
        raise AssertionError(f"{self._command} has failed {RUNS_MAX} times")


@pytest.mark.proof
def test_drivers_killed_in_turns_leave_the_contents_of_one(server: Server) -> None:
    with persist.connect(server.url) as client:
        drivers = [Driver(server.url, step=1, partitions=1), Driver(server.url, step=2, partitions=3)]

        def upper() -> int:
            return (client.shard(SHARD).upper().element or 0) if SHARD in client.shards() else 0

        def has_moved(written: int) -> bool:
            for driver in drivers:
                driver.begin_again()
            return upper() > written or upper() == END

        try:
            for killed in drivers:
                wait_until(partial(has_moved, upper()), "a job has committed")
                killed.kill()
            for driver in drivers:
                driver.finish()
        finally:
            for driver in drivers:
                driver.kill()
        shard = client.shard(SHARD)
        assert shard.upper() == persist.Antichain(END)
        for as_of in range(END):
            assert contents(shard, as_of) == definite(as_of)
