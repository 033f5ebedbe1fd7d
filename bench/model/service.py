"""The service as the simulation sees it: servers that commit group by group, a store of logs, a store of blobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.bars import Percentiles
from bench.model.machines import Flushing, Host, Interpreter, Limited, Simulation, Then

LOOP, UPKEEP = "loop", "upkeep"  # threads of a server; a shard's commits are on the one of its number


@dataclass(frozen=True)
class Duty:
    """Background work that a commit asked for: CPU seconds, blobs put, and commits of its own."""

    cpu_s: float
    puts: int
    commits: int


@dataclass(frozen=True)
class Costs:
    """What one insert costs. All are seconds of CPU, but for `flush_s`, `blob_s` and `handover_s`.

    A server spends `front_s` before an insert is queued, `commit_s` and `command_s` a command on a commit, and
    `answer_s` on an answer; `kernel_s` is what the system works for it, while no thread holds the interpreter.
    `duties` has for consecutive commits of a shard what they ask for; it goes round. `blob_s` is how long a blob of
    upkeep takes to be put. `store_s` is what the store of logs works on a compare-and-set, `flush_s` how long its disk
    takes for one flush. `handover_s` is what passes from hand to hand in an insert that nobody competes with.
    """

    client_s: float
    front_s: float
    commit_s: float
    command_s: float
    answer_s: float
    duties: Sequence[Sequence[Duty]]
    store_s: float
    flush_s: float
    kernel_s: float
    blob_s: float
    handover_s: float

    @property
    def upkeep_s(self) -> float:
        """CPU of upkeep by insert, where each insert is a commit."""
        return sum(duty.cpu_s for duties in self.duties for duty in duties) / len(self.duties)

    @property
    def puts(self) -> float:
        """Blobs put by insert, where each insert is a commit."""
        return sum(duty.puts for duties in self.duties for duty in duties) / len(self.duties)

    @property
    def commits(self) -> float:
        """Compare-and-sets by insert, where each insert is a commit."""
        return 1 + sum(duty.commits for duties in self.duties for duty in duties) / len(self.duties)

    @property
    def server_s(self) -> float:
        """CPU of the server by insert, where each insert is a commit."""
        return self.front_s + self.commit_s + self.command_s + self.answer_s + self.upkeep_s + self.kernel_s


class Stores:
    """A store of logs with cores and a disk, or with a limit of its own, and a store of blobs."""

    def __init__(
        self, simulation: Simulation, costs: Costs, host: Host, network_s: float, blob_s: float, blobs_per_s: float
    ) -> None:
        self._simulation = simulation
        self._costs = costs
        self._host = host
        self._network_s = network_s
        self.disk = Flushing(simulation, costs.flush_s)
        self.blobs = Limited(simulation, blob_s, blobs_per_s)
        self.limit: Limited | None = None
        self.sets = 0
        self._idle: list[Interpreter] = []

    def compare_and_set(self, then: Then) -> None:
        """There, work, flush, and back."""
        self.sets += 1
        connection = self._idle.pop() if self._idle else Interpreter(self._host)

        def back() -> None:
            self._idle.append(connection)
            self._simulation.after(self._network_s / 2, then)

        def work() -> None:
            connection.work(self._costs.store_s, lambda: self.disk.flush(back))

        there = work if self.limit is None else lambda: self.limit.ask(back)  # type: ignore[union-attr]
        self._simulation.after(self._network_s / 2, there)


class _Shard:
    __slots__ = ("commits", "is_led", "kernel", "queue")

    def __init__(self, begins_at: int, host: Host) -> None:
        self.kernel = Interpreter(host)
        self.queue: list[Then | None] = []  # None: a command of upkeep, for which nobody waits
        self.is_led = False
        self.commits = begins_at


class Server:
    """One process. Of each of its shards one group of commands is committed at a time."""

    def __init__(self, simulation: Simulation, costs: Costs, host: Host, stores: Stores, rng: random.Random) -> None:
        self._simulation = simulation
        self._costs = costs
        self._host = host
        self.interpreter = Interpreter(host)
        self._stores = stores
        self._rng = rng
        self._shards: dict[int, _Shard] = {}

    def insert(self, number: int, then: Then) -> None:
        self.interpreter.work(self._costs.front_s, lambda: self._queue(number, then), LOOP)

    def _queue(self, number: int, then: Then | None) -> None:
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = _Shard(self._rng.randrange(len(self._costs.duties)), self._host)
        shard.queue.append(then)
        if not shard.is_led:
            shard.is_led = True
            self._lead(number, shard)

    def _lead(self, number: int, shard: _Shard) -> None:
        group, shard.queue = shard.queue, []
        costs = self._costs

        def published() -> None:
            callers = [then for then in group if then is not None]
            self.interpreter.work(costs.answer_s * len(callers), lambda: self._answered(number, shard, callers), LOOP)

        def planned() -> None:
            system_s = costs.kernel_s * sum(then is not None for then in group)
            shard.kernel.work(system_s, lambda: self._stores.compare_and_set(published))

        self.interpreter.work(costs.commit_s + costs.command_s * len(group), planned, number)

    def _answered(self, number: int, shard: _Shard, callers: Sequence[Then]) -> None:
        for then in callers:
            then()
        if callers:
            for duty in self._costs.duties[shard.commits % len(self._costs.duties)]:
                self._begin(number, duty)
            shard.commits += 1
        if shard.queue:
            self._lead(number, shard)
        else:
            shard.is_led = False

    def _begin(self, number: int, duty: Duty) -> None:
        own_s = max(0.0, duty.cpu_s - duty.commits * (self._costs.commit_s + self._costs.command_s))

        def put(left: int) -> None:
            if left:
                self._stores.blobs.ask(lambda: put(left - 1))
            elif duty.commits:
                self._queue(number, None)

        self.interpreter.work(own_s, lambda: put(duty.puts), (UPKEEP, number))


@dataclass(frozen=True)
class Ran(Percentiles):
    """What came of a run of `seconds`. `used` tells which part of each resource was in use, the scarcest first."""

    seconds: float
    inserts: int
    latencies: Sequence[float]
    sets: int
    puts: int
    used: dict[str, float]

    @property
    def per_s(self) -> float:
        return self.inserts / self.seconds


Pick = Callable[[int], tuple[int, int]]  # of a writer: the server and the shard of its next insert


class Writers:
    """Closed loops: each writer sends its next insert when the last one was answered, after `think_s` on average."""

    def __init__(self, simulation: Simulation, rng: random.Random, think_s: float = 0.0) -> None:
        self._simulation = simulation
        self._rng = rng
        self._think_s = think_s
        self.latencies: list[float] = []

    def begin(self, count: int, insert: Callable[[int, Then], None], spread_s: float) -> None:
        for writer in range(count):
            self._simulation.after(self._rng.random() * spread_s, lambda writer=writer: self._send(writer, insert))  # type: ignore[misc]

    def _send(self, writer: int, insert: Callable[[int, Then], None]) -> None:
        sent_s = self._simulation.now

        def answered() -> None:
            self.latencies.append(self._simulation.now - sent_s)
            pause_s = self._rng.expovariate(1 / self._think_s) if self._think_s else 0.0
            self._simulation.after(pause_s, lambda: self._send(writer, insert))

        insert(writer, answered)
