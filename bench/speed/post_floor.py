"""The least that a service of posts in Python can do: bare ASGI, one decode, sort, encode and commit for each group.

    python -m bench.speed.post_floor FOLDER

Rows are NDJSON of {"k": int, "v": str}. Posts that come while a group is committed are the next group: one Arrow batch
at one time, sorted by key, one row of SQLite, flushed to the disk. It keeps nothing else of what a shard promises: no
tokens, rights, history, limits, errors of one post.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import uvicorn


class Row(msgspec.Struct):
    k: int
    v: str


SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string()), ("__time", pa.int64()), ("__diff", pa.int64())])
_decoder = msgspec.json.Decoder(Row)


class Log:
    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "log.db", check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("CREATE TABLE log (seqno INTEGER PRIMARY KEY, data BLOB)")
        self._seqno = 0

    def commit(self, bodies: list[bytes]) -> int:
        rows = [row for body in bodies for row in _decoder.decode_lines(body)]
        times, diffs = [self._seqno] * len(rows), [1] * len(rows)
        columns = [[row.k for row in rows], [row.v for row in rows], times, diffs]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
        batch = batch.take(pc.sort_indices(batch, [("k", "ascending")]))
        self._db.execute("INSERT INTO log VALUES (?, ?)", (self._seqno, batch.serialize().to_pybytes()))
        self._seqno += 1
        return self._seqno - 1


class Floor:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[tuple[bytes, asyncio.Future[int]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.append((body, done))
        if self._task is None:
            self._task = loop.create_task(self._lead())
        answer = b'{"time": %d}' % await done
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _lead(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            time = await loop.run_in_executor(None, self._log.commit, [body for body, _ in group])
            for _, done in group:
                done.set_result(time)
        self._task = None


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(Floor(Log(Path(sys.argv[1]))), loop="uvloop", http="httptools", log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
