"""Inline rows leave the State while the server works, so that small writes keep having room there.

Rows inside the State make a small append one compare-and-set; there is room for 1 MiB a shard. Maintenance moves them
out now and then, which is not soon enough for a busy shard: then each commit would have to write its own blob. So
the server merges them into one part as soon as they take a quarter of the room. Losing a flush is safe: maintenance
does it then.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from persist.errors import PersistError
from persist.flushing import flushed
from persist.location import Location
from persist.machine import Machine

ROOM_PART = 4  # a flush begins when inline rows take this part of their room
THREADS = 2
_log = logging.getLogger("persist.rpc")


class InlineFlusher:
    """Flushes shards in the background, each at most once at a time. Thread-safe."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="persist-flush")
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self.flushes = 0

    def consider(self, machine: Machine) -> None:
        """Begin a flush if the shard's inline rows take much of their room. Never blocks."""
        state = machine.cached
        if state is None or state.trace.inline_bytes * ROOM_PART < machine.policy.inline_shard_bytes_max:
            return
        with self._lock:
            if machine.name in self._busy:
                return
            self._busy.add(machine.name)
        try:
            self._pool.submit(self._run, machine)
        except RuntimeError:  # closing
            self._busy.discard(machine.name)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, machine: Machine) -> None:
        try:
            state = machine.state()
            command = flushed(state, self._location.blob, self._location.ids)
            if command is not None:
                machine.apply(command)
                self.flushes += 1
        except PersistError as error:
            _log.warning("inline rows of shard %s were not flushed: %s", machine.name, error)
        except Exception:
            _log.exception("flushing the inline rows of shard %s failed", machine.name)
        finally:
            self._busy.discard(machine.name)


__all__ = ["InlineFlusher"]
