"""Receipts: that a part was compared with its rows, said by one who did, and believed by who commits it.

A receipt is a keyed digest of the shard's id and of all that the part says. Who wrote the rows itself with the code of
this package knows that they fit, and so does who has read them back (`persist.commit.part_validator`). The key is that
of the location: a random one under a hidden key of the consensus store, which only servers and embedded programs open.
A client of a server asks the server for receipts. Where the key cannot be had, there are no receipts, and parts are
read back at the commit.
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
    """Gives and verifies receipts. Thread-safe."""

    def __init__(self, consensus: Consensus, ids: IdSource) -> None:
        self._consensus = consensus
        self._ids = ids
        self._lock = threading.Lock()
        self._secret: bytes | None = None

    def given(self, shard: ShardId, runs: Iterable[Run]) -> tuple[Run, ...]:
        """The runs with a receipt for each part. Only for who knows that the parts are what they say."""
        held, key = tuple(runs), self._key()
        if key is None or not held:
            return held
        return tuple(Run(tuple(_signed(key, shard, part) for part in run.parts)) for run in held)

    def is_good(self, shard: ShardId, part: Part) -> bool:
        """Whether the part has a receipt, and it is of this shard and says the same."""
        if not part.receipt or (key := self._key()) is None:
            return False
        return hmac.compare_digest(part.receipt, _digest(key, shard, part.as_staged()))

    def _key(self) -> bytes | None:
        """The key of the location, which is made if there is none. None: the store does not give it now."""
        if self._secret is None:
            with self._lock:
                self._secret = self._secret or self._found()
        return self._secret

    def _found(self) -> bytes | None:
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
    said = hashlib.blake2b(key=key, digest_size=RECEIPT_BYTES)
    said.update(shard.encode())
    said.update(encoded(part))
    return said.digest()
