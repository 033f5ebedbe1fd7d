"""What long-running commands share: rate-limited JSON logs, signals, and shutdown."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, TextIO

import msgspec

from persist.core.errors import InvalidUsage

# Rate limits of log lines, so that repeated errors do not fill a disk.

WINDOW_S = 60.0
LINES_MAX = 100  # of one problem (logger, message, shard and kind of error) in a window
ALL_LINES_MAX = 5_000  # of all problems in a window; the first line of a corruption is logged regardless
TROUBLES_MAX = 2_000  # that are remembered; the oldest are dropped first
UNBOUNDED = ("persist.access", "persist.audit")  # one line for each request, and none may be missing
DAMAGE = "corruption"


@dataclass(slots=True)
class _Trouble:
    began_s: float
    lines: int = 0
    left_out: int = 0


class FloodFilter(logging.Filter):
    """Drops lines beyond the limits. The next line of the same problem has their number as `left_out`.

    `now_s` is a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s
        self._lock = threading.Lock()
        self._all = _Trouble(now_s())
        self._troubles: OrderedDict[tuple[object, ...], _Trouble] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in UNBOUNDED:
            return True
        kind = getattr(record, "kind", None)
        key = (record.name, record.msg if isinstance(record.msg, str) else None, getattr(record, "shard", None), kind)
        with self._lock:
            now_s = self._now_s()
            trouble = self._troubles.get(key)
            if trouble is None:
                trouble = self._troubles[key] = _Trouble(now_s)
                if len(self._troubles) > TROUBLES_MAX:
                    self._troubles.popitem(last=False)
            for count in (trouble, self._all):
                if now_s - count.began_s >= WINDOW_S:
                    count.began_s, count.lines = now_s, 0
            is_first = trouble.lines == 0 and kind == DAMAGE
            if trouble.lines >= LINES_MAX or (self._all.lines >= ALL_LINES_MAX and not is_first):
                trouble.left_out += 1 + int(getattr(record, "left_out", 0))
                return False
            trouble.lines += 1
            self._all.lines += 1
            if trouble.left_out:  # added to the lines that the line itself already summarizes
                record.left_out = int(getattr(record, "left_out", 0)) + trouble.left_out
                trouble.left_out = 0
        return True


# JSON logs on standard error, and signals.

LEVELS = ("debug", "info", "warning", "error")
PARENT_POLL_S = 0.5
GRACE_S = 30.0
TRACE_CHARS_MAX = 16_000  # the end of a traceback is the most useful part
_ENCODER = msgspec.json.Encoder(enc_hook=str)  # a tenth of the time of `json`: an access log has many lines
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at, level, logger, message, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _PLAIN and name not in line:
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-TRACE_CHARS_MAX:]
        try:
            return _ENCODER.encode(line).decode()
        except (ValueError, TypeError):  # a lone surrogate, or a key that is no text
            return json.dumps(line, default=str)


class _Lines(logging.StreamHandler[TextIO]):
    """Marks a record whose line could not be written as lost, so that callers can count them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class names it so
        record.is_lost = True
        super().handleError(record)


def configure_logs(level: str) -> None:
    """Log everything from `level` on to standard error as JSON, except floods (`FloodFilter`)."""
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(FloodFilter(time.monotonic))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def announce(message: str, **fields: Any) -> None:
    """Write a log line at every level."""
    record = {"name": "persist.cli", "msg": message, "levelname": "INFO", "levelno": logging.INFO, **fields}
    logging.getLogger().handle(logging.makeLogRecord(record))


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` once, in a thread of its own, on SIGTERM or SIGINT. Call it from the main thread.

    The handler itself does not call it: it interrupts the main thread anywhere, also while that holds a lock that
    `stop` needs.
    """
    signals: SimpleQueue[int] = SimpleQueue()  # safe to use in a signal handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.put(number))

    def wait() -> None:
        signals.get()
        stop()

    threading.Thread(target=wait, name="persist-signals", daemon=True).start()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM within the block, as SIGINT does, so that partial work is cleaned up.

    Use it in the main thread.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when `parent`, which started it, has exited, and SIGKILL GRACE_S seconds later.

    Commands call it before they open stores. Raises InvalidUsage if the parent has exited already.
    """
    if os.getppid() != parent:
        raise InvalidUsage(f"process {parent}, which started this one, has exited")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="persist-parent", daemon=True).start()
