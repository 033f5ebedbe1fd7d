"""One seed, one interleaving: tasks are greenlets, and exactly one of them runs at a time.

A task runs until it sleeps, waits for a lock or reaches a store; then the scheduler picks the next one with its seeded
generator. Time is simulated: it moves only when nobody can run. So a run is a pure function of its seed, a thousand
times faster than real time, and any number of simulated processes fit into one.

Production code runs unchanged: `cooperative()` gives the modules that lock a `threading` of their own, whose locks,
conditions and events hand the baton on instead of blocking the only thread there is.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import greenlet

__all__ = ["Deadlock", "Scheduler", "Stuck", "Task", "cooperative"]

STEPS_MAX = 2_000_000
JOIN_LOOK_S = 0.05


class Deadlock(Exception):
    """Every task waits for another."""


class Stuck(Exception):
    """The run takes more steps than any healthy one: somebody retries without end."""


class Task:
    """A flow of control inside a simulated process. `alive` ends with its function, or when its process is killed."""

    def __init__(self, scheduler: Scheduler, name: str, process: object, work: Callable[[], object]) -> None:
        self.name = name
        self.process = process
        self.alive = True
        self.frozen = False
        self.local: dict[str, Any] = {}
        self.waits_for: object = None
        self._ticket = 0
        self._scheduler = scheduler
        self._work = work
        self.greenlet = greenlet.greenlet(self._run, scheduler.hub)

    def _run(self) -> None:
        try:
            self._work()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self._scheduler.failed(self, error)
        finally:
            self.alive = False

    def __repr__(self) -> str:
        return self.name


class Scheduler:
    """`now_us` is the simulated time in microseconds since the start of the run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hub = greenlet.getcurrent()
        self.now_us = 0
        self.steps = 0
        self.failure: tuple[Task, BaseException] | None = None
        self._ready: list[Task] = []
        self._sleeping: list[tuple[int, int, Task, int]] = []
        self._order = 0
        self._all: list[Task] = []
        self._ended = False
        self.started: Callable[[Task], None] = lambda task: None  # hears of the threads that tasks start
        self.current: Task | None = None

    # --- from outside

    def spawn(self, name: str, process: object, work: Callable[[], object]) -> Task:
        task = Task(self, name, process, work)
        self._all.append(task)
        self._ready.append(task)
        return task

    def run(self, until: Callable[[], bool]) -> None:
        """Run tasks until `until()`. Raises what a task raised, Deadlock, or Stuck."""
        while not until():
            if self._ready:
                at = self.random.randrange(len(self._ready))
                task = self._ready[at]
                self._ready[at] = self._ready[-1]
                self._ready.pop()
            elif self._sleeping:
                wake_us, _, task, ticket = heapq.heappop(self._sleeping)
                if task._ticket != ticket:
                    continue  # woken meanwhile by something else
                self.now_us = max(self.now_us, wake_us)
            else:
                waiting = [f"{t} waits for {t.waits_for}" for t in self._all if t.alive]
                raise Deadlock("; ".join(waiting) or "nothing is left to run")
            if not task.alive:
                continue
            if task.frozen:
                self._sleep_until(task, self.now_us + 50_000)
                continue
            self._switch(task)
            if self.failure is not None:
                raise self.failure[1]
            if self.steps > STEPS_MAX:
                raise Stuck(f"more than {STEPS_MAX} steps")

    def kill(self, tasks: Sequence[Task]) -> None:
        """These tasks never run again: no cleanup runs, as when a process is killed."""
        for task in tasks:
            task.alive = False
            task._ticket += 1

    def end(self) -> None:
        """Unwind every task that is left. Whatever it does on its way out fails at once."""
        self._ended = True
        for task in self._all:
            while not task.greenlet.dead:
                task.greenlet.throw(greenlet.GreenletExit)
        self._all.clear()

    def failed(self, task: Task, error: BaseException) -> None:
        if not self._ended and self.failure is None:
            self.failure = (task, error)

    # --- from inside a task

    def sleep(self, seconds: float) -> None:
        task = self._me()
        if task is None:
            self.now_us += int(seconds * 1e6)
            return
        self._sleep_until(task, self.now_us + max(0, int(seconds * 1e6)))
        self._yield()

    def block(self, queue: list[Task], timeout_s: float | None, what: object) -> None:
        """Wait in `queue` until `wake` or the timeout."""
        task = self._me()
        if task is None:
            raise Deadlock(f"the scheduler itself waits for {what}")
        queue.append(task)
        task.waits_for = what
        if timeout_s is not None:
            self._sleep_until(task, self.now_us + max(0, int(timeout_s * 1e6)))
        else:
            task._ticket += 1
        self._yield()
        task.waits_for = None
        if task in queue:
            queue.remove(task)

    def wake(self, queue: list[Task], count: int | None = None) -> None:
        for task in list(queue)[:count]:
            queue.remove(task)
            task._ticket += 1
            self._ready.append(task)

    def _sleep_until(self, task: Task, wake_us: int) -> None:
        task._ticket += 1
        self._order += 1
        heapq.heappush(self._sleeping, (wake_us, self._order, task, task._ticket))

    def _me(self) -> Task | None:
        if self._ended:
            if greenlet.getcurrent() is self.hub:
                return None
            raise greenlet.GreenletExit
        return self.current

    def _switch(self, task: Task) -> None:
        self.steps += 1
        self.current = task
        task.greenlet.switch()
        self.current = None

    def _yield(self) -> None:
        self.hub.switch()
        if self._ended:
            raise greenlet.GreenletExit


# --- a `threading` that hands the baton on


class _Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held_by: Task | None = None
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._held:
            if not blocking:
                return False
            self._scheduler.block(self._waiting, None, f"a lock of {self._held_by}")
        self._held = True
        self._held_by = self._scheduler.current
        return True

    def release(self) -> None:
        assert self._held, "release of a lock that nobody holds"
        self._held = False
        self._held_by = None
        self._scheduler.wake(self._waiting, 1)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class _RLock(_Lock):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held and self._held_by is self._scheduler.current:
            self._depth += 1
            return True
        return super().acquire(blocking, timeout)

    def release(self) -> None:
        if self._depth:
            self._depth -= 1
        else:
            super().release()


class _Condition:
    def __init__(self, scheduler: Scheduler, lock: _Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or _RLock(scheduler)
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        started = self._scheduler.now_us
        self._lock.release()
        try:
            self._scheduler.block(self._waiting, timeout, "a condition")
        finally:
            self._lock.acquire()
        return timeout is None or self._scheduler.now_us < started + int(timeout * 1e6)

    def notify(self, n: int = 1) -> None:
        self._scheduler.wake(self._waiting, n)

    def notify_all(self) -> None:
        self._scheduler.wake(self._waiting)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.wake(self._waiting)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._scheduler.block(self._waiting, timeout, "an event")
        return self._set


class _Thread:
    """A task of the process of whoever starts it, to whom its commands are put down."""

    def __init__(self, scheduler: Scheduler, target: Callable[[], object], name: str = "thread", daemon: bool = True):
        self._scheduler = scheduler
        self._target = target
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        starter = self._scheduler.current
        assert starter is not None
        self._task = self._scheduler.spawn(f"{starter.name}.{self._name}", starter.process, self._target)
        self._task.local.update(starter.local)
        self._scheduler.started(self._task)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        assert timeout is None, "nobody joins for a while only"
        while self._task.alive:
            self._scheduler.sleep(JOIN_LOOK_S)


def one_by_one(work: Callable[[Any], Any], items: Iterable[Any], workers: int, waiting: int = 0) -> Iterator[Any]:
    """Stands in for work on several threads: the same results in the same order."""
    return map(work, items)


@contextmanager
def cooperative(scheduler: Scheduler, modules: Sequence[ModuleType]) -> Iterator[None]:
    """While it lasts, `threading` in these modules makes locks that the scheduler knows."""
    stand_in = SimpleNamespace(
        Lock=lambda: _Lock(scheduler),
        RLock=lambda: _RLock(scheduler),
        Condition=lambda lock=None: _Condition(scheduler, lock),
        Event=lambda: _Event(scheduler),
        Thread=lambda **settings: _Thread(scheduler, **settings),
        get_ident=lambda: id(scheduler.current),
    )
    before = [(module, module.threading) for module in modules if hasattr(module, "threading")]
    for module, _ in before:
        module.threading = stand_in  # type: ignore[attr-defined]
    ordered = [(module, module.map_in_order) for module in modules if hasattr(module, "map_in_order")]
    assert before, "no module of these makes threads: were they renamed?"
    assert ordered, "no module of these works on several threads: was map_in_order renamed?"
    for module, _ in ordered:
        module.map_in_order = one_by_one  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, real in before:
            module.threading = real  # type: ignore[attr-defined]
        for module, real in ordered:
            module.map_in_order = real  # type: ignore[attr-defined]
