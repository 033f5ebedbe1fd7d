"""Processes as a monitor sees them: their figures, and the log lines that they have written."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.forked import Forked
from tests.support.waiting import wait_until


def scraped(url: str) -> str:
    """The text of `/metrics`."""
    with urllib.request.urlopen(f"{url.removesuffix('/metrics')}/metrics") as answer:
        return str(answer.read().decode())


def series(text: str) -> dict[str, float]:
    """The value of each series by its name and labels, as they stand in the text."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def types(text: str) -> dict[str, str]:
    """The kind of each family by its name."""
    return dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))


def log_lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


class Maintenance:
    """`persist maintain run` or `persist maintain gc` with a free port for monitors."""

    def __init__(self, *arguments: str) -> None:
        self.process = Forked([*arguments, "--metrics-port", "0"], os.environ)
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait(lambda: bool(self._lines("metrics")), "it tells where its metrics are")
        self.url = str(self._lines("metrics")[0]["url"])

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        wait_until(lambda: is_so() or self.process.poll() is not None, what)
        assert self.process.poll() is None, "".join(self._said)

    def series(self) -> dict[str, float]:
        return series(scraped(self.url))

    def said(self) -> str:
        return "".join(self._said)

    def _lines(self, message: str) -> list[dict[str, Any]]:
        return [line for line in log_lines(self.said()) if line["message"] == message]

    def _read(self) -> None:
        for line in self.process.stderr:
            self._said.append(line.decode())


@contextmanager
def maintenance(*arguments: str) -> Iterator[Maintenance]:
    """Ended by SIGKILL, if it has not ended before."""
    started = Maintenance(*arguments)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started._reader.join()
        started.process.stdout.close()
        started.process.stderr.close()
