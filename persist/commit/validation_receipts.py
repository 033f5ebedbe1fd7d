"""Receipts: proof that a part was compared with its rows, so that its commit need not read it back.

A receipt is a keyed digest of the shard's id and of the part's metadata. It is issued by a process that wrote the rows
with the code of this package, or that read them back (`persist.commit.part_validator`). The secret is random, one per
location, under a hidden key of the consensus store, which only servers and embedded programs open. A client of a server
requests receipts from the server. If the secret is unavailable, there are no receipts, and parts are read back at the
commit.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Iterable

from consensus import HIDDEN, Consensus, ConsensusError
from persist.core.batch import Part, Run
from persist.core.ids import IdSource, ShardId
from persist.core.record import replace
from persist.formats.records import encoded

LOG_KEY = HIDDEN + "receipts"
KEY_IDS = 4  # of 62 random bits each
KEY_BYTES = 32
RECEIPT_BYTES = 16


class Receipts:
    """Issues and verifies receipts. Thread-safe."""

    def __init__(self, consensus: Consensus, ids: IdSource) -> None:
        self._consensus = consensus
        self._ids = ids
        self._lock = threading.Lock()
        self._secret: bytes | None = None

    def sign(self, shard: ShardId, runs: Iterable[Run]) -> tuple[Run, ...]:
        """The runs with a receipt for each part. Only for callers that have validated the parts."""
        held, key = tuple(runs), self._key()
        if key is None or not held:
            return held
        return tuple(Run(tuple(_signed(key, shard, part) for part in run.parts)) for run in held)

    def is_good(self, shard: ShardId, part: Part) -> bool:
        """Whether the part has a receipt for this shard and its present metadata."""
        if not part.receipt or (key := self._key()) is None:
            return False
        return hmac.compare_digest(part.receipt, _digest(key, shard, part.as_staged()))

    def _key(self) -> bytes | None:
        """The secret of the location, which is created if there is none. None: the store is unavailable."""
        if self._secret is None:
            with self._lock:
                self._secret = self._secret or self._load_secret()
        return self._secret

    def _load_secret(self) -> bytes | None:
        try:
            entry = self._consensus.head(LOG_KEY)
            if entry is None:
                secret = hashlib.sha256("".join(self._ids.uuid7() for _ in range(KEY_IDS)).encode()).digest()
                self._consensus.compare_and_set(LOG_KEY, 1, secret)
                entry = self._consensus.head(LOG_KEY)  # another process may have been quicker
        except ConsensusError:
            return None
        return entry.data if entry is not None and len(entry.data) == KEY_BYTES else None


def _signed(key: bytes, shard: ShardId, part: Part) -> Part:
    return replace(part, receipt=_digest(key, shard, part.without_receipt()))


def _digest(key: bytes, shard: ShardId, part: Part) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=RECEIPT_BYTES)
    digest.update(shard.encode())
    digest.update(encoded(part))
    return digest.digest()
