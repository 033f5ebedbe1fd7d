"""Processes of `persist` that are forked from one which has loaded our code: to load it takes longer than most tests.

What runs is the whole command in a process of its own, with pipes, signals and an exit code as `subprocess.Popen` has.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from rpc.cli.program import ARROW_ALLOCATOR, COMMANDS, main
from tests.support.waiting import WAIT_S

LOADED = [
    *sorted({module for module, _ in COMMANDS.values()}),
    "rpc.app",
    "consensus.sqlite",  # by the scheme of a URL, and by nothing above: SQLAlchemy takes longer than a command does
    "tests.crash.command",
]
os.environ.setdefault(*ARROW_ALLOCATOR)  # for the process that forks: it has loaded Arrow before a command says so
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload([*LOADED, __name__])
gc.freeze()  # in the process that forks: else each collection of a child copies the pages of all that was loaded


class _Started:
    """A process of which somebody holds the end."""

    def __init__(self, target: Callable[..., None], *given: object) -> None:
        self._process = _FORKING.Process(target=target, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs; minus the number of the signal that ended it."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. TimeoutExpired after that many seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("persist", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Started):
    """`persist WORDS` as a process, begun when made. Close its `stdout` and `stderr` after its end.

    Who reads neither says `unread`: a full pipe would stop the process. The process calls `before` before the command.
    It writes to `ends` instead of those two, where they are given: they stay the caller's, who closes them.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        unread: bool = False,
        before: Callable[[], None] | None = None,
        ends: tuple[Connection, Connection] | None = None,
        directory: Path | None = None,
    ) -> None:
        out, its_out = _FORKING.Pipe(duplex=False)
        err, its_err = _FORKING.Pipe(duplex=False)
        with out, its_out, err, its_err:
            pipes = None if unread else ends or (its_out, its_err)
            super().__init__(_command, list(words), dict(environment), str(directory or Path.cwd()), pipes, before)
            self.stdout: BinaryIO = os.fdopen(os.dup(out.fileno()), "rb")
            self.stderr: BinaryIO = os.fdopen(os.dup(err.fileno()), "rb")

    def communicate(self) -> tuple[str, str]:
        """What it prints until its end, for which it is waited; both streams are closed."""
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as pool:
            printed, said = (pool.submit(stream.read) for stream in (self.stdout, self.stderr))
            try:
                self.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return printed.result().decode(), said.result().decode()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send that signal, and wait until it has ended; both streams are closed."""
        self.send_signal(number)
        self.communicate()


class Module(_Started):
    """`main(WORDS)` of a module as a process, begun when made. What it says goes to the end of a file."""

    def __init__(self, name: str, words: Sequence[str], *, said: Path) -> None:
        super().__init__(_module, name, list(words), dict(os.environ), os.getcwd(), str(said))


def ran(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `persist WORDS` to its end, with those variables of the environment added to what is there."""
    process = Forked(words, {**os.environ, **variables})
    printed, said = process.communicate()
    code = process.poll()
    assert code is not None
    return subprocess.CompletedProcess(list(words), code, printed, said)


def print_ascii() -> None:
    """As `before`: standard output has the encoding of a terminal that shows ASCII alone."""
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)  # noqa: SIM115 - as long as the process


def read_from(path: str) -> None:
    """As `before`: standard input is this file."""
    os.dup2(os.open(path, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process


def close_stream(number: int) -> None:
    """As `before`: the process began with this standard stream closed."""
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)


def _command(
    words: list[str],
    environment: dict[str, str],
    directory: str,
    pipes: tuple[Connection, Connection] | None,
    before: Callable[[], None] | None,
) -> None:
    """What the process does: it takes its pipes, and is the command from there on."""
    _move(directory, environment)
    if pipes is None:
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    else:
        for pipe, number in zip(pipes, (1, 2), strict=True):
            with pipe:
                os.dup2(pipe.fileno(), number)
    if before is not None:
        before()
    sys.argv = ["persist", *words]
    sys.exit(main())


def _module(name: str, words: list[str], environment: dict[str, str], directory: str, said: str) -> None:
    _move(directory, environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.exit(importlib.import_module(name).main(words))


def _move(directory: str, environment: dict[str, str]) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
