"""A program that inserts rows and lets their history go, run by `Module` in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

import persist

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])
SINCE_EVERY = 50


def main(words: Sequence[str]) -> int:
    url, cursor, inserts = words
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number in range(int(inserts)):
            shard.insert([{"k": number % 100, "v": "value"}])
            if number % SINCE_EVERY == 0:
                shard.downgrade_since(max(0, (shard.upper().element or 0) - 1), cursor=cursor)
    return 0
