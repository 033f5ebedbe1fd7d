"""The simulated world: two stores, a network that misbehaves, and processes that can be killed or put to sleep.

Every call of a store passes through here, so every one is a place where others may run, where a process may
be killed, and where the network may lose the request, lose the answer, or deliver the request much later.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from blob.errors import BlobError, BlobUnavailable
from blob.interface import Blob, BlobStat
from blob.memory_blobs import MemoryBlob
from consensus.interface import Consensus, ConsensusError, ConsensusIndeterminate, ConsensusUnavailable, Entry, Wanted
from consensus.memory_logs import MemoryConsensus
from tests.simulation.scheduler import Scheduler, Task
from tests.support.blob_faults import FaultPlan, FaultyBlob
from tests.support.consensus_faults import FaultyConsensus

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
DELETED_AT_ONCE = 3  # blobs
FAULTS = (
    "fail_before", "fail_after", "fail_unknown", "delay", "late", "flip", "truncate", "drop_push", "crash",
    "freeze", "hibernate", "clock_jump", "wild_clock", "suspend", "outage", "held_up",
)  # fmt: skip
# Chances a call (crash, freeze, clock_jump and outage: a beat of the tormentor; held_up: a command) that the fault
# strikes.
RATES = {
    "fail_before": 0.02, "fail_after": 0.03, "fail_unknown": 0.02, "delay": 0.02, "late": 0.02, "flip": 0.012,
    "truncate": 0.012, "drop_push": 0.3, "crash": 0.8, "freeze": 0.8, "hibernate": 0.8, "clock_jump": 0.8,
    "wild_clock": 0.8, "suspend": 0.8, "outage": 0.8, "held_up": 0.1,
}  # fmt: skip
DELAY_S = 2.5  # most of a lease
LATE_S_MAX = 8.0  # beyond several leases and retries
LATENCY_S = 0.02
CLOCK_JUMP_MS_MAX = 8_000
WILD_CLOCK_MS_MAX = 40 * 24 * 3_600_000
OUTAGE_S_MAX = 9.0  # longer than a caller tries again


@dataclass
class Process:
    """One operating system process: its tasks die together.

    `skew_ms` is how far its wall clock is off; its monotonic clock has stood still for `stood_still_us`.
    """

    name: str
    tasks: list[Task] = field(default_factory=list)
    alive: bool = True
    skew_ms: int = 0
    stood_still_us: int = 0
    incarnation: int = 0


class SimClock:
    """The clock of one process."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process

    def now_ms(self) -> int:
        return EPOCH_MS + self._scheduler.now_us // 1000 + self._process.skew_ms

    def monotonic(self) -> float:
        return (self._scheduler.now_us - self._process.stood_still_us) / 1e6

    def uptime(self) -> float:
        return self._scheduler.now_us / 1e6

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class SimIds:
    """UUIDs of version 7: they ascend within a process, and tell when its clock says that they were minted."""

    def __init__(self, clock: SimClock, seed: int) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self._last = 0

    def uuid7(self) -> str:
        self._last = max(self._last + 1, self._clock.now_ms() << 12)
        high = (self._last >> 12) << 16 | 0x7000 | (self._last & 0xFFF)
        return f"{high:016x}{0b10 << 62 | self._random.getrandbits(62):016x}"


class SimBackground:
    """Background work is one more task of the process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def submit(self, work: Callable[[], None]) -> bool:
        self._world.start(self._process, "background", work)
        return True

    def close(self) -> None:
        return


class World:
    """The truth (`blobs`, `logs`: stores without faults) and the ways to reach it."""

    def __init__(self, seed: int, faults: Sequence[str]) -> None:
        self.scheduler = Scheduler(seed)
        self.random = random.Random(seed ^ 0x5EED)
        self.enabled = tuple(faults)
        self.healed = False
        self.last_put: object = None  # the process that put a blob last
        self.away_until_us = 0  # until then the consensus store gives no answers
        self.counts: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.pushes: list[tuple[Process, Callable[[str], None]]] = []
        self.net = Process("network")
        rates = {k: RATES[k] for k in self.enabled if k in ("fail_before", "fail_after", "fail_unknown", "delay")}
        self.plan = FaultPlan(seed, rates, delay_s=DELAY_S, sleep=self.scheduler.sleep)
        # What the disk damages is chosen apart, so that most runs see no damage and stop for nothing.
        damage = {k: RATES[k] for k in self.enabled if k in ("flip", "truncate")}
        self.damage = FaultPlan(seed + 1, damage, sleep=self.scheduler.sleep)
        self.blobs: Blob = MemoryBlob(now_ms=lambda: EPOCH_MS + self.scheduler.now_us // 1000)
        self.logs: Consensus = MemoryConsensus()
        self.scheduler.started = self._adopt

    def strikes(self, fault: str) -> bool:
        if self.healed or fault not in self.enabled or self.random.random() >= RATES[fault]:
            return False
        self.counts[fault] += 1
        return True

    def heal(self) -> None:
        self.healed = True
        self.away_until_us = 0
        self.plan.heal()
        self.damage.heal()

    def fired(self) -> Counter[str]:
        """How often each fault struck so far."""
        return self.counts + self.plan.counts + self.damage.counts

    # --- processes

    def process(self, name: str) -> Process:
        process = Process(name)
        self.processes.append(process)
        return process

    def start(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        process.tasks = [task for task in process.tasks if task.alive]
        task = self.scheduler.spawn(f"{process.name}.{name}", process, work)
        task.frozen = any(other.frozen for other in process.tasks)
        process.tasks.append(task)
        return task

    def _adopt(self, task: Task) -> None:
        """A thread that a task started belongs to its process: it dies and sleeps with it."""
        assert isinstance(task.process, Process)
        task.frozen = any(other.frozen for other in task.process.tasks)
        task.process.tasks.append(task)

    def crash(self, process: Process) -> None:
        self.scheduler.kill(process.tasks)
        process.tasks.clear()
        process.alive = False
        self.pushes = [(p, callback) for p, callback in self.pushes if p is not process]

    def freeze(self, process: Process, frozen: bool) -> None:
        for task in process.tasks:
            task.frozen = frozen

    # --- the network

    def go_away(self) -> None:
        """For some seconds the consensus store hears some requests, and answers none."""
        self.away_until_us = self.scheduler.now_us + int(OUTAGE_S_MAX * self.random.random() * 1e6)

    @property
    def away(self) -> bool:
        return self.scheduler.now_us < self.away_until_us

    def call(self, effect: Callable[[], T], lost: Callable[[], Exception] | None) -> T:
        """Travel there, have the effect, travel back. `lost` makes the error of a call whose effect comes later."""
        self.scheduler.sleep(self.random.random() * LATENCY_S)
        if lost is not None and self.strikes("late"):
            self.start(self.net, "late", lambda: self._late(effect))
            self.scheduler.sleep(self.random.random() * LATENCY_S)
            raise lost()
        result = effect()
        self.scheduler.sleep(self.random.random() * LATENCY_S)
        return result

    def _late(self, effect: Callable[[], Any]) -> None:
        self.scheduler.sleep(self.random.random() * LATE_S_MAX)
        with suppress(BlobError, ConsensusError):  # nobody is there to hear it
            effect()

    def moved(self, key: str) -> None:
        """Tell subscribers, late or not at all."""
        for process, callback in self.pushes:
            if not self.strikes("drop_push"):
                self.start(process, "push", lambda callback=callback: self._push(callback, key))

    def _push(self, callback: Callable[[str], None], key: str) -> None:
        self.scheduler.sleep(self.random.random() * LATENCY_S)
        callback(key)


class SimConsensus(Consensus):
    """The consensus store as one process reaches it."""

    def __init__(self, world: World, process: Process, push: bool) -> None:
        self._world = world
        self._process = process
        self._push = push
        self._inner = FaultyConsensus(FaultyConsensus(world.logs, world.damage), world.plan)

    @property
    def url(self) -> str:
        return "mem:simulated"

    @property
    def value_bytes_max(self) -> int:
        return self._world.logs.value_bytes_max

    def head(self, key: str) -> Entry | None:
        return self._read(lambda: self._inner.head(key))

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        return self._set(key, lambda: self._inner.compare_and_set(key, seqno, data, after))

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        return self._set(key, lambda: self._inner.begin(key, seqno, data))

    def _set(self, key: str, tried: Callable[[], bool]) -> bool:
        def effect() -> bool:
            if self._world.away and self._world.random.random() < 0.5:
                raise self._lost()
            won = tried()
            if won:
                self._world.moved(key)
            if self._world.away:
                raise self._lost()
            return won

        return self._world.call(effect, self._lost)

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._read(lambda: self._inner.scan(key, from_seqno, limit))

    def truncate(self, key: str, seqno: int) -> int:
        return self._world.call(lambda: self._inner.truncate(key, seqno), self._lost)

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._read(lambda: self._inner.keys(prefix, after, limit, with_ended))

    def _read(self, effect: Callable[[], T]) -> T:
        def answered() -> T:
            if self._world.away:
                raise ConsensusUnavailable("injected fault: the consensus store is away")
            return effect()

        return self._world.call(answered, None)

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        if not self._push:
            return None
        entry = (self._process, callback)
        self._world.pushes.append(entry)
        return lambda: self._world.pushes.remove(entry)

    @staticmethod
    def _lost() -> Exception:
        return ConsensusIndeterminate("injected fault: no answer came; the request is still under way")


class SimBlob(Blob):
    """The blob store as one process reaches it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._inner = FaultyBlob(FaultyBlob(world.blobs, world.damage), world.plan)

    @property
    def url(self) -> str:
        return "mem:simulated"

    def put(self, key: str, data: bytes | memoryview) -> None:
        held = bytes(data)
        self._world.call(lambda: self._inner.put(key, held), self._lost)
        task = self._world.scheduler.current
        self._world.last_put = task and task.process

    def get(self, key: str) -> bytes:
        return self._world.call(lambda: self._inner.get(key), None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._world.call(lambda: self._inner.get_range(key, start, length), None)

    def stat(self, key: str) -> BlobStat | None:
        return self._world.call(lambda: self._inner.stat(key), None)

    def delete(self, keys: Sequence[str]) -> None:
        doomed = list(keys)
        for start in range(0, len(doomed), DELETED_AT_ONCE):  # a request that deletes many may do so in part
            some = doomed[start : start + DELETED_AT_ONCE]
            self._world.call(partial(self._inner.delete, some), self._lost)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return iter(self._world.call(lambda: list(self._inner.list(prefix)), None))

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    @staticmethod
    def _lost() -> Exception:
        return BlobUnavailable("injected fault: no answer came; the request is still under way")
