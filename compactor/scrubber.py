"""The daily check of a sample of the parts: it reports damage before a reader finds it, and repairs nothing.

The number of the day selects the sample, so that all parts are read once in a fixed number of days, by any process and
without stored progress. Logs, States and the existence of blobs are checked every day. One thread reads at a bounded
rate and pauses after each shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from compactor.loop import BackgroundThread
from compactor.metering import MaintenanceMetrics
from persist.commit.location import Location
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.copies.verify import SAMPLES_MAX, Depth, Sample, samples_of, verify_shards
from persist.core.errors import InvalidUsage, PersistError

log = logging.getLogger("persist.verify")

DAY_S = 86_400.0
DAY_MS = 86_400_000
RETRY_S = 600.0  # after a run in which the shards could not be listed
POLL_S = 5.0  # how often the thread checks whether a run is due
FIRST_AFTER_S = 600.0  # the delay of the first run after the start of the process
PAUSE_S = 0.1  # after each shard
SAMPLES = 100  # all samples together contain every part
STOP_S = 5.0  # how long the end of a process waits for an active read


def samples_per_day(text: str) -> int | None:
    """The number of samples of this share that contain every part; None for `0`: no samples. Raises InvalidUsage."""
    return None if text.strip() == "0" else samples_of(text)


def check_sample(of: int, rate: int) -> None:
    """Raise InvalidUsage if a number is out of range."""
    check_rate(rate)
    if not 1 <= of <= SAMPLES_MAX:
        raise InvalidUsage(f"a sample is one of {of}; it must be one of 1 to {SAMPLES_MAX}")


class Scrubber(BackgroundThread):
    """A thread that checks one of `of` samples once a day. `names` lists the shards that it checks.

    `rate`: bytes per second. Raises InvalidUsage if a number is out of range.
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
        super().__init__("persist-verify", POLL_S, log)
        self._location = location
        self._of = of
        self._metrics = metrics
        self._names = names
        self._due_s = location.clock.monotonic() + first_after_s
        self._blob = PacedBlob(
            location.blob, rate, location.clock, self._stop, lambda size: metrics.add(verify_bytes=size)
        )

    def stop(self, timeout_s: float | None = STOP_S) -> None:
        super().stop(timeout_s)

    def once(self) -> bool:
        """Check a sample if one is due. Errors are logged. Whether one was due."""
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
        if checked[False] and not checked[True]:  # the store does not answer: retry soon
            self._due_s = now_s + RETRY_S
            return True
        self._metrics.add(verify_runs=1)
        if not checked[False]:  # the sample is complete
            self._metrics.verified_ms = self._location.clock.now_ms()
        return True

    def _check(self, name: str, depth: Depth) -> bool:
        """Check one shard. An error is logged and does not stop the run. Whether it succeeded."""
        try:
            for report in verify_shards(self._location, [name], depth, self._blob):
                self._metrics.add(verify_findings=len(report.faults))
                for fault in report.faults:
                    fields = {"shard": name, "kind": str(fault.kind), "key": fault.key, "reason": fault.what}
                    log.error("verify found damage", extra=fields)
        except PersistError as error:
            if not self._stop.is_set():
                extra = {"shard": name, "kind": error.kind, "reason": str(error)}
                log.warning("a shard could not be verified", extra=extra)
            return False
        return True
