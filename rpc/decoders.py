"""Parquet bodies are decoded in processes of their own, whose memory is bounded: a few, started when they are needed.

Why no bound can be had here is told in `rpc.decoder_process`. A process that takes too much memory, or too long, is
ended, and the next body gets a new one.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from persist.codecs.allowance import Allowance, BodyTooLarge
from persist.core.errors import Overloaded
from rpc.concurrency_limits import CALLER, RETRY_AFTER_S, SharedSlots, share
from rpc.decoder_process import DONE, FRAME_BYTES_MAX, HEAD, LENGTH, REFUSED, ROWS, TOO_LARGE
from rpc.settings import Limits

DECODE_S_MAX = 30.0  # longest time that a process takes for one body
DECODES_QUEUED_MAX = 8  # Parquet bodies that wait for a process


class Decoders:
    """A pool of decoder processes. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        most = limits.decoders_max + DECODES_QUEUED_MAX
        self._waiting = SharedSlots(most, "many Parquet bodies to decode", share(most))
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._busy: Counter[str] = Counter()  # processes that work, by caller
        self._idle: list[_Process] = []
        self._closed = False

    def rows(self, data: bytes, allowed: Allowance) -> pa.Table:
        """The rows of a Parquet file, of which the Arrow stream is counted as it comes.

        Raises ValueError where there is no such file, BodyTooLarge where it takes too much, Overloaded.
        """
        with self._taken() as process:
            stream = io.BytesIO()
            for frame in process.frames(data):
                allowed.spend(len(frame))
                stream.write(frame)
        return pa.ipc.open_stream(pa.py_buffer(stream.getbuffer())).read_all()

    def close(self) -> None:
        """End the processes that are idle. Those at work end with their bodies."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.end()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            is_kept = not self._closed and process.is_good and len(self._idle) < self._limits.decoders_max
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()

    @contextmanager
    def _taken(self) -> Iterator[_Process]:
        with self._waiting:
            caller = CALLER.get()
            with self._freed:
                end_s = time.monotonic() + DECODE_S_MAX
                while not self._takes(caller):
                    left_s = end_s - time.monotonic()
                    if left_s <= 0:
                        text = "the server decodes many Parquet bodies; slow down"
                        raise Overloaded(text, retry_after_s=RETRY_AFTER_S)
                    self._freed.wait(left_s)
            process = None
            try:
                with self._lock:
                    process = self._idle.pop() if self._idle else None
                if process is not None and not process.is_alive:
                    process.end()
                    process = None
                process = process or _Process(self._limits)
                yield process
            finally:
                if process is not None:
                    self._give_back(process)
                with self._freed:
                    self._busy[caller] -= 1
                    self._busy += Counter()  # drops those who have none
                    self._freed.notify_all()

    def _takes(self, caller: str) -> bool:
        """Take a process for this caller, unless none is free, or it has its share of them."""
        most = self._limits.decoders_max
        has_enough = bool(caller) and self._busy[caller] >= share(most)
        if has_enough or self._busy.total() >= most:
            return False
        self._busy[caller] += 1
        return True


class _Process:
    """One decoder process, used by one thread at a time. It is good as long as every answer came to its end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_good = True
        command = [sys.executable, "-m", "rpc.decoder_process", str(limits.decoder_memory_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def frames(self, data: bytes) -> Iterator[bytes]:
        """Ask for the rows of a file: pieces of one Arrow stream. Raises ValueError, BodyTooLarge."""
        self.is_good = False
        end_s = time.monotonic() + DECODE_S_MAX
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer, or none, tells
            self._send(LENGTH.pack(len(data)), end_s)
            self._send(data, end_s)
        while True:
            kind, length = HEAD.unpack(self._read(HEAD.size, end_s))
            found = self._read(min(length, FRAME_BYTES_MAX), end_s)
            if kind == ROWS:
                yield found
                continue
            if kind == TOO_LARGE:
                raise self._too_large()
            self.is_good = True
            if kind == REFUSED:
                raise ValueError(found.decode(errors="replace"))
            assert kind == DONE
            return

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes, end_s: float) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._in, select.POLLOUT, end_s)
            left = left[os.write(self._in, left) :]

    def _read(self, count: int, end_s: float) -> bytes:
        found = io.BytesIO()
        while found.tell() < count:
            self._wait(self._out, select.POLLIN, end_s)
            piece = os.read(self._out, count - found.tell())
            if not piece:  # it has ended: out of memory, in a place where that cannot be told
                raise self._too_large()
            found.write(piece)
        return found.getvalue()

    def _wait(self, pipe: int, event: int, end_s: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            raise BodyTooLarge(
                f"the Parquet file takes more than {DECODE_S_MAX:g} seconds to decode; send less at once",
                bytes_max=self._limits.decoded_bytes_max,
            )

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the Parquet file takes more than {self._limits.decoder_memory_bytes} bytes of memory to decode; write "
            "smaller pages and row groups, or send fewer rows at once",
            bytes_max=self._limits.decoded_bytes_max,
        )
