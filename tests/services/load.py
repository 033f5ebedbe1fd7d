"""A writer under load while its server is killed: what was acknowledged must be there afterwards."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from consensus import Consensus, ConsensusIndeterminate, ConsensusUnavailable

PAUSE_S = 0.02


@dataclass
class Tally:
    """What happened to the appends of one key, in the order of their seqnos."""

    acknowledged: dict[int, bytes] = field(default_factory=dict)
    unavailable: int = 0
    indeterminate: int = 0


class Load:
    """`threads` writers, each appending to a key of its own until `stop`; doubts are settled by reading."""

    def __init__(self, consensus: Consensus, threads: int = 4) -> None:
        self._consensus = consensus
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.tallies = {f"load/{number}": Tally() for number in range(threads)}
        self._threads = [threading.Thread(target=self._run, args=(key,)) for key in self.tallies]
        for thread in self._threads:
            thread.start()

    @property
    def total(self) -> int:
        return sum(len(tally.acknowledged) for tally in self.tallies.values())

    def wait_for(self, more: int, timeout_s: float = 900.0) -> None:
        """Wait until `more` further appends are acknowledged: the store works (again)."""
        wanted, deadline = self.total + more, time.monotonic() + timeout_s
        while self.total < wanted:
            assert not self._failures, self._failures
            assert time.monotonic() < deadline, f"only {self.total} of {wanted} appends in {timeout_s} s"
            time.sleep(0.01)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def verify(self, reader: Consensus) -> None:
        """Every acknowledged append is in the log, at its seqno, and nothing else is."""
        for key, tally in self.tallies.items():
            log = {entry.seqno: entry.data for entry in reader.scan(key, 0, 10_000)}
            assert log == tally.acknowledged

    def _run(self, key: str) -> None:
        tally, seqno = self.tallies[key], 1
        try:
            while not self._stop.is_set():
                if self._append(tally, key, seqno):
                    seqno += 1
        except BaseException as error:
            self._failures.append(error)

    def _append(self, tally: Tally, key: str, seqno: int) -> bool:
        data = f"{key} {seqno} {tally.indeterminate}".encode()
        try:
            won = self._consensus.compare_and_set(key, seqno, data)
            assert won, f"{key}: nobody else writes here, yet seqno {seqno} was lost"
        except ConsensusUnavailable:
            tally.unavailable += 1
            time.sleep(PAUSE_S)
            return False
        except ConsensusIndeterminate:
            tally.indeterminate += 1
            if not self._landed(key, seqno, data):
                return False
        tally.acknowledged[seqno] = data
        return True

    def _landed(self, key: str, seqno: int, data: bytes) -> bool:
        """Whether an append of unknown fate is there, once nothing of it can be on its way any more."""
        while True:
            try:
                found = self._consensus.scan(key, seqno, 1)
            except ConsensusUnavailable:
                time.sleep(PAUSE_S)
                continue
            return bool(found) and found[0].data == data
