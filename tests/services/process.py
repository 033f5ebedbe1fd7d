"""Server processes of the tests: started as children, killed at will, started again, always reaped.

Being the parent matters: a killed server that nobody waits for stays a zombie, and PostgreSQL takes the
zombie in its lock file for a running postmaster and refuses to start.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0


class ServerError(Exception):
    """A server did not come up; the message holds the end of its log."""


class ServerMissing(ServerError):
    """A server is not installed on this machine; the message says which."""


def free_ports(count: int) -> list[int]:
    """Free loopback ports below the ephemeral range.

    On a port of that range a client that reconnects to a dead server can be given the server's own port as
    its source and so connect to itself.
    """
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
                held.append(candidate)
            except OSError:
                candidate.close()
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll `condition` until it holds; ServerError names `what` if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"waited {timeout_s:.0f} s in vain until {what}")
        time.sleep(0.02)


def port_answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """One server process. `end_signal` ends it for good when the tests' process dies (Linux) or stops it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        user: str | None = None,
        end_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.name = name
        self._command = [*_ends_with_parent(end_signal), *command]
        self._log = log
        self._user = user
        self._end_signal = end_signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, ready: Callable[[], bool]) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **_as_user(self._user),
            )
        self.wait_ready(ready)

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Wait until a started server is ready; ServerError, and it is stopped, if it never is."""
        try:
            wait_until(lambda: ready() or not self.running, f"{self.name} is ready")
        except ServerError:
            self.stop()
            raise
        if not self.running:
            raise ServerError(f"{self.name} ended at once; its log ends:\n{self.log_tail()}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        if self._process is None or not self.running:
            return
        self.signal(signal.SIGCONT)
        self.signal(self._end_signal)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def run(command: Sequence[str], *, user: str | None = None, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run a command to its end; ServerError holds what it said if it failed."""
    done = subprocess.run(
        list(command), capture_output=True, text=True, cwd="/", timeout=timeout_s, check=False, **_as_user(user)
    )
    if done.returncode:
        raise ServerError(f"{command[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _as_user(user: str | None) -> dict[str, object]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


def _ends_with_parent(number: signal.Signals) -> list[str]:
    """A prefix that has the kernel end the server when the tests' process dies, however it dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", number.name.removeprefix("SIG")] if setpriv and os.name == "posix" else []
