"""The other end of `rpc.decoders`: Parquet files come in, and their rows go out as one Arrow stream each.

It runs as a process of its own, with a bound on its memory. A posted file comes from any program, and its pages are not
looked at first, as those of parts are: a page of a few bytes may hold any number of values. What takes more memory ends
this process and nothing else.
It believes nobody and is believed in nothing: whoever asked counts what comes back.

    python -m rpc.decoder_process MEMORY_BYTES

A request is its length (8 bytes, little endian) and a file. The answer is frames: a kind, a length, and so many bytes.
"""

from __future__ import annotations

import io
import resource
import struct
import sys
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from persist.codecs.parquet_files import open_parquet

HEAD = struct.Struct("<cI")
LENGTH = struct.Struct("<Q")
ROWS, DONE, REFUSED, TOO_LARGE = b"R", b"D", b"X", b"M"
BATCH_ROWS = 4096
FRAME_BYTES_MAX = 1024 * 1024
ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError, IndexError)


class _Frames(io.RawIOBase):
    """A file that sends what is written to it as frames."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), FRAME_BYTES_MAX):
            send(self._out, ROWS, bytes(view[start : start + FRAME_BYTES_MAX]))
        return len(view)


def send(out: BinaryIO, kind: bytes, data: bytes = b"") -> None:
    out.write(HEAD.pack(kind, len(data)) + data)


def decode(data: bytes, out: BinaryIO) -> None:
    """Send the rows of a file, some at a time."""
    sink = pa.PythonFile(_Frames(out), mode="w")
    with (
        open_parquet(pa.BufferReader(data)) as file,
        pa.ipc.new_stream(sink, file.schema_arrow) as writer,
    ):
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            writer.write_batch(batch)


def bound_memory(memory_bytes: int) -> None:
    """Let this process take so much more than it has now. Only Linux tells how much that is."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, now + memory_bytes))


def main() -> None:
    pa.set_memory_pool(pa.system_memory_pool())  # the others keep address space that they do not use
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    decode(_warm(), io.BytesIO())  # what is taken once is not counted
    bound_memory(int(sys.argv[1]))
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        try:
            decode(source.read(LENGTH.unpack(head)[0]), out)
            send(out, DONE)
        except (MemoryError, pa.ArrowMemoryError):
            send(out, TOO_LARGE)
            out.flush()
            return
        except ERRORS as error:
            send(out, REFUSED, (str(error).splitlines() or [type(error).__name__])[0][:500].encode())
        out.flush()


def _warm() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"k": ["a"], "v": [1]}), sink, compression="zstd")
    return sink.getvalue()


if __name__ == "__main__":
    main()
