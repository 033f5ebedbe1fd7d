"""The processes of one location and the networks between them: killed, stopped, cut, held up, and started again.

Each process may have a wall clock that is wrong, or is set wrong while it runs.

Nothing here goes by the clock alone. A process is killed only after it got somewhere, and a round ends only after
somebody did: on a slow machine the same things happen, later.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.crash import clocks
from tests.crash.fuses import NEVER
from tests.crash.small import LEASES_S
from tests.services.fault_proxy import ENDS, FaultProxy
from tests.services.process import free_ports
from tests.support.forked import Module

SERVERS = 2
# Commands of maintenance, and whether they commit through the servers.
COMMANDS = (("run", True), ("run", False), ("gc", False))
# Who they are, and whether they go through the servers.
CLIENTS = (
    ("writer", True), ("writer", True), ("writer", False), ("reader", True), ("reader", False), ("listener", True),
)  # fmt: skip
# Where each of them may die: at points that it comes to often.
POINTS = {
    "serve": ("put.before", "put.after", "set.before", "set.after"),
    "writer": ("put.before", "put.after", "set.before", "set.after"),
    "reader": ("get.after", "set.before", "set.after"),
    "run": ("get.after", "put.before", "put.after", "set.before", "set.after"),
    "gc": ("delete.before", "delete.after", "truncate.before", "truncate.after", "set.after"),
}
WEATHER = ("cut", "half close", "delay", "hang", "hang and cut", "swallow and cut", "refuse")
KILL_RATE = 0.3  # a beat; else it is the weather
STOPPED_S = LEASES_S + 1.0  # so long a process is stopped with SIGSTOP, one at a time
MANY, LONG = 8, 20  # rounds from which on more faults must have struck: see `lacks`
CALLS = (2, 30)  # of the named point that kills
BEATS = 6  # of a round: about 2 seconds on a machine that has nothing else to do
STUCK_S = 900.0  # nobody gets anywhere for so long: that is no slow machine any more
STOPPED = "stopped beyond its leases"
FIRST = {"ok", "read", "listened"}
CLOCKS = (clocks.AHEAD, clocks.BEHIND, clocks.JUMPED)
TRIED = ("ok", "read", "listened", "view")  # what clients did or were told
Maker = Callable[[str], tuple[str, list[str]]]  # the module of a process and what it is told, by its number
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
        self._running: dict[str, Module] = {}
        self._stopped: tuple[str, Module, float] | None = None  # who, and since when
        self._makers = {
            **{f"serve {n}": self._serving(n) for n in range(SERVERS)},
            **{f"{command} {n}": self._maintaining(command, served) for n, (command, served) in enumerate(COMMANDS)},
            **{f"{role} {n}": self._client(role, served) for n, (role, served) in enumerate(CLIENTS)},
        }

    def start(self) -> None:
        """Start everybody; returns once clients of every kind have got somewhere."""
        self._revive()
        self._await(lambda: all(self._seen[what] for what in FIRST))

    def torment(self) -> None:
        """A round: something bad every so often; whoever is dead starts again. It ends once a client got somewhere."""
        before = self._tries()
        for _ in range(BEATS):
            time.sleep(self.pick.uniform(0.05, 0.4))
            self._listen()
            self._stop_somebody()
            victim = self.pick.choice(self._moving())
            if self.pick.random() < KILL_RATE and self._who[victim] in self._alive:
                self._kill(victim)
            else:
                self._weather()
            self._revive()
        self._await(lambda: self._tries() > before)

    def lacks(self, rounds: int) -> list[str]:
        """What was not tried yet, or has not gone wrong yet.

        In MANY rounds also every fault of clocks, and that a process was stopped for longer than its leases. In a LONG
        run a process of each kind was.
        """
        self._listen()
        unseen = [what for what in TRIED if not self._seen[what]]
        unfired = [kind for kind in WEATHER if not self.struck[kind]]
        if not any(what.endswith("at a named point") for what in self.struck):
            unfired.append("a death at a named point")
        if rounds >= MANY:
            unfired += [what for what in CLOCKS if not self.struck[what]]
            if not any(what.endswith(STOPPED) for what in self.struck):
                unfired.append(STOPPED)
        if rounds >= LONG:
            unfired += [f"{role} {STOPPED}" for role in sorted(self._roles()) if not self.struck[f"{role} {STOPPED}"]]
        return [*unseen, *unfired]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()
        for proxy in self._proxies:
            proxy.close()

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
            if line["what"] in CLOCKS:
                self.struck[line["what"]] += 1
                continue
            self._alive.add(line["who"])
            self._seen[line.get("answer", line["what"])] += 1
            self._seen["listened"] += "listened" in line
        return len(lines)

    def _stop_somebody(self) -> None:
        """Stop a process of the kind that was stopped least so far, unless another one is stopped now."""
        awake = [name for name in self._moving() if self._who[name] in self._alive]
        least = min((self.struck[f"{name.split()[0]} {STOPPED}"] for name in awake), default=0)
        rarest = [name for name in awake if self.struck[f"{name.split()[0]} {STOPPED}"] == least]
        if self._stopped is None and rarest:
            name = self.pick.choice(rarest)
            self._running[name].send_signal(signal.SIGSTOP)
            self._stopped = name, self._running[name], time.monotonic()

    def _let_go_on(self) -> None:
        """Wake up who was stopped for longer than its leases."""
        if self._stopped is None:
            return
        name, process, since_s = self._stopped
        if process.poll() is not None:  # it was dead when it should have been stopped
            self._stopped = None
        elif time.monotonic() - since_s >= STOPPED_S:
            process.send_signal(signal.SIGCONT)
            self._stopped = None
            self.struck[f"{name.split()[0]} {STOPPED}"] += 1

    def _moving(self) -> list[str]:
        """Who runs, and is not stopped."""
        stopped = self._stopped[1] if self._stopped is not None else None
        return [name for name, process in sorted(self._running.items()) if process is not stopped]

    def _roles(self) -> set[str]:
        return {name.split()[0] for name in self._makers}

    def _kill(self, name: str) -> None:
        process = self._running.pop(name)
        if process.poll() is None:
            self.struck[f"{name.split()[0]} killed"] += 1
            process.kill()
        else:
            self._note_end(name, process)
        process.wait()

    def _revive(self) -> None:
        self._let_go_on()
        for name, make in self._makers.items():
            process = self._running.get(name)
            if process is not None and process.poll() is not None:
                self._note_end(name, process)
            elif process is not None:
                continue
            number = str(next(self._numbers))
            self._who[name] = f"{name.split()[0]} {number}"
            self._running[name] = Module(*make(number), said=self.log)

    def _note_end(self, name: str, process: Module) -> None:
        kind = name.split()[0]
        self.struck[f"{kind} at a named point" if process.poll() == -signal.SIGKILL else f"{kind} gave up"] += 1

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

    def _command(self, number: str, command: str, *arguments: str) -> tuple[str, list[str]]:
        stores = ["--blob", self._stores[0], "--consensus", self._stores[1]]
        own = [str(self.journal), number, self._fuse(command), clocks.chosen(self.pick)]
        words = {"run": ["maintain", "run", "--no-gc"], "gc": ["maintain", "gc"]}.get(command, [command])
        return "tests.crash.command", [*own, *words, *arguments, *stores]

    def _serving(self, index: int) -> Maker:
        return lambda number: self._command(number, "serve", "--port", str(self._ports[index]), "--no-maintenance")

    def _maintaining(self, command: str, served: bool) -> Maker:
        return lambda number: self._command(number, command, *(("--url", self._urls()) if served else ()))

    def _client(self, role: str, served: bool) -> Maker:
        connection = [self._urls()] if served else self._stores

        def make(number: str) -> tuple[str, list[str]]:
            own = [str(self.journal), number, NEVER if served else self._fuse(role), clocks.chosen(self.pick)]
            return "tests.crash.actor", [role, *own, *connection]

        return make


__all__ = ["WEATHER", "Arena"]
