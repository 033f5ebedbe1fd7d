"""persist for asyncio: the same handles with awaited methods, which run on a bounded pool of threads.

    async with persist.aio.connect("http://host:8787") as client:
        shard = await client.shard("orders")
        await shard.insert(rows)
        table = await shard.snapshot().to_arrow()
        async for event in shard.listen(0):
            ...

A cancelled task loses the result of its call. A call that has not started never runs. The outcome of a write that has
started is unknown, as after Indeterminate: repeat it with its token. Handles stay usable.
"""

from __future__ import annotations

from persist.aio.async_client import (
    AsyncAttributes,
    AsyncChanges,
    AsyncClient,
    AsyncCriticalReader,
    AsyncListen,
    AsyncMerge,
    AsyncPipelinedWriter,
    AsyncReadLease,
    AsyncShard,
    AsyncSnapshot,
    AsyncSubscription,
    AsyncWriter,
    connect,
)

__all__ = ["AsyncAttributes", "AsyncChanges", "AsyncClient", "AsyncCriticalReader", "AsyncListen", "AsyncMerge"]
__all__ += ["AsyncPipelinedWriter", "AsyncReadLease", "AsyncShard", "AsyncSnapshot", "AsyncSubscription", "AsyncWriter"]
__all__ += ["connect"]
