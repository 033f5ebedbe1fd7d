"""What commands that run for long share: log lines as JSON on standard error, and how they are told to end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, TextIO

import msgspec

from persist.cli.log_flood import FloodFilter
from persist.core.errors import InvalidUsage

LEVELS = ("debug", "info", "warning", "error")
PARENT_POLL_S = 0.5
GRACE_S = 30.0
TRACE_CHARS_MAX = 16_000  # the end of a trace tells most
_ENCODER = msgspec.json.Encoder(enc_hook=str)  # a tenth of the time of `json`: an access log has many lines
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at, level, logger, message, and whatever `extra` the caller gave by other names."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _PLAIN | line.keys()})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-TRACE_CHARS_MAX:]
        try:
            return _ENCODER.encode(line).decode()
        except (ValueError, TypeError):  # a lone surrogate, or a key that is no text
            return json.dumps(line, default=str)


class _Lines(logging.StreamHandler[TextIO]):
    """Marks a record whose line could not be written, for a caller who counts those."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class names it so
        record.is_lost = True
        super().handleError(record)


def configure_logs(level: str) -> None:
    """Send everything from `level` on to standard error as JSON, but for floods (`log_flood`)."""
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(FloodFilter(time.monotonic))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def announce(message: str, **fields: Any) -> None:
    """A log line that is written at every level."""
    record = {"name": "persist.cli", "msg": message, "levelname": "INFO", "levelno": logging.INFO, **fields}
    logging.getLogger().handle(logging.makeLogRecord(record))


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` once, in a thread of its own, on SIGTERM or SIGINT. To be called from the main thread.

    The handler does not call it: a handler interrupts the main thread anywhere, also where that holds a lock which
    `stop` needs.
    """
    told: SimpleQueue[int] = SimpleQueue()  # a handler may put into it at any moment
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.put(number))

    def wait() -> None:
        told.get()
        stop()

    threading.Thread(target=wait, name="persist-signals", daemon=True).start()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM is KeyboardInterrupt, as SIGINT is: what was begun is taken away before the end.

    To be used in the main thread.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent(parent: int, grace_s: float = GRACE_S) -> None:
    """Send this process SIGTERM when `parent`, which started it, is gone, and SIGKILL `grace_s` seconds later.

    Commands call it before they open stores. Raises InvalidUsage if the parent is gone now.
    """
    if os.getppid() != parent:
        raise InvalidUsage(f"process {parent}, which started this one, is gone")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="persist-parent", daemon=True).start()
