"""What is fuzzed: doors of a running server, each with valid samples, and how bytes go in."""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from persist.core import commands as c
from persist.core.batch import Run
from persist.core.frontier import Antichain
from persist.core.ids import PartId, ReaderId, Token, WriterId, mint
from persist.formats.http_messages import StagedRuns
from persist.formats.records import encoded
from persist.parts import ShardSchema, encode_inline, encode_parquet
from tests.conftest import SeededIds

ANSWER_S = 60.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
RECORD = "application/vnd.persist.record"
HTTP_WAIT_S = 0.3  # for an answer to bytes that may be no request

ARROW_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("s", pa.string()),
        pa.field("f", pa.float64()),
        pa.field("d", pa.decimal128(10, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("day", pa.date32()),
        pa.field("b", pa.binary()),
        pa.field("w", pa.binary(4)),
        pa.field("l", pa.list_(pa.int64())),
        pa.field("o", pa.struct([("x", pa.int32()), ("y", pa.string())])),
        pa.field("m", pa.map_(pa.string(), pa.float32())),
        pa.field("p", pa.list_(pa.float32(), 2)),
        pa.field("t", pa.bool_()),
    ]
)
SCHEMA = ShardSchema(ARROW_SCHEMA, ("id",))
ROWS: list[dict[str, Any]] = [
    {"id": 1, "s": "a", "f": 0.5, "d": None, "l": [1, 2], "o": {"x": 1, "y": "z"}, "m": [("k", 1.0)], "p": [1.0, 2.0]},
    {"id": 2, "s": None, "f": None, "b": b"\x00\xff", "w": b"abcd", "l": [], "o": None, "m": [], "p": None, "t": True},
    {"id": 3, "s": "ü" * 40, "f": 1e300, "l": [None], "o": {"x": None, "y": None}, "t": False},
]


@dataclass(frozen=True)
class Answer:
    """What a server said: 0 where it closed the connection without an answer."""

    status: int
    text: str


@dataclass(frozen=True)
class Target:
    """A door. `send` brings bytes to a shard of a server."""

    samples: Callable[[], Mapping[str, bytes]]
    send: Callable[[Caller, str, bytes, int], Answer]


class Caller:
    """One connection to a server, opened again where it was closed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json") -> Answer:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        headers = {} if body is None else {"content-type": content_type}
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            data = answer.read(ANSWER_BYTES_MAX)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            return Answer(0, f"{type(error).__name__}: {error}")
        if answer.will_close or len(data) == ANSWER_BYTES_MAX:
            self.close()
        return Answer(answer.status, data.decode("utf-8", "replace"))

    def raw(self, data: bytes) -> Answer:
        """Bytes as they are, on a connection of their own. What is no whole request gets no answer: it is left."""
        with socket.create_connection(("127.0.0.1", self.port), ANSWER_S) as line:
            line.settimeout(HTTP_WAIT_S)
            found = b""
            with contextlib.suppress(OSError):
                line.sendall(data)
                while (piece := line.recv(65536)) and len(found) < ANSWER_BYTES_MAX:
                    found += piece
        words = found[:16].split(b" ")
        status = int(words[1]) if found.startswith(b"HTTP/1.1 ") and words[1].isdigit() else 0
        for other in found.split(b"\r\nHTTP/1.1 ")[1:]:  # answers to what came after in the same bytes
            status = max(status, int(other[:3])) if other[:3].isdigit() else status
        return Answer(status, found.partition(b"\r\n\r\n")[2].decode("utf-8", "replace"))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def posted(content_type: str) -> Callable[[Caller, str, bytes, int], Answer]:
    """Bytes as rows, by each of the verbs that take rows."""

    def send(caller: Caller, shard: str, data: bytes, number: int) -> Answer:
        verb = ("insert", "insert", "insert", "upsert", "overwrite", "append?lower=0&upper=9")[number % 6]
        return caller.ask("POST", f"/v1/shards/{shard}/{verb}", data, content_type)

    return send


def table() -> pa.Table:
    rows = [{name: row.get(name) for name in ARROW_SCHEMA.names} for row in ROWS]
    return pa.Table.from_pylist(rows, ARROW_SCHEMA)


def arrow_samples() -> dict[str, bytes]:
    rows = table()
    views = rows.set_column(1, "s", rows.column("s").cast(pa.string_view()))
    named = rows.set_column(1, "s", rows.column("s").dictionary_encode())
    found = {"plain": (rows, None), "zstd": (rows, "zstd"), "lz4": (rows, "lz4"), "views": (views, None)}
    found["dictionary"] = named, "zstd"
    return {name: _stream(one, compression) for name, (one, compression) in found.items()}


def _stream(rows: pa.Table, compression: str | None) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def parquet_samples() -> dict[str, bytes]:
    found = {}
    how: dict[str, dict[str, Any]] = {
        "plain": {"use_dictionary": False, "compression": "none"},
        "zstd": {"compression": "zstd", "data_page_version": "2.0"},
        "snappy": {"compression": "snappy", "row_group_size": 1},
    }
    for name, options in how.items():
        sink = io.BytesIO()
        pq.write_table(table(), sink, **options)
        found[name] = sink.getvalue()
    return found


def ndjson_samples() -> dict[str, bytes]:
    lines = [
        {"id": 1, "s": "a", "f": "NaN", "d": "1.50", "at": "2024-01-01T00:00:00Z", "day": "2024-01-01", "b": "AP8="},
        {"id": 2, "w": "YWJjZA==", "l": [1, None], "o": {"x": 1, "y": "z"}, "m": [["k", 1.5]], "p": [1, 2], "t": True},
        {"id": 3, "__diff": 2, "s": "\u00fc\U0001f600"},
    ]
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return {"rows": whole, "one": b'{"id": 7}', "times": b'{"id": 7, "__time": 3}\n{"id": 8, "__time": 4}\n'}


def csv_samples() -> dict[str, bytes]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(ARROW_SCHEMA.names)
    flat = [1, "a,b\n", 0.5, "1.50", "2024-01-01T00:00:00Z", "2024-01-01", "AP8=", "YWJjZA=="]
    writer.writerow([*flat, "[1,null]", '{"x":1,"y":"z"}', '[["k",1.5]]', "[1,2]", "true"])
    writer.writerow([2, *[""] * 12])
    all_null = ",".join(ARROW_SCHEMA.names) + "\n3,,,,,,,,,,,,\n"
    return {
        "rows": text.getvalue().encode(),
        "nulls": all_null.encode(),
        "diffs": all_null.replace("\n", ",__diff\n", 1)[:-1].encode() + b",2\n",
    }


def frame_samples() -> dict[str, bytes]:
    ids, writer, reader = SeededIds(), WriterId("w" + "0" * 32), ReaderId("r" + "0" * 32)
    rows = SCHEMA.conform(table().slice(0, 1), 0)
    part = encode_inline(rows, SCHEMA, 1, mint(PartId, ids))
    staged, _ = encode_parquet(rows, SCHEMA, 1, mint(PartId, ids), f"s{'0' * 32}/{writer}/{mint(PartId, ids)}.parquet")
    run, token = Run((part,)), mint(Token, ids)
    found: dict[str, Any] = {
        "register": c.Insert(writer, token, (), lease_ms=60_000),
        "insert": c.Insert(writer, token, (run,)),
        "twice": c.Insert(writer, token, (run, run)),
        "blob": c.Insert(writer, token, (Run((staged,)),)),
        "compare": c.CompareAndAppend(writer, token, Antichain(0), Antichain(1), (run,)),
        "append": c.Append(writer, token, Antichain(0), Antichain(1), (run,)),
        "upper": c.AdvanceUpper(Antichain(3)),
        "reader": c.RegisterReader(reader, None, 60_000),
        "evolve": c.EvolveSchema(1, SCHEMA.to_record()),
        "reshape": c.Rewrite(
            writer, token, Antichain(0), -1, "overwrite", (run,), schema=c.SchemaChange(1, SCHEMA.to_record())
        ),
        "erase": c.Rewrite(writer, token, Antichain(1), 0, c.ERASE, erasure=c.NewErasure("e" + "0" * 32)),
        "staged": StagedRuns((run,)),
    }
    return {name: encoded(one) for name, one in found.items()}


def send_frame(caller: Caller, shard: str, data: bytes, number: int) -> Answer:
    verb = "receipts" if number % 8 == 0 else "commands"
    return caller.ask("POST", f"/v1/shards/{shard}/{verb}", data, RECORD)


def http_samples() -> dict[str, bytes]:
    body = b'{"id": 1}\n'
    kind = b"content-type: application/x-ndjson\r\n"
    host = b"host: localhost\r\nconnection: close\r\n"
    length = b"content-length: %d\r\n" % len(body)
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    schema = b'{"fields": [{"name": "id", "type": "int64", "key": true}, {"name": "l", "type": "list<int64>"}]}'
    return {
        "health": b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n",
        "view": b"GET /v1/shards/SHARD?past=0&timeout=0 HTTP/1.1\r\n" + host + b"\r\n",
        "snapshot": b"GET /v1/shards/SHARD/snapshot?format=csv&where=id%3D1&limit=3 HTTP/1.1\r\n" + host + b"\r\n",
        "insert": b"POST /v1/shards/SHARD/insert HTTP/1.1\r\n" + host + kind + length + b"\r\n" + body,
        "chunked": b"POST /v1/shards/SHARD/insert HTTP/1.1\r\n" + host + kind + chunked,
        "create": b"PUT /v1/shards/SHARD%2Fnew HTTP/1.1\r\n" + host
        + b"content-length: %d\r\n\r\n" % len(schema) + schema,
        "two": (b"GET /readyz HTTP/1.1\r\n" + host + b"\r\n") * 2,
        "count": b"GET /v1/shards/SHARD/count?as_of=0&wait=0 HTTP/1.1\r\n" + host + b"accept: */*\r\n\r\n",
    }  # fmt: skip


def send_http(caller: Caller, shard: str, data: bytes, _number: int) -> Answer:
    return caller.raw(data.replace(b"SHARD", shard.encode()))


TARGETS = {
    "http": Target(http_samples, send_http),
    "arrow": Target(arrow_samples, posted("application/vnd.apache.arrow.stream")),
    "parquet": Target(parquet_samples, posted("application/vnd.apache.parquet")),
    "ndjson": Target(ndjson_samples, posted("application/x-ndjson")),
    "csv": Target(csv_samples, posted("text/csv")),
    "frames": Target(frame_samples, send_frame),
}
