"""Simulated time, and what is used up in it: cores, interpreters that only one thread enters, devices that flush.

Nothing here knows shards. Times are seconds; a `then` is called when something is done.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from itertools import count

Then = Callable[[], None]

SLICE_S = 0.0015  # that Linux lets a process run before another one has its turn (base slice, two cores)
SWITCH_S = 0.005  # after which CPython hands the interpreter to a thread that waits
NEIGHBOUR_S = 0.01  # that a process of others works at a time
NOTHING_S = 1e-9


class Simulation:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def after(self, delay_s: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), then))

    def run(self, until_s: float) -> None:
        events = self._events
        while events and events[0][0] <= until_s:
            self.now, _, then = heapq.heappop(events)
            then()
        self.now = until_s


class Host:
    """Cores that its interpreters take turns on, each for a slice at most. `busy_s` is the time of all cores."""

    def __init__(self, simulation: Simulation, cores: int) -> None:
        self.simulation = simulation
        self.cores = cores
        self._free = cores
        self._ready: deque[Interpreter] = deque()
        self.busy_s = 0.0

    def wake(self, interpreter: Interpreter) -> None:
        self._ready.append(interpreter)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._ready:
            self._free -= 1
            self._go_on(self._ready.popleft(), SLICE_S)

    def _go_on(self, interpreter: Interpreter, budget_s: float) -> None:
        ran_s = min(interpreter.left_s, budget_s)
        self.busy_s += ran_s

        def done() -> None:
            interpreter.passed(ran_s)
            if not interpreter.has_work:
                interpreter.is_awake = False
            elif budget_s - ran_s > NOTHING_S:
                self._go_on(interpreter, budget_s - ran_s)
                return
            else:
                self._ready.append(interpreter)
            self._free += 1
            self._dispatch()

        self.simulation.after(ran_s, done)


class Interpreter:
    """Threads of which only one works at a time: a Python process, or a connection of a database.

    A thread goes on until it has nothing left to do, or has worked for SWITCH_S while others wait, as CPython has it.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads: OrderedDict[Hashable, deque[tuple[float, Then]]] = OrderedDict()
        self._left_s = 0.0  # of the first burst of the first thread
        self._turn_s = 0.0  # that this thread has worked without giving way
        self.busy_s = 0.0
        self.is_awake = False

    @property
    def has_work(self) -> bool:
        return bool(self._threads)

    @property
    def left_s(self) -> float:
        """Until something has to be decided."""
        return min(self._left_s, SWITCH_S - self._turn_s) if len(self._threads) > 1 else self._left_s

    def work(self, cpu_s: float, then: Then, thread: Hashable = None) -> None:
        """Have `cpu_s` of CPU spent by a thread, after what it has to do already."""
        if not self._threads:
            self._left_s, self._turn_s = cpu_s, 0.0
        self._threads.setdefault(thread, deque()).append((cpu_s, then))
        if not self.is_awake:
            self.is_awake = True
            self._host.wake(self)

    def passed(self, ran_s: float) -> None:
        self._left_s -= ran_s
        self.busy_s += ran_s
        self._turn_s += ran_s
        thread, bursts = next(iter(self._threads.items()))
        if self._left_s <= NOTHING_S:
            _, then = bursts.popleft()
            if not bursts:
                del self._threads[thread]
                self._turn_s = 0.0
            self._begin()
            then()
        if self._turn_s >= SWITCH_S - NOTHING_S and len(self._threads) > 1:
            self._give_way()

    def _give_way(self) -> None:
        thread, bursts = next(iter(self._threads.items()))
        _, then = bursts.popleft()
        bursts.appendleft((self._left_s, then))
        self._threads.move_to_end(thread)
        self._turn_s = 0.0
        self._begin()

    def _begin(self) -> None:
        """Go on with what is first now."""
        self._left_s = next(iter(self._threads.values()))[0][0] if self._threads else 0.0


class Neighbour:
    """A process of others that keeps a part of one core busy, a while at a time."""

    def __init__(self, simulation: Simulation, host: Host, share: float) -> None:
        self._simulation = simulation
        self._share = min(share, 1.0)
        self._interpreter = Interpreter(host)
        simulation.after(0.0, self._work)

    def _work(self) -> None:
        rest_s = NEIGHBOUR_S * (1 - self._share) / self._share
        self._interpreter.work(NEIGHBOUR_S, lambda: self._simulation.after(rest_s, self._work))


class Flushing:
    """A log on a disk: one flush at a time, and it covers all that waited when it began."""

    def __init__(self, simulation: Simulation, flush_s: float) -> None:
        self._simulation = simulation
        self._flush_s = flush_s
        self._waiting: list[Then] = []
        self._is_busy = False
        self.busy_s = 0.0

    def flush(self, then: Then) -> None:
        self._waiting.append(then)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        covered, self._waiting, self._is_busy = self._waiting, [], True
        self.busy_s += self._flush_s

        def done() -> None:
            self._is_busy = False
            if self._waiting:
                self._begin()
            for then in covered:
                then()

        self._simulation.after(self._flush_s, done)


class Limited:
    """A service that takes so many requests a second, in order, and answers each after a delay."""

    def __init__(self, simulation: Simulation, delay_s: float, per_s: float) -> None:
        self._simulation = simulation
        self._delay_s = delay_s
        self._each_s = 1 / per_s
        self._free_at = 0.0
        self.requests = 0

    def ask(self, then: Then) -> None:
        now = self._simulation.now
        self.requests += 1
        self._free_at = max(now, self._free_at) + self._each_s
        self._simulation.after(self._free_at - now + self._delay_s, then)

    @property
    def busy_s(self) -> float:
        return self.requests * self._each_s
