"""What long-running commands share: JSON logs bounded in rate, signals, and shutdown."""

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

# A bound on log lines, so that a flood of errors does not fill a disk.


WINDOW_S = 60.0
LINES_MAX = 100  # of one trouble (who says what, of which shard, and which kind of error) in a window
ALL_LINES_MAX = 5_000  # of all troubles together in a window; the first line of one that is damaged passes all the same
TROUBLES_MAX = 2_000  # that are remembered; the oldest go first
UNBOUNDED = ("persist.access", "persist.audit")  # a line for each request, of which none may be missing
DAMAGE = "corruption"


@dataclass(slots=True)
class _Trouble:
    began_s: float
    lines: int = 0
    left_out: int = 0


class FloodFilter(logging.Filter):
    """Drops lines beyond the bounds. The next line of the same trouble says how many were `left_out`.

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
            for one in (trouble, self._all):
                if now_s - one.began_s >= WINDOW_S:
                    one.began_s, one.lines = now_s, 0
            is_first = trouble.lines == 0 and kind == DAMAGE
            if trouble.lines >= LINES_MAX or (self._all.lines >= ALL_LINES_MAX and not is_first):
                trouble.left_out += 1 + int(getattr(record, "left_out", 0))
                return False
            trouble.lines += 1
            self._all.lines += 1
            if trouble.left_out:  # beside those for which the line itself stands, as one of a storm does
                record.left_out = int(getattr(record, "left_out", 0)) + trouble.left_out
                trouble.left_out = 0
        return True


# What commands that run for long share: log lines as JSON on standard error, and how they are told to end.


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


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when `parent`, which started it, is gone, and SIGKILL GRACE_S seconds later.

    Commands call it before they open stores. Raises InvalidUsage if the parent is gone now.
    """
    if os.getppid() != parent:
        raise InvalidUsage(f"process {parent}, which started this one, is gone")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="persist-parent", daemon=True).start()
