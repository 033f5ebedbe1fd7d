"""Faults on purpose, from one seed: what a store, a network or a disk may do at the worst moment.

    fail_before   the call fails, nothing happened
    fail_after    the call fails, although it happened
    delay         the call takes `delay_s` longer
    truncate      a read returns too few bytes
    flip          a read returns one wrong bit

`fail_*` and `delay` concern every operation, `truncate` and `flip` only what reads return: what is stored
stays whole, so a later read may succeed. One plan may drive several stores; then one seed makes one run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from blob.errors import BlobMisconfigured, BlobUnavailable
from blob.interface import Blob, BlobStat
from blob.metrics import ForwardingBlob

FAULT_KINDS = ("fail_before", "fail_after", "fail_unknown", "delay", "truncate", "flip", "drop_push")
"""Every kind of fault. `fail_unknown` and `drop_push` mean something to consensus stores only."""


class FaultPlan:
    """Decides, call by call, which faults strike. Thread-safe; the same seed and calls give the same faults.

    `rates` maps kinds of FAULT_KINDS to probabilities in [0, 1]. `counts` says how often each kind struck,
    so that a test can show that its faults did happen.
    """

    def __init__(
        self,
        seed: int,
        rates: Mapping[str, float],
        *,
        delay_s: float = 0.01,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for kind, rate in rates.items():
            if kind not in FAULT_KINDS or not 0.0 <= rate <= 1.0:
                raise BlobMisconfigured(f"fault {kind}={rate}: know {', '.join(FAULT_KINDS)}, each in [0, 1]")
        self._random = random.Random(seed)
        self._rates = dict(rates)
        self._lock = threading.Lock()
        self._delay_s = delay_s
        self._sleep = sleep
        self._healed = False
        self.counts: Counter[str] = Counter()

    def heal(self) -> None:
        """No more faults from now on."""
        self._healed = True

    def resume(self) -> None:
        """Faults again."""
        self._healed = False

    def strikes(self, kind: str) -> bool:
        """Whether `kind` strikes this time."""
        rate = self._rates.get(kind, 0.0)
        if rate <= 0.0 or self._healed:
            return False
        with self._lock:
            struck = self._random.random() < rate
            if struck:
                self.counts[kind] += 1
        return struck

    def delay(self) -> None:
        """Sleep, if a delay strikes."""
        if self.strikes("delay"):
            self._sleep(self._delay_s)

    def damage(self, data: bytes) -> bytes:
        """`data`, or too little of it, or with one bit flipped."""
        if data and self.strikes("truncate"):
            with self._lock:
                return data[: self._random.randrange(len(data))]
        if data and self.strikes("flip"):
            with self._lock:
                at, bit = self._random.randrange(len(data)), self._random.randrange(8)
            return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        return data


class FaultyBlob(ForwardingBlob):
    """`inner`, with the faults of `plan`."""

    def __init__(self, inner: Blob, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._before("put")
        self._inner.put(key, data)
        self._after("put")

    def get(self, key: str) -> bytes:
        self._before("get")
        return self._plan.damage(self._inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._before("get_range")
        return self._plan.damage(self._inner.get_range(key, start, length))

    def stat(self, key: str) -> BlobStat | None:
        self._before("stat")
        return self._inner.stat(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._before("delete")
        self._inner.delete(keys)
        self._after("delete")

    def list(self, prefix: str) -> Iterator[BlobStat]:
        self._before("list")
        return self._inner.list(prefix)

    def _before(self, operation: str) -> None:
        self._plan.delay()
        if self._plan.strikes("fail_before"):
            raise BlobUnavailable(f"injected fault: {operation} failed before anything happened")

    def _after(self, operation: str) -> None:
        if self._plan.strikes("fail_after"):
            raise BlobUnavailable(f"injected fault: {operation} failed after it happened")
