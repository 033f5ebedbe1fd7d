"""The daily check of a sample of the parts: it reports damage before a reader meets it, and repairs nothing.

Each day takes the next sample, by the number of the day, so that all parts are read once in so many days, whichever
process checks them, and no progress is stored. Logs, States and the presence of blobs are checked every day. One
thread reads, at a bounded rate, and pauses after each shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from blob import Blob
from blob.metrics import ForwardingBlob
from compactor.metering import MaintenanceMetrics
from persist.commit.location import Location
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.copies.verify import SAMPLES_MAX, Depth, Sample, samples_of, verified
from persist.core.errors import InvalidUsage, PersistError

log = logging.getLogger("persist.verify")

DAY_S = 86_400.0
DAY_MS = 86_400_000
RETRY_S = 600.0  # after a run in which the shards could not be listed
POLL_S = 5.0  # how often the thread checks whether a run is due
FIRST_AFTER_S = 600.0  # a process begins so long after its start
PAUSE_S = 0.1  # after each shard
SAMPLES = 100  # that together are everything
STOP_S = 5.0  # how long the end of a process waits for a read under way


def samples_per_day(text: str) -> int | None:
    """How many samples of this share are everything; None: `0` switches samples off. Raises InvalidUsage."""
    return None if text.strip() == "0" else samples_of(text)


def check_sample(of: int, rate: int) -> None:
    """Raises InvalidUsage where a number makes no sense."""
    check_rate(rate)
    if not 1 <= of <= SAMPLES_MAX:
        raise InvalidUsage(f"a sample is one of {of}; it must be one of 1 to {SAMPLES_MAX}")


class Scrubber:
    """A thread that checks a sample once a day. `names` lists the shards that it checks.

    `of` samples together are everything. `rate`: bytes a second. Raises InvalidUsage where a number makes no sense.
    """

    def __init__(
        self,
        location: Location,
        metrics: MaintenanceMetrics,
        names: Callable[[], Iterable[str]],
        *,
        of: int,
        rate: int,
        first_after_s: float = FIRST_AFTER_S,
    ) -> None:
        check_sample(of, rate)
        self._location = location
        self._of = of
        self._metrics = metrics
        self._names = names
        self._stop = threading.Event()
        self._due_s = location.clock.monotonic() + first_after_s
        self._thread = threading.Thread(target=self._run, name="persist-verify", daemon=True)
        self._blob = PacedBlob(_Counted(location.blob, metrics), rate, location.clock, self._stop)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the read under way has ended, after `STOP_S` seconds at the latest."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def once(self) -> bool:
        """A run, if it is time. Errors are logged. Whether there was one."""
        now_s = self._location.clock.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + DAY_S
        sample = Sample(self._location.clock.now_ms() // DAY_MS, self._of)
        checked = {True: 0, False: 0}
        try:
            for name in self._names():
                checked[self._check(name, Depth(sample=sample, threads=1))] += 1
                if self._stop.wait(PAUSE_S):
                    return True
        except PersistError as error:
            self._due_s = now_s + RETRY_S
            log.warning("the shards cannot be listed to be verified", extra={"reason": str(error)})
            return True
        if checked[False] and not checked[True]:  # the store does not answer: try again soon
            self._due_s = now_s + RETRY_S
            return True
        self._metrics.add(verify_runs=1)
        if not checked[False]:  # else the sample is not complete
            self._metrics.verified_ms = self._location.clock.now_ms()
        return True

    def _check(self, name: str, how: Depth) -> bool:
        """Check one shard. An error is logged, and the other shards are checked all the same. Whether it succeeded."""
        try:
            for found in verified(self._location, [name], how, self._blob):
                self._metrics.add(verify_findings=len(found.faults))
                for fault in found.faults:
                    fields = {"shard": name, "kind": str(fault.kind), "key": fault.key, "reason": fault.what}
                    log.error("verify found damage", extra=fields)
        except PersistError as error:
            if not self._stop.is_set():
                extra = {"shard": name, "kind": error.kind, "reason": str(error)}
                log.warning("a shard could not be verified", extra=extra)
            return False
        return True

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self.once()
            except Exception:  # a bug, or a store that is closed already: maintenance goes on
                if not self._stop.is_set():
                    log.exception("a sample could not be verified")


class _Counted(ForwardingBlob):
    """The blob store, with the bytes that samples read counted."""

    def __init__(self, inner: Blob, metrics: MaintenanceMetrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self._metrics.add(verify_bytes=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        self._metrics.add(verify_bytes=len(data))
        return data
