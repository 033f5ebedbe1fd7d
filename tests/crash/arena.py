"""The processes of one location and the networks between them: killed, cut, held up, and started again."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.crash.fuses import NEVER
from tests.services.fault_proxy import ENDS, FaultProxy
from tests.services.process import free_ports

SERVERS = 2
# Commands of maintenance, and whether they commit through the servers.
COMMANDS = (("compactor", True), ("compactor", False), ("gc", False))
# Who they are, and whether they go through the servers.
CLIENTS = (
    ("writer", True),
    ("writer", True),
    ("writer", False),
    ("reader", True),
    ("reader", False),
    ("listener", True),
)
# Where each of them may die: at points that it comes to often.
POINTS = {
    "serve": ("put.before", "put.after", "set.before", "set.after"),
    "writer": ("put.before", "put.after", "set.before", "set.after"),
    "reader": ("get.after", "set.before", "set.after"),
    "compactor": ("get.after", "put.before", "put.after", "set.before", "set.after"),
    "gc": ("delete.before", "delete.after", "truncate.before", "truncate.after", "set.after"),
}
WEATHER = ("cut", "half close", "delay", "hang", "hang and cut", "swallow and cut", "refuse")
KILL_RATE = 0.3  # a beat; else it is the weather
CALLS = (2, 30)  # of the named point that kills
START_S = 300.0
FIRST = {'"ok"', '"read"', '"listened"'}  # lines of the journal
_FIRST = re.compile("|".join(sorted(FIRST)))
_LOOPBACK = re.compile(r"(?<=127\.0\.0\.1:)\d+")


class Arena:
    """Use it in a `with`: on the way out everybody is killed. `struck` counts what was done to whom."""

    def __init__(self, directory: Path, blob: str, consensus: str, seed: int) -> None:
        self.pick = random.Random(seed)
        self.journal = directory / "journal"
        self.log = directory / "log"
        self.struck: Counter[str] = Counter()
        self._proxies: list[FaultProxy] = []
        self._stores = [self._through_proxy(blob), self._through_proxy(consensus)]
        self._ports = free_ports(SERVERS)
        self._doors = [self._proxy(port) for port in self._ports]
        self._numbers = iter(range(1, 1_000_000))
        self._output = self.log.open("ab")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._makers = {
            **{f"serve {n}": self._serving(n) for n in range(SERVERS)},
            **{f"{command} {n}": self._maintaining(command, served) for n, (command, served) in enumerate(COMMANDS)},
            **{f"{role} {n}": self._client(role, served) for n, (role, served) in enumerate(CLIENTS)},
        }

    def start(self) -> None:
        """Start everybody; returns once everybody has got somewhere."""
        self._revive()
        until = time.monotonic() + START_S
        while not set(_FIRST.findall(self._told())) >= FIRST:
            assert time.monotonic() < until, f"nobody gets anywhere in {START_S} s:\n{self.log.read_text()}"
            self._revive()
            time.sleep(0.1)

    def torment(self, seconds: float) -> None:
        """Something bad every so often; whoever is dead starts again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self.pick.uniform(0.05, 0.4))
            if self.pick.random() < KILL_RATE:
                self._kill(self.pick.choice(sorted(self._running)))
            else:
                self._weather()
            self._revive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()
        for proxy in self._proxies:
            proxy.close()
        self._output.close()

    def _told(self) -> str:
        return self.journal.read_text() if self.journal.exists() else ""

    def _kill(self, name: str) -> None:
        process = self._running.pop(name)
        if process.poll() is None:
            self.struck[f"{name.split()[0]} killed"] += 1
            process.kill()
        else:
            self._note_end(name, process)
        process.wait()

    def _revive(self) -> None:
        for name, make in self._makers.items():
            process = self._running.get(name)
            if process is not None and process.poll() is not None:
                self._note_end(name, process)
            elif process is not None:
                continue
            self._running[name] = subprocess.Popen(make(), stdout=subprocess.DEVNULL, stderr=self._output)

    def _note_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        kind = name.split()[0]
        self.struck[f"{kind} at a named point" if process.returncode == -signal.SIGKILL else f"{kind} gave up"] += 1

    def _weather(self) -> None:
        """Do what was done least so far to one of the networks."""
        least = min(self.struck[kind] for kind in WEATHER)
        kind = self.pick.choice([kind for kind in WEATHER if self.struck[kind] == least])
        proxy = self.pick.choice(self._proxies)
        self.struck[kind] += 1
        if kind == "half close":
            proxy.half_close(self.pick.choice(ENDS))
            return
        if kind != "cut":
            proxy.mode(kind.split()[0])
            time.sleep(self.pick.uniform(0.05, 0.4))
        if kind.endswith("cut"):
            proxy.cut()
        proxy.mode("pass")

    def _proxy(self, port: int) -> FaultProxy:
        self._proxies.append(FaultProxy(port))
        return self._proxies[-1]

    def _through_proxy(self, url: str) -> str:
        """The URL of a store with a proxy before it, where it is a server on this machine."""
        return _LOOPBACK.sub(lambda port: str(self._proxy(int(port.group())).port), url)

    # --- who starts how

    def _urls(self) -> str:
        return ",".join(f"http://127.0.0.1:{door.port}" for door in self._doors)

    def _fuse(self, role: str) -> str:
        return f"{self.pick.choice(POINTS[role])}:{self.pick.randrange(*CALLS)}"

    def _command(self, command: str, *arguments: str) -> list[str]:
        stores = ["--blob", self._stores[0], "--consensus", self._stores[1]]
        return [sys.executable, "-m", "tests.crash.command", self._fuse(command), command, *arguments, *stores]

    def _serving(self, number: int) -> Callable[[], list[str]]:
        return lambda: self._command("serve", "--port", str(self._ports[number]), "--no-maintenance")

    def _maintaining(self, command: str, served: bool) -> Callable[[], list[str]]:
        return lambda: self._command(command, *(("--url", self._urls()) if served else ()))

    def _client(self, role: str, served: bool) -> Callable[[], list[str]]:
        connection = [self._urls()] if served else self._stores

        def make() -> list[str]:
            own = [str(self.journal), str(next(self._numbers)), NEVER if served else self._fuse(role)]
            return [sys.executable, "-m", "tests.crash.actor", role, *own, *connection]

        return make


__all__ = ["WEATHER", "Arena"]
