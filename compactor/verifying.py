"""A look at a sample of what is there, once a day: damage is told before somebody reads it. Nothing is repaired.

Each day takes the next sample of the parts, by the number of the day: so all of them are looked at once in so many
days, whoever looks, and nothing is remembered. Logs, States and the presence of blobs are looked at every day. One
thread reads, at a bounded rate, and rests after each shard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blob import Blob
from blob.forwarding import ForwardingBlob
from compactor.metering import Metrics
from persist.commit.location import Location
from persist.copies.pace import EndingBlob, EndingClock, PacedBlob, check_rate
from persist.copies.sampling import OF_MAX, Sample, number_of_day, samples_of
from persist.copies.verify import How, verified
from persist.core.errors import InvalidUsage, PersistError

log = logging.getLogger("persist.verify")

DAY_S = 86_400.0
MIB = 1024 * 1024
AGAIN_S = 600.0  # after a run in which the shards could not be listed
LOOK_S = 5.0  # how often it is looked whether a run is due
STOP_S = 5.0  # how long the end of a process waits for a read under way


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """`of`: samples that together are everything. `rate`: bytes a second. A process begins after `first_after_s`."""

    of: int = 100
    rate: int = 8 * MIB
    every_s: float = DAY_S
    first_after_s: float = 600.0
    pause_s: float = 0.1  # after each shard

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        check_rate(self.rate)
        if not 1 <= self.of <= OF_MAX:
            raise InvalidUsage(f"a sample is one of {self.of}; it must be one of 1 to {OF_MAX}")


def samples_asked(text: str) -> int | None:
    """How many samples of this share are everything; None: `0` switches samples off. Raises InvalidUsage."""
    return None if text.strip() == "0" else samples_of(text)


class Verifier:
    """A thread that takes a sample once a day. `names` are the shards that it looks at."""

    def __init__(
        self, location: Location, settings: VerifySettings, metrics: Metrics, names: Callable[[], Iterable[str]]
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
        sample = Sample(number_of_day(self._location.clock.now_ms()), self._settings.of)
        looked = {True: 0, False: 0}
        try:
            for name in self._names():
                looked[self._look_at(name, How(sample=sample, threads=1))] += 1
                if self._stop.wait(self._settings.pause_s):
                    return True
        except PersistError as error:
            self._due_s = now_s + AGAIN_S
            log.warning("the shards cannot be listed to be verified", extra={"reason": str(error)})
            return True
        if looked[False] and not looked[True]:  # the store is away: it comes again soon
            self._due_s = now_s + AGAIN_S
            return True
        self._metrics.add(verify_runs=1)
        if not looked[False]:  # else not all of it was looked at
            self._metrics.verified_ms = self._location.clock.now_ms()
        return True

    def _look_at(self, name: str, how: How) -> bool:
        """One shard. What stands in the way is logged, and the others are looked at all the same. Whether it was."""
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
        while not self._stop.wait(LOOK_S):
            try:
                self.once()
            except Exception:  # a bug, or a store that is closed already: maintenance goes on
                if not self._stop.is_set():
                    log.exception("a sample could not be verified")


class _Counted(ForwardingBlob):
    """The blob store as a sample reads it: its bytes are counted."""

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
