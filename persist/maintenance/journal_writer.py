"""Publishes the commits of one process: the log entries of all shards in one blob, every few seconds at most.

Nothing waits for it. `journal_keeper` publishes dropped and lost entries from the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from blob import Blob, BlobError
from persist.commit.clocks_and_ids import Clock
from persist.commit.location_identity import Identity
from persist.core.blob_keys import Journal, ShardEntries, journal_key
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import IdSource
from persist.formats.state_frames import encode_journal

log = logging.getLogger("persist.publications")

QUEUE_ENTRIES_MAX = 50_000  # entries that wait to be published; further ones are left to maintenance
QUEUE_BYTES_MAX = 16 * 1024 * 1024
FAILED_TRIES_MAX = 3  # of one journal; then its entries are left to maintenance
EVERY_S_MIN = 0.1
EVERY_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """`every_s`: the least interval of a process's publications."""

    every_s: float = 5.0

    @property
    def within_s(self) -> float:
        """Seconds after a commit until it is published or left to maintenance, unless the process is suspended."""
        return self.every_s * (FAILED_TRIES_MAX + 1)

    def check(self) -> None:
        """Raises InvalidUsage if `every_s` is out of range."""
        if not EVERY_S_MIN <= self.every_s <= EVERY_S_MAX:
            raise InvalidUsage(f"every_s of publications is between {EVERY_S_MIN} and {EVERY_S_MAX:.0f} seconds")

    def publisher(
        self, blob: Blob, identity: Identity, clock: Clock, ids: IdSource, *, threaded: bool = False
    ) -> Publisher:
        """A publisher of one process. Raises InvalidUsage as `check` does."""
        return Publisher(blob, identity, clock, ids, self, threaded=threaded)


class Publisher:
    """Publishes for one process. Thread-safe. `threaded`: on a thread of its own; else the owner calls `publish`."""

    def __init__(
        self,
        blob: Blob,
        identity: Identity,
        clock: Clock,
        ids: IdSource,
        settings: PublishSettings,
        *,
        threaded: bool = False,
    ) -> None:
        settings.check()
        self._blob = blob
        self._identity = identity
        self._clock = clock
        self.process = ids.uuid7()
        self.settings = settings
        self._threaded = threaded
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._queue: dict[str, list[bytes]] = {}
        self._entries = 0
        self._bytes = 0
        self._number = 0
        self._tries = 0
        self._next_s = 0.0  # nothing is published before this
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False
        self.dropped = 0
        self.published = 0

    def add(self, name: str, entry: bytes) -> None:
        """Queue an entry that is durably in the log of the shard. Never blocks, and calls no store."""
        with self._lock:
            if not self._enqueue(name, (), [entry]) or not self._threaded or self._thread is not None or self._closed:
                return
            self._next_s = max(self._next_s, self._clock.monotonic() + self.settings.every_s)
            self._thread = threading.Thread(target=self._run, name="persist-publish", daemon=True)
            self._thread.start()

    def _enqueue(self, name: str, earlier: Sequence[bytes], later: Sequence[bytes] = ()) -> bool:
        """Queue entries before and after the queued ones of the shard, if they fit. Call it with the lock."""
        added = (*earlier, *later)
        size = sum(map(len, added))
        if self._entries + len(added) > QUEUE_ENTRIES_MAX or self._bytes + size > QUEUE_BYTES_MAX:
            self.dropped += len(added)
            return False
        queue = self._queue.setdefault(name, [])
        queue[:0] = earlier
        queue.extend(later)
        self._entries += len(added)
        self._bytes += size
        return True

    def publish(self, *, now: bool = False) -> str | None:
        """Write the queued entries if the interval is over, or `now`; returns the key of the journal.

        None: there was nothing to do. Raises the errors of the blob store, and InvalidUsage in a read-only process; the
        entries stay queued for a few tries.
        """
        with self._publishing:
            with self._lock:
                now_s = self._clock.monotonic()
                if not self._queue or (now_s < self._next_s and not now):
                    return None
                queue, self._queue, self._entries, self._bytes = self._queue, {}, 0, 0
                self._next_s = now_s + self.settings.every_s
            try:
                key = self.put({name: tuple(entries) for name, entries in queue.items()})
            except (PersistError, BlobError):
                self._tries += 1
                with self._lock:
                    if self._tries < FAILED_TRIES_MAX:
                        for name, entries in queue.items():  # before newer ones: a journal has the order of the log
                            self._enqueue(name, entries)
                    else:
                        self._tries = 0
                        self.dropped += sum(map(len, queue.values()))
                raise
            self._tries = 0
            return key

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def put(self, entries: dict[str, tuple[bytes, ...]]) -> str:
        """Write these entries now; returns the key of the journal. Raises as `publish`."""
        self._identity.confirm()  # so a committing process notices a later epoch within an interval, and stops
        epoch = self._identity.check().epoch
        shards = tuple(ShardEntries(name, of_shard) for name, of_shard in sorted(entries.items()))
        with self._lock:
            self._number += 1
            key = journal_key(self.process, self._number)
        self._blob.put(key, encode_journal(Journal(epoch, self._clock.now_ms(), shards)))
        self.published += sum(map(len, entries.values()))
        return key

    def _run(self) -> None:
        """Publish queued entries until the queue stays empty for an interval."""
        while True:
            self._wake.wait(max(0.0, self._next_s - self._clock.monotonic()))
            with self._lock:
                if self._closed or (not self._queue and self._clock.monotonic() >= self._next_s):
                    self._thread = None  # the next entry starts a new thread
                    return
            self._publish_quietly()

    def _publish_quietly(self, *, now: bool = False) -> None:
        try:
            self.publish(now=now)
        except (PersistError, BlobError) as error:
            log.warning("publishing failed, so maintenance will publish: %s", error)
        except Exception:  # a bug, which must not affect commits
            log.exception("publishing failed")

    def close(self) -> None:
        """Publish the queued entries, ignoring errors of the stores."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._wake.set()
        if thread is not None:
            thread.join()
        self._publish_quietly(now=True)
