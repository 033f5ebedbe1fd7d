"""Programs that are ended by signals or with their parent, each run by `Module` in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import compactor.loop
from compactor.loop import Loop
from persist.cli import long_running
from persist.commit.location import Location, open_location, open_stores
from rpc.app import bind, serve
from rpc.cli.serve import maintenance_command
from rpc.settings import ServerSettings
from tests.support.waiting import WAIT_S

GRACE_S = 1.0  # of a child that does not end by itself
ROUNDS = 400


def end_when_ready(url: str) -> None:
    """A server that is told to end at the very moment when it is ready, before uvicorn listens to signals."""
    location = open_location(url)
    serve(location, ServerSettings(), bind("127.0.0.1", 0), lambda: os.kill(os.getpid(), signal.SIGTERM))
    location.close()


def maintain(directory: str, then: str) -> None:
    """The parent of a process of maintenance, whose id it writes; it sleeps, or exits at once."""
    child = subprocess.Popen(maintenance_command(ServerSettings(directory=directory), None))
    print(child.pid, file=sys.stderr, flush=True)
    if then == "exit":
        os._exit(0)
    time.sleep(WAIT_S)


def be_stubborn() -> None:
    """The parent of a process that ignores SIGTERM, whose id it writes."""
    long_running.GRACE_S = GRACE_S
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        print(child, file=sys.stderr, flush=True)
        time.sleep(WAIT_S)
    long_running.end_with_parent(os.getppid())
    print("watching", file=sys.stderr, flush=True)
    time.sleep(WAIT_S)


def interrupt_at_any_line() -> None:
    """Run a loop of maintenance again and again; each time SIGTERM comes one line of Python later than before.

    Lines are those of the loop and of the events that it waits for.
    """
    location = open_stores("mem:", "mem:")
    compactor.loop.RESCAN_S = compactor.loop.INTERVAL_S = 0.0001
    for at in range(1, ROUNDS):
        faulthandler.dump_traceback_later(WAIT_S, exit=True)
        _interrupt(location, at)
    faulthandler.cancel_dump_traceback_later()


def _interrupt(location: Location, at: int) -> None:
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in (compactor.loop.__file__, threading.__file__):
            return None
        lines += 1
        if lines == at:
            signal.raise_signal(signal.SIGTERM)
        return trace

    loop = Loop(location, lambda name: None)
    long_running.on_signals(loop.stop)
    sys.settrace(trace)
    try:
        loop.run()
    finally:
        sys.settrace(None)


PROGRAMS: dict[str, Callable[..., None]] = {
    "end when ready": end_when_ready,
    "maintain": maintain,
    "be stubborn": be_stubborn,
    "interrupt at any line": interrupt_at_any_line,
}


def main(words: Sequence[str]) -> int:
    PROGRAMS[words[0]](*words[1:])
    return 0
