"""Receipts: that a part was compared with its rows, said by one who did, and believed by who commits it.

A receipt is a keyed digest of the shard's id and of all that the part says. Who wrote the rows itself with the code of
this package knows that they fit, and so does who has read them back (`persist.commit.inspector`). Both need the key,
which never leaves the process: a client of a server asks the server for receipts. Where another process commits, the
receipt is worth nothing, and the rows are read back once more.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from persist.core.batch import Part, Run
from persist.core.ids import IdSource, ShardId
from persist.core.record import replace
from persist.formats.records import encoded

KEY_IDS = 4  # of 62 random bits each
RECEIPT_BYTES = 16


class Receipts:
    """Gives and verifies receipts. Thread-safe."""

    def __init__(self, ids: IdSource) -> None:
        self._key = hashlib.sha256("".join(ids.uuid7() for _ in range(KEY_IDS)).encode()).digest()

    def given(self, shard: ShardId, runs: Iterable[Run]) -> tuple[Run, ...]:
        """The runs with a receipt for each part. Only for who knows that the parts are what they say."""
        return tuple(Run(tuple(self._given(shard, part) for part in run.parts)) for run in runs)

    def is_good(self, shard: ShardId, part: Part) -> bool:
        """Whether the part has a receipt, and it is of this shard and says the same."""
        return bool(part.receipt) and hmac.compare_digest(part.receipt, self._digest(shard, part.without_receipt()))

    def _given(self, shard: ShardId, part: Part) -> Part:
        return replace(part, receipt=self._digest(shard, part.without_receipt()))

    def _digest(self, shard: ShardId, part: Part) -> bytes:
        said = hashlib.blake2b(key=self._key, digest_size=RECEIPT_BYTES)
        said.update(shard.encode())
        said.update(encoded(part))
        return said.digest()
