"""Several worker processes behind one port: started, started again when they die, and ended together.

The supervisor keeps what they share: the listening socket, the board and the letter boxes. So while a worker is away
the others see to its shards, and get what was handed to it before.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from persist.cli.process import announce, on_signals
from rpc.cli.keeping import Keeper
from rpc.crew.board import Board, open_memory
from rpc.crew.letters import Box, open_box, pass_on, socket_of
from rpc.crew.member import Told

WORKER = "PERSIST_WORKER"
"""The variable by which a worker process is told what it is."""
LOOK_S = 0.5
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0  # before a worker is started again; each time in a row twice as long
WELL_S = 60.0  # a worker that has lived for so long was well
CHILD_STOP_EXTRA_S = 5.0  # beyond the children's own shutdown time
Child = subprocess.Popen[bytes]
Environment = Mapping[str, str]


@dataclass(slots=True)
class _Worker:
    process: Child
    started_s: float
    pause_s: float = PAUSE_FIRST_S
    is_due_s: float | None = None  # when it is started again; None: it lives


@dataclass(slots=True)
class Supervisor:
    """`command` with `environment` is a worker; `shutdown_s`: how long one may take to end."""

    listener: socket.socket
    workers: int
    command: list[str]
    environment: Environment
    shutdown_s: float
    _memory: int = -1
    _boxes: list[Box] = field(default_factory=list)
    _crew: list[_Worker] = field(default_factory=list)

    def run(self, ready: Callable[[], None], keeper: Keeper) -> None:
        """Until a signal comes. `ready` is called once each worker answers, or has ended."""
        stopping = threading.Event()
        on_signals(stopping.set)
        self._memory = open_memory(self.workers)
        board = Board(self._memory, 0, self.workers)
        self._boxes = [open_box() for _ in range(self.workers)]
        try:
            for index in range(self.workers):
                self._crew.append(_Worker(self._spawn(index), time.monotonic()))
            self._wait_until_ready(stopping)
            if not stopping.is_set():
                keeper.begin()
                ready()
            while not stopping.wait(LOOK_S):
                for index, worker in enumerate(self._crew):
                    self._keep(index, worker, board)
        finally:
            keeper.end()
            stop([*(worker.process for worker in self._crew), *keeper.children], self.shutdown_s)

    def _keep(self, index: int, worker: _Worker, board: Board) -> None:
        """Start a worker again that has died, after a pause."""
        now_s = time.monotonic()
        if worker.is_due_s is None:
            if worker.process.poll() is None:
                return
            board.died(index)  # from now on the others see to its shards
            announce("a worker ended; it is started again", exit_code=worker.process.returncode)
            if now_s - worker.started_s > WELL_S:
                worker.pause_s = PAUSE_FIRST_S
            worker.is_due_s, worker.pause_s = now_s + worker.pause_s, min(2 * worker.pause_s, PAUSE_MAX_S)
        self._pass_on(index, board)
        if worker.is_due_s is not None and now_s >= worker.is_due_s:
            if worker.process.stdout is not None:
                worker.process.stdout.close()
            worker.process, worker.started_s, worker.is_due_s = self._spawn(index), now_s, None

    def _pass_on(self, index: int, board: Board) -> None:
        """Give what waits for a worker that is away to one that is there. Where none is, it waits for the next one."""
        alive = [other for other in range(self.workers) if board.is_alive(other)]
        if not alive:
            return
        with socket_of(os.dup(self._boxes[index].read)) as box, socket_of(os.dup(self._boxes[alive[0]].send)) as to:
            while pass_on(box, to):
                pass

    def _wait_until_ready(self, stopping: threading.Event) -> None:
        """Wait until each child has told its URL, or ended, or a signal has come."""
        for worker in self._crew:
            assert worker.process.stdout is not None
            while not stopping.is_set() and not select.select([worker.process.stdout], [], [], LOOK_S)[0]:
                pass

    def _spawn(self, index: int) -> Child:
        own, sends = self._boxes[index], tuple(box.send for box in self._boxes)
        told = Told(index, self.listener.fileno(), self._memory, own.read, sends, os.getpid())
        environment = {**self.environment, WORKER: msgspec.json.encode(told).decode()}
        inherited = (told.listener, told.board, told.read, *told.send)
        return subprocess.Popen(self.command, pass_fds=inherited, env=environment, stdout=subprocess.PIPE)


def worker_command(log_level: str) -> list[str]:
    """What a worker is started by: all else it is told by its environment."""
    return [sys.executable, "-m", "persist.cli", "serve", "--log-level", log_level]


def stop(children: list[Child], shutdown_s: float) -> None:
    """Ask the children to end, wait for as long as they may take, then make them."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + shutdown_s + CHILD_STOP_EXTRA_S
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
