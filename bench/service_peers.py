"""deltalake, PyIceberg and SlateDB doing what the service does: committing 100 rows at a time."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS = 100


def table() -> pa.Table:
    """100 rows of (16-byte string, int64, 32-byte string)."""
    keys = [f"{n:016d}" for n in range(ROWS)]
    return pa.table({"k": keys, "v": pa.array(range(ROWS), pa.int64()), "s": ["x" * 32] * ROWS})


class DeltaPeer:
    """One Delta table."""

    def __init__(self, root: Path) -> None:
        import deltalake

        self._write = deltalake.write_deltalake
        self._path = str(root)
        self.append(table())

    def append(self, rows: pa.Table) -> None:
        self._write(self._path, rows, mode="append")

    @staticmethod
    def commits_per_second(root: Path, writers: int, seconds: float) -> float:
        """Successful commits of that many processes on one table."""
        DeltaPeer(root)
        context = multiprocessing.get_context("spawn")
        queue: Any = context.Queue()
        barrier: Any = context.Barrier(writers)
        processes = [
            context.Process(target=_delta_writer, args=(str(root), seconds, barrier, queue)) for _ in range(writers)
        ]
        for process in processes:
            process.start()
        done = sum(queue.get() for _ in processes)
        for process in processes:
            process.join()
        return float(done / seconds)


def _delta_writer(path: str, seconds: float, barrier: Any, queue: Any) -> None:
    import deltalake

    rows, done = table(), 0
    barrier.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            deltalake.write_deltalake(path, rows, mode="append")
            done += 1
        except deltalake.exceptions.DeltaError:
            continue  # lost the race too often
    queue.put(done)


class IcebergPeer:
    """One Iceberg table in a SQLite catalog."""

    def __init__(self, root: Path, schema: pa.Schema | None = None) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        logging.getLogger("pyiceberg").setLevel(logging.ERROR)
        root.mkdir(parents=True)
        catalog = SqlCatalog("bench", uri=f"sqlite:///{root / 'catalog.db'}", warehouse=root.as_uri())
        catalog.create_namespace("bench")
        self._table = catalog.create_table("bench.one", schema or table().schema)

    def append(self, rows: pa.Table) -> None:
        self._table.append(rows)

    def delete(self, where: str) -> None:
        self._table.delete(where)

    def read(self, where: str) -> pa.Table:
        return self._table.scan(row_filter=where).to_arrow()


def slate_commits(root: Path, seconds: float, writers: int = 16) -> float:
    """Puts a second, each flushed, by that many tasks of one process."""
    return asyncio.run(_slate(root, seconds, writers))


async def _slate(root: Path, seconds: float, writers: int) -> float:
    from slatedb import uniffi

    root.mkdir(parents=True)
    store = uniffi.ObjectStore.resolve("file:///")
    database = await uniffi.DbBuilder(str(root).lstrip("/"), store).build()
    value = b"x" * 56 * ROWS
    end = time.monotonic() + seconds

    async def write(number: int) -> int:
        done = 0
        while time.monotonic() < end:
            await database.put(f"{number}-{done}".encode(), value)
            await database.flush()
            done += 1
        return done

    counts = await asyncio.gather(*(write(number) for number in range(writers)))
    await database.shutdown()
    return sum(counts) / seconds


__all__ = ["DeltaPeer", "IcebergPeer", "slate_commits", "table"]
