"""Publishes what one process has committed: the entries of all shards in one blob, every few seconds at most.

Nothing waits for it. What it drops or loses, `publication_keeper` publishes from the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from blob import Blob, BlobError
from persist.commit.location_identity import Identity
from persist.commit.system import Clock
from persist.core.blob_keys import Journal, ShardEntries, journal_key
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import IdSource
from persist.formats.state_frames import encode_journal

log = logging.getLogger("persist.publications")

QUEUE_ENTRIES_MAX = 50_000  # that wait to be published; what comes on top is left to maintenance
QUEUE_BYTES_MAX = 16 * 1024 * 1024
FAILED_TRIES_MAX = 3  # of one journal; then it is left to maintenance
EVERY_S_MIN = 0.1
EVERY_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """`every_s`: a process publishes at most so often. `beat_s`: how often maintenance says that it is at work.

    `keep_s`: for so long a journal is kept after all in it is in a rollup.
    """

    every_s: float = 5.0
    beat_s: float = 60.0
    keep_s: float = 300.0

    @property
    def within_s(self) -> float:
        """In so many seconds after a commit it is published, or left to maintenance. But for a process that sleeps."""
        return self.every_s * (FAILED_TRIES_MAX + 1)

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        for name in ("every_s", "beat_s", "keep_s"):
            if not EVERY_S_MIN <= getattr(self, name) <= EVERY_S_MAX:
                raise InvalidUsage(f"{name} of publications is between {EVERY_S_MIN} and {EVERY_S_MAX:.0f} seconds")

    def publisher(
        self, blob: Blob, identity: Identity, clock: Clock, ids: IdSource, *, threaded: bool = False
    ) -> Publisher:
        """A publisher of one process. Raises InvalidUsage as `check` does."""
        return Publisher(blob, identity, clock, ids, self, threaded=threaded)


class Publisher:
    """Publishes for one process. Thread-safe. `threaded`: by a thread of its own; else somebody calls `publish`."""

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
        self._next_s = 0.0  # not before it is anything put
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False
        self.dropped = 0
        self.published = 0

    def add(self, name: str, entry: bytes) -> None:
        """This entry of the shard is durably in the log. Never blocks, and calls no store."""
        with self._lock:
            if not self._queued(name, (), [entry]) or not self._threaded or self._thread is not None or self._closed:
                return
            self._next_s = max(self._next_s, self._clock.monotonic() + self.settings.every_s)
            self._thread = threading.Thread(target=self._run, name="persist-publish", daemon=True)
            self._thread.start()

    def _queued(self, name: str, earlier: Sequence[bytes], later: Sequence[bytes] = ()) -> bool:
        """Queue entries, under the lock, before and after those of the shard that are queued, if they fit."""
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
        """Put what is queued if the interval is over (`now`: in any case); the key of the journal.

        None: there was nothing to do. Raises what the blob store raises, and InvalidUsage where this process may only
        read; what was queued stays so for a few tries.
        """
        with self._publishing:
            with self._lock:
                at_s = self._clock.monotonic()
                if not self._queue or (at_s < self._next_s and not now):
                    return None
                queue, self._queue, self._entries, self._bytes = self._queue, {}, 0, 0
                self._next_s = at_s + self.settings.every_s
            try:
                key = self.put({name: tuple(entries) for name, entries in queue.items()})
            except (PersistError, BlobError):
                self._tries += 1
                with self._lock:
                    if self._tries < FAILED_TRIES_MAX:
                        for name, entries in queue.items():  # before what has come since: a journal has the log's order
                            self._queued(name, entries)
                    else:
                        self._tries = 0
                        self.dropped += sum(map(len, queue.values()))
                raise
            self._tries = 0
            return key

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be published."""
        return not self._queue

    def put(self, entries: dict[str, tuple[bytes, ...]]) -> str:
        """Put these entries at once; the key of the journal. Raises as `publish`."""
        self._identity.confirm()  # so a process that commits sees a later epoch within an interval, and stops
        epoch = self._identity.check().epoch
        shards = tuple(ShardEntries(name, found) for name, found in sorted(entries.items()))
        with self._lock:
            self._number += 1
            key = journal_key(self.process, self._number)
        self._blob.put(key, encode_journal(Journal(epoch, self._clock.now_ms(), shards)))
        self.published += sum(len(found) for found in entries.values())
        return key

    def _run(self) -> None:
        """Publish what is queued, until nothing is left for an interval."""
        while True:
            self._wake.wait(max(0.0, self._next_s - self._clock.monotonic()))
            with self._lock:
                if self._closed or (not self._queue and self._clock.monotonic() >= self._next_s):
                    self._thread = None  # the next entry starts another one
                    return
            self._publish_quietly()

    def _publish_quietly(self, *, now: bool = False) -> None:
        try:
            self.publish(now=now)
        except (PersistError, BlobError) as error:
            log.warning("nothing was published: maintenance will: %s", error)
        except Exception:  # a bug: no commit may suffer from it
            log.exception("publishing failed")

    def close(self) -> None:
        """Publish what is queued, as far as the store takes it."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._wake.set()
        if thread is not None:
            thread.join()
        self._publish_quietly(now=True)
