"""A real server process: `persist serve` on a free port."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, Self

from tests.support.forked import Forked
from tests.support.waiting import WAIT_S


class Process(Protocol):
    """What a server is asked of its process."""

    @property
    def stdout(self) -> BinaryIO: ...
    @property
    def stderr(self) -> BinaryIO: ...
    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


OF_MAINTENANCE = ("--blob", "--consensus", "--region", "--index")


class Server:
    """Started when made; its URL is its first line. Use it in a `with`.

    `maintenance`: "own" is a process that the server starts, as in production; "beside" is the same command, forked.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        maintenance: Literal["none", "own", "beside"] = "none",
        begin: Callable[[Sequence[str], Mapping[str, str]], Process] = Forked,
    ) -> None:
        command = ["serve"]
        if "--blob" not in arguments:
            command += ["--dir", str(directory)]
        if maintenance != "own":
            command.append("--no-maintenance")
        if "--port" not in arguments:
            arguments = (*arguments, "--port", "0")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PERSIST_")}
        variables |= environment or {}
        self.process = begin([*command, *arguments], variables)
        self.url = self.process.stdout.readline().decode().strip()
        self._beside: Forked | None = None
        if maintenance == "beside":
            words = [
                "maintain",
                "run",
                "--url",
                self.url,
                *([] if "--blob" in arguments else ["--dir", str(directory)]),
            ]
            words += [word for pair in pairwise(arguments) if pair[0] in OF_MAINTENANCE for word in pair]
            self._beside = Forked(words, variables, unread=True)
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def requests(self, verb: str) -> int:
        """How many requests of that verb it has answered with 200 or 204."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        starts = tuple(f'persist_requests_total{{status="{status}",verb="{verb}"}}' for status in (200, 204))
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(starts))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        for process in [self.process, *([self._beside] if self._beside else [])]:
            process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._ended()

    def said(self) -> str:
        """What it has written to standard error; after its end."""
        self._reader.join(WAIT_S)
        return self.said_so_far()

    def said_so_far(self) -> str:
        return b"".join(self._said).decode()

    def _read(self) -> None:
        for line in self.process.stderr:
            self._said.append(line)

    def _ended(self) -> int:
        code = self.process.wait(WAIT_S)
        if self._beside is not None:
            self._beside.end(signal.SIGKILL)
            self._beside = None
        self._reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        elif not self.process.stdout.closed:
            self._ended()


@contextmanager
def url_of(kind: str, directory: Path) -> Iterator[str]:
    """The URL of an empty location in the directory; `kind`: of the "directory" itself, or of a "server" over it."""
    if kind == "directory":
        yield f"persist://{directory}/data"
        return
    with Server(directory / "data") as server:
        yield server.url
