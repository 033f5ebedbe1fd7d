"""The processes of one location and the networks between them: killed, cut, held up, and started again.

Nothing here goes by the clock alone. A process is killed only after it got somewhere, and a round ends only after
somebody did: on a slow machine the same things happen, later.
"""

from __future__ import annotations

import json
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
BEATS = 9  # of a round: about 3 seconds on a machine that has nothing else to do
STUCK_S = 900.0  # nobody gets anywhere for so long: that is no slow machine any more
FIRST = {"ok", "read", "listened"}
TRIED = ("ok", "read", "listened", "view")  # what clients did or were told
Maker = Callable[[str], list[str]]  # the command line of a process, by its number
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
        self._seen: Counter[str] = Counter()
        self._alive: set[str] = set()  # everybody who ever said something
        self._read_bytes = 0
        self._who: dict[str, str] = {}  # as what each of the running is known in the journal
        self._output = self.log.open("ab")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._makers = {
            **{f"serve {n}": self._serving(n) for n in range(SERVERS)},
            **{f"{command} {n}": self._maintaining(command, served) for n, (command, served) in enumerate(COMMANDS)},
            **{f"{role} {n}": self._client(role, served) for n, (role, served) in enumerate(CLIENTS)},
        }

    def start(self) -> None:
        """Start everybody; returns once clients of every kind have got somewhere."""
        self._revive()
        self._await(lambda: set(self._seen) >= FIRST)

    def torment(self) -> None:
        """A round: something bad every so often; whoever is dead starts again. It ends once a client got somewhere."""
        before = self._tries()
        for _ in range(BEATS):
            time.sleep(self.pick.uniform(0.05, 0.4))
            self._listen()
            victim = self.pick.choice(sorted(self._running))
            if self.pick.random() < KILL_RATE and self._who[victim] in self._alive:
                self._kill(victim)
            else:
                self._weather()
            self._revive()
        self._await(lambda: self._tries() > before)

    def lacks(self) -> list[str]:
        """What was not tried yet, or has not gone wrong yet."""
        self._listen()
        unseen = [what for what in TRIED if not self._seen[what]]
        unfired = [kind for kind in WEATHER if not self.struck[kind]]
        at_a_point = any(what.endswith("at a named point") for what in self.struck)
        return [*unseen, *unfired, *([] if at_a_point else ["a death at a named point"])]

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

    def _tries(self) -> int:
        return sum(self._seen[what] for what in TRIED)

    def _await(self, reached: Callable[[], bool]) -> None:
        """Wait, with everybody alive. The time that this may take begins anew whenever anybody says something."""
        self._listen()
        until = time.monotonic() + STUCK_S
        while not reached():
            assert time.monotonic() < until, f"nobody gets anywhere in {STUCK_S} s:\n{self.log.read_text()}"
            self._revive()
            time.sleep(0.1)
            if self._listen():
                until = time.monotonic() + STUCK_S

    def _listen(self) -> int:
        """Read on in the journal; how many lines."""
        if not self.journal.exists():
            return 0
        with self.journal.open("rb") as journal:
            journal.seek(self._read_bytes)
            whole = journal.read().rpartition(b"\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        self._read_bytes += len(whole) + bool(whole)
        for line in lines:
            self._alive.add(line["who"])
            self._seen[line.get("answer", line["what"])] += 1
            self._seen["listened"] += "listened" in line
        return len(lines)

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
            number = str(next(self._numbers))
            self._who[name] = f"{name.split()[0]} {number}"
            self._running[name] = subprocess.Popen(make(number), stdout=subprocess.DEVNULL, stderr=self._output)

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

    def _command(self, number: str, command: str, *arguments: str) -> list[str]:
        stores = ["--blob", self._stores[0], "--consensus", self._stores[1]]
        own = [str(self.journal), number, self._fuse(command)]
        return [sys.executable, "-m", "tests.crash.command", *own, command, *arguments, *stores]

    def _serving(self, index: int) -> Maker:
        return lambda number: self._command(number, "serve", "--port", str(self._ports[index]), "--no-maintenance")

    def _maintaining(self, command: str, served: bool) -> Maker:
        return lambda number: self._command(number, command, *(("--url", self._urls()) if served else ()))

    def _client(self, role: str, served: bool) -> Maker:
        connection = [self._urls()] if served else self._stores

        def make(number: str) -> list[str]:
            own = [str(self.journal), number, NEVER if served else self._fuse(role)]
            return [sys.executable, "-m", "tests.crash.actor", role, *own, *connection]

        return make


__all__ = ["WEATHER", "Arena"]
