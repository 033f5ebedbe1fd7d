"""Logs in the memory of this process, for tests and examples. They are lost when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from consensus.interface import (
    ENDED,
    HIDDEN,
    Consensus,
    ConsensusUsage,
    Entry,
    Wanted,
    check_append,
    check_key,
    check_listing,
    check_scan,
    check_seqno,
)
from consensus.notify import Notifier

VALUE_BYTES_MAX = 16 * 2**20  # longest value: the same as in the SQL stores, so that tests use the same limit


class MemoryConsensus(Consensus):
    """A dictionary of logs."""

    def __init__(self, name: str = "", *, value_bytes_max: int = VALUE_BYTES_MAX) -> None:
        self._name = name
        self._value_bytes_max = value_bytes_max
        self._lock = threading.Lock()
        self._logs: dict[str, dict[int, bytes]] = {}
        self._heads: dict[str, int] = {}
        self._notifier = Notifier("consensus-memory")

    @property
    def url(self) -> str:
        return f"mem:{self._name}"

    @property
    def value_bytes_max(self) -> int:
        return self._value_bytes_max

    def head(self, key: str) -> Entry | None:
        check_key(key)
        with self._lock:
            seqno = self._heads.get(key, 0)
            return Entry(seqno, self._logs[key][seqno]) if seqno else None

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        check_append(key, seqno, data, self._value_bytes_max)
        value = bytes(data)
        with self._lock:
            if self._heads.get(key, 0) != seqno - 1:
                return False
            if after and not self._logs[key][seqno - 1].startswith(after):
                return False
            self._logs.setdefault(key, {})[seqno] = value
            self._heads[key] = seqno
        self._notifier.publish((key,))
        return True

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        check_append(key, seqno, data, self._value_bytes_max)
        value = bytes(data)
        with self._lock:
            if key in self._heads:
                return False
            self._logs[key] = {seqno: value}
            self._heads[key] = seqno
        self._notifier.publish((key,))
        return True

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        check_scan(key, from_seqno, limit)
        with self._lock:
            head = self._heads.get(key, 0)
            log = self._logs.get(key, {})
            first = max(from_seqno, head - len(log) + 1)
            return [Entry(seqno, log[seqno]) for seqno in range(first, min(head, first + limit - 1) + 1)]

    def truncate(self, key: str, seqno: int) -> int:
        check_key(key)
        check_seqno(seqno)
        with self._lock:
            head = self._heads.get(key, 0)
            if seqno > head:
                raise ConsensusUsage(f"cannot truncate {key} to seqno {seqno}: its head is {head}")
            log = self._logs[key]
            deleted = [live for live in log if live < seqno]
            for live in deleted:
                del log[live]
            return len(deleted)

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        check_listing(prefix, after, limit)
        with self._lock:
            keys = [key for key in self._heads if key.startswith(prefix) and after < key < HIDDEN]
            if not with_ended:
                keys = [key for key in keys if not self._logs[key][self._heads[key]].startswith(ENDED)]
        return sorted(keys)[:limit]

    def check(self) -> None:
        """Always succeeds."""

    def close(self) -> None:
        """Keeps the logs: another user of the same `mem:name` may still need them."""

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return self._notifier.subscribe(callback, wanted)
