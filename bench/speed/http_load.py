"""Clients that cost next to nothing: requests are made before, and sent over raw sockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from persist.commit.clocks_and_ids import SystemIds
from persist.core import commands as c
from persist.core.ids import ShardId, Token, WriterId, mint
from persist.formats.http_messages import RECORD
from persist.formats.records import encoded
from persist.parts import ShardSchema, stage_inline
from persist.parts.writer import PartSink

ANSWER_BYTES = 64 * 1024
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/x-ndjson"
local file = io.open(%s, "rb")
wrk.body = file:read("*a")
file:close()
"""


class NoBlobs:
    """Takes no part: all rows are inline."""

    def put(self, key: str, data: bytes) -> None:
        raise AssertionError(f"{len(data)} bytes are no inline part")


def insert_commands(
    rows: pa.Table, key: Sequence[str], shard: ShardId, writers: Sequence[WriterId], count: int
) -> list[bytes]:
    """So many inserts of the rows as rich clients send them: those of `writers`, in turns."""
    ids, schema = SystemIds(), ShardSchema(rows.schema, tuple(key))
    found = []
    for number in range(count):
        writer = writers[number % len(writers)]
        sink = PartSink(schema, 1, NoBlobs(), shard, writer, ids)
        runs = stage_inline(rows, sink, default_time=None, inline_bytes_max=64 * 1024)
        assert runs
        found.append(encoded(c.Insert(writer, mint(Token, ids), runs, shard=shard)))
    return found


def posts(path: str, bodies: Sequence[bytes], content_type: str = RECORD) -> list[bytes]:
    """Whole HTTP requests."""
    return [
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
        for body in bodies
    ]


def sent(port: int, requests: Sequence[bytes], connections: int) -> float:
    """Seconds in which all of them were answered with 200, one after another on each connection."""
    shares = [requests[number::connections] for number in range(connections)]
    errors: list[bytes] = []

    def run(share: Sequence[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for request in share:
                connection.sendall(request)
                answer = connection.recv(ANSWER_BYTES)
                if b" 200 " not in answer[:16]:
                    errors.append(answer)
                    return

    threads = [threading.Thread(target=run, args=(share,)) for share in shares]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise SystemExit(f"the server answered {errors[0][:500]!r}")
    return seconds


def wrk_inserts(root: Path, port: int, name: str, body: bytes, connections: int, seconds: int) -> float | None:
    """Requests a second by `wrk`, a C client; None where it is not installed."""
    if (wrk := shutil.which("wrk")) is None:
        return None
    posted, script = root / "body.ndjson", root / "post.lua"
    posted.write_bytes(body)
    script.write_text(LUA % json.dumps(str(posted)))
    command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}/v1/shards/{name}/insert"], capture_output=True, text=True, check=True
    )
    if "Non-2xx" in done.stdout:
        raise SystemExit(done.stdout)
    [rate] = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Requests/sec")]
    return float(rate)
