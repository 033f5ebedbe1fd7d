"""Maintenance beside a server goes on: a process of it that ended, or was killed, is started again."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

from persist.cli.process import announce

LOOK_S = 0.5
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0  # before it is started again; each time in a row twice as long
STOP_EXTRA_S = 5.0  # that a process may take to end, beyond the server's own shutdown time
Children = list[subprocess.Popen[bytes]]


class Keeper:
    """Keeps the processes that `start` gives; `children` are those of now."""

    def __init__(self, start: Callable[[], Children], pause_s: float = PAUSE_FIRST_S) -> None:
        self.children: Children = []
        self._start = start
        self._pause_s = pause_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="persist-keeper", daemon=True)

    def begin(self) -> None:
        self.children = self._start()
        if self.children:
            self._thread.start()

    def end(self) -> None:
        """Start nothing any more. Also where it has not begun."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def stop(self, shutdown_s: float) -> None:
        """End what was started: each process may take so long, and `STOP_EXTRA_S`, before it is killed."""
        self.end()
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + shutdown_s + STOP_EXTRA_S
        for child in self.children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _keep(self) -> None:
        pause_s, well_s = self._pause_s, 0.0
        while not self._ending.wait(LOOK_S):
            ended = [child.returncode for child in self.children if child.poll() is not None]
            if not ended:
                well_s += LOOK_S
                if well_s > PAUSE_MAX_S:
                    pause_s = self._pause_s
                continue
            announce("maintenance ended; it is started again", exit_code=ended[0])
            if self._ending.wait(pause_s):
                return
            pause_s, well_s = min(2 * pause_s, PAUSE_MAX_S), 0.0
            try:
                self.children = self._start()
            except OSError as error:  # no process, or no memory, for now
                announce("maintenance cannot be started; it is tried again", why=str(error))
