"""The demo's child processes: started, heard, killed, and stopped in any case.

A child tells what it does as JSON lines on stdout; its stderr goes to a log file, whose end is shown when it fails.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STOP_S = 20.0  # from asking a child to end until it is made to
EVENTS_MAX = 10_000
LOG_SHOWN_CHARS = 3_000


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Deadline:
    """The end of the whole demo; every wait takes its bound from here."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self._seconds = seconds

    def left(self, most_s: float) -> float:
        """Seconds that a wait may take, at most `most_s`. Raises DemoFailed when none are left."""
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise DemoFailed(f"the demo took longer than {self._seconds:.0f} s; give it more with --timeout")
        return min(left, most_s)


def emit(event: str, **fields: Any) -> None:
    """Tell the parent, from within a child."""
    print(json.dumps({"event": event, **fields}), flush=True)


class Child:
    """One process, in a process group of its own together with what it starts."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        self._lines: queue.Queue[str | None] = queue.Queue(EVENTS_MAX)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=dict(environment),
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, timeout_s: float) -> str | None:
        """The next line of its output; None when none came in time. Raises DemoFailed when it has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is None:
            raise self.failed("ended before it was done")
        return line.strip()

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event; None when none came in time. Lines that are no JSON object are passed over."""
        end = time.monotonic() + timeout_s
        while True:
            line = self.line(max(0.0, end - time.monotonic()))
            if line is None:
                return None
            if line.startswith("{"):
                return dict(json.loads(line))

    def expect(self, event: str, timeout_s: float) -> dict[str, Any]:
        """The next event, which must be this one."""
        found = self.event(timeout_s)
        if found is None:
            raise self.failed(f"said nothing for {timeout_s:.0f} s")
        if found["event"] != event:
            raise self.failed(f"said {found['event']!r} where {event!r} was expected")
        return found

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self, timeout_s: float) -> None:
        """Wait for its end, which must be a good one."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {timeout_s:.0f} s") from None
        if code != 0:
            raise self.failed(f"ended with exit code {code}")

    def kill(self) -> None:
        """`kill -9`: the process itself, at once."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> None:
        """Ask it to end, then make it and its group."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def failed(self, what: str) -> DemoFailed:
        log = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_SHOWN_CHARS:]
        return DemoFailed(f"the {self.name} {what}\n--- the end of its log:\n{log}")


class Children:
    """Starts children, and stops them all at the end."""

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._environment = {**environment, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        self._logs = logs
        self._children: list[Child] = []

    def start(self, name: str, module: str, *arguments: str) -> Child:
        """`python -m module arguments`."""
        child = Child(name, [sys.executable, "-m", module, *arguments], self._environment, self._logs)
        self._children.append(child)
        return child

    def run(self, name: str, module: str, *arguments: str, timeout_s: float) -> None:
        """Start a process and wait for its good end."""
        child = self.start(name, module, *arguments)
        child.finish(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in reversed(self._children):
            child.stop()


class Server:
    """`persist serve` on a loopback port that stays the same when it is killed and started again."""

    def __init__(self, children: Children, timeout_s: float) -> None:
        self._children = children
        self._starts = 0
        self._port = 0
        self.url = ""
        self.start(timeout_s)

    def start(self, timeout_s: float) -> None:
        """Start it and wait until it is ready: its first line is its URL."""
        self._starts += 1
        name = "server" if self._starts == 1 else f"server-{self._starts}"
        arguments = ("serve", "--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warning")
        self.child = self._children.start(name, "rpc.cli", *arguments)
        url = self.child.line(timeout_s)
        if url is None:
            raise self.child.failed(f"was not ready within {timeout_s:.0f} s")
        self.url = url
        self._port = int(url.rpartition(":")[2])

    def kill(self) -> None:
        """`kill -9`."""
        self.child.kill()


__all__ = ["Child", "Children", "Deadline", "DemoFailed", "Server", "emit"]
