"""persist for asyncio: the same handles, whose methods are awaited. They run on a bounded pool of threads.

    async with persist.aio.connect("http://host:8787") as client:
        shard = await client.shard("orders")
        await shard.insert(rows)
        table = await shard.snapshot().to_arrow()
        async for event in shard.listen(0):
            ...

A task that is cancelled gives its answer up. A call that has not begun never will. What became of a write that had is
not known then, as after Indeterminate: repeat it with its token. Handles go on unharmed.
"""

from __future__ import annotations

from persist.aio.client import (
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
