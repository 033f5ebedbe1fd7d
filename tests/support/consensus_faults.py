"""Faults on purpose, from one seed, for consensus stores. The plan and its kinds are those of `blob_faults`.

fail_before    ConsensusUnavailable, nothing happened
fail_after     ConsensusIndeterminate, although it happened
fail_unknown   ConsensusIndeterminate, and it did not happen
delay          the call takes longer
truncate, flip an entry read comes back damaged
drop_push      a subscriber is not told
"""

from __future__ import annotations

from collections.abc import Callable

from consensus.interface import Consensus, ConsensusIndeterminate, ConsensusUnavailable, Entry, Wanted
from consensus.metrics import ForwardingConsensus
from tests.support.blob_faults import FaultPlan


class FaultyConsensus(ForwardingConsensus):
    """`inner`, with the faults of `plan`."""

    def __init__(self, inner: Consensus, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan

    def head(self, key: str) -> Entry | None:
        self._before("head")
        found = self._inner.head(key)
        return None if found is None else Entry(found.seqno, self._plan.damage(found.data))

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        self._before_write("compare_and_set")
        won = self._inner.compare_and_set(key, seqno, data, after)
        self._after_write("compare_and_set")
        return won

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        self._before_write("begin")
        won = self._inner.begin(key, seqno, data)
        self._after_write("begin")
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        self._before("scan")
        found = self._inner.scan(key, from_seqno, limit)
        return [Entry(entry.seqno, self._plan.damage(entry.data)) for entry in found]

    def truncate(self, key: str, seqno: int) -> int:
        self._before_write("truncate")
        deleted = self._inner.truncate(key, seqno)
        self._after_write("truncate")
        return deleted

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        self._before("keys")
        return self._inner.keys(prefix, after, limit, with_ended)

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        def perhaps(key: str) -> None:
            if not self._plan.strikes("drop_push"):
                callback(key)

        return self._inner.subscribe(perhaps, wanted)

    def _before(self, operation: str) -> None:
        self._plan.delay()
        if self._plan.strikes("fail_before"):
            raise ConsensusUnavailable(f"injected fault: {operation} failed before anything happened")

    def _before_write(self, operation: str) -> None:
        self._before(operation)
        if self._plan.strikes("fail_unknown"):
            raise ConsensusIndeterminate(f"injected fault: nobody knows whether {operation} happened (it did not)")

    def _after_write(self, operation: str) -> None:
        if self._plan.strikes("fail_after"):
            raise ConsensusIndeterminate(f"injected fault: nobody knows whether {operation} happened (it did)")
