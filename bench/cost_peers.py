"""deltalake and SlateDB on an S3 server, as their guides say; each answers with what was asked of the server."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pyarrow as pa

from tests.services.metering_proxy import Counts, MeteringProxy

QUIET_S = 5.0  # after a database was opened, before it counts as idle


class Delta:
    """One Delta table. A commit is a conditional PUT, so that it needs no lock table and no rename."""

    def __init__(self, proxy: MeteringProxy, bucket: str, name: str) -> None:
        import deltalake

        self._write = deltalake.write_deltalake
        self._open = deltalake.DeltaTable
        self._uri = f"s3://{bucket}/{name}"
        self._options = {
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": os.environ["AWS_DEFAULT_REGION"],
            "AWS_ACCESS_KEY_ID": os.environ["AWS_ACCESS_KEY_ID"],
            "AWS_SECRET_ACCESS_KEY": os.environ["AWS_SECRET_ACCESS_KEY"],
            "conditional_put": "etag",
        }
        self._proxy = proxy
        self._table: Any = None

    def appended(self, tables: list[pa.Table]) -> Counts:
        """Append them one by one, through one handle: opening the table each time would ask for more."""
        before = self._proxy.counts()
        for table in tables:
            if self._table is None:
                self._write(self._uri, table, mode="append", storage_options=self._options)
                self._table = self._open(self._uri, storage_options=self._options)
            else:
                self._write(self._table, table, mode="append")
        return self._proxy.counts() - before

    def compacted(self) -> Counts:
        """What its own compaction asks for, once, at the end."""
        before = self._proxy.counts()
        self._table.optimize.compact()
        return self._proxy.counts() - before


class Slate:
    """One SlateDB database. It takes its store from the environment."""

    def __init__(self, proxy: MeteringProxy, bucket: str, name: str) -> None:
        os.environ.update(
            AWS_ENDPOINT=proxy.endpoint, AWS_ALLOW_HTTP="true", AWS_REGION=os.environ["AWS_DEFAULT_REGION"]
        )
        self._proxy, self._url, self._name = proxy, f"s3://{bucket}", name

    def put(self, values: list[bytes]) -> Counts:
        """Put each value under a key of its own, and wait until it is durable."""
        return asyncio.run(self._put(values))

    def idle(self, seconds: float) -> Counts:
        """Keep it open, and do nothing."""
        return asyncio.run(self._idle(seconds))

    async def _put(self, values: list[bytes]) -> Counts:
        database = await self._opened()
        before = self._proxy.counts()
        for number, value in enumerate(values):
            await database.put(f"{number:016d}".encode(), value)
            await database.flush()
        found = self._proxy.counts() - before
        await database.shutdown()
        return found

    async def _idle(self, seconds: float) -> Counts:
        database = await self._opened()
        await database.put(b"0", b"0")
        await database.flush()
        await asyncio.sleep(QUIET_S)
        before = self._proxy.counts()
        await asyncio.sleep(seconds)
        found = self._proxy.counts() - before
        await database.shutdown()
        return found

    async def _opened(self) -> Any:
        from slatedb import uniffi

        return await uniffi.DbBuilder(self._name, uniffi.ObjectStore.resolve(self._url)).build()


__all__ = ["Delta", "Slate"]
