"""The daily check of a sample of the parts: it reports damage before a reader meets it, and repairs nothing.

Each day takes the next sample, by the number of the day, so that all parts are read once in so many days, whichever
process checks them, and no progress is stored. Logs, States and the presence of blobs are checked every day. One
thread reads, at a bounded rate, and pauses after each shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blob import Blob
from blob.metrics import ForwardingBlob
from compactor.metering import Metrics
from persist.commit.location import Location
from persist.copies.throttled_blob import EndingBlob, EndingClock, PacedBlob, check_rate
from persist.copies.verify import SAMPLES_MAX, How, Sample, samples_of, verified
from persist.core.errors import InvalidUsage, PersistError

log = logging.getLogger("persist.verify")

DAY_S = 86_400.0
DAY_MS = 86_400_000
MIB = 1024 * 1024
RETRY_S = 600.0  # after a run in which the shards could not be listed
POLL_S = 5.0  # how often the thread checks whether a run is due
STOP_S = 5.0  # how long the end of a process waits for a read under way


@dataclass(frozen=True, slots=True)
class ScrubSettings:
    """`of`: samples that together are everything. `rate`: bytes a second. A process begins after `first_after_s`."""

    of: int = 100
    rate: int = 8 * MIB
    every_s: float = DAY_S
    first_after_s: float = 600.0
    pause_s: float = 0.1  # after each shard

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        check_rate(self.rate)
        if not 1 <= self.of <= SAMPLES_MAX:
            raise InvalidUsage(f"a sample is one of {self.of}; it must be one of 1 to {SAMPLES_MAX}")


def samples_per_day(text: str) -> int | None:
    """How many samples of this share are everything; None: `0` switches samples off. Raises InvalidUsage."""
    return None if text.strip() == "0" else samples_of(text)


class Scrubber:
    """A thread that checks a sample once a day. `names` lists the shards that it checks."""

    def __init__(
        self, location: Location, settings: ScrubSettings, metrics: Metrics, names: Callable[[], Iterable[str]]
    ) -> None:
        settings.check()
        self._location = location
        self._settings = settings
        self._metrics = metrics
        self._names = names
        self._stop = threading.Event()
        self._due_s = location.clock.monotonic() + settings.first_after_s
        self._thread = threading.Thread(target=self._run, name="persist-verify", daemon=True)
        read = EndingBlob(_Counted(location.blob, metrics), self._stop)
        self._blob = PacedBlob(read, settings.rate, EndingClock(location.clock, self._stop))

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
        self._due_s = now_s + self._settings.every_s
        sample = Sample(self._location.clock.now_ms() // DAY_MS, self._settings.of)
        checked = {True: 0, False: 0}
        try:
            for name in self._names():
                checked[self._check(name, How(sample=sample, threads=1))] += 1
                if self._stop.wait(self._settings.pause_s):
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

    def _check(self, name: str, how: How) -> bool:
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

    def __init__(self, inner: Blob, metrics: Metrics) -> None:
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
