"""One side of `bench.codec`: runs with the code of either tree, which its environment names.

Prints a JSON line with the sizes; then, for every line that it reads, one with the microseconds of each call.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

BATCHES = 36
LATER = ("persist.core", "persist.formats.state_frames")
EARLIER = ("persist", "persist.codec")


def modules() -> Callable[[str], ModuleType]:
    """Finds a module of the core, or `codec`, under the names of this tree."""
    try:
        importlib.import_module(LATER[0])
        core, codec = LATER
    except ModuleNotFoundError:
        core, codec = EARLIER
    return lambda name: importlib.import_module(codec if name == "codec" else f"{core}.{name}")


def part_of(m: Callable[[str], ModuleType], number: int, time: int, inline: bool) -> Any:
    shard, digits = "s" + "ab" * 16, f"{number:032x}"
    data = bytes(range(256)) * 2
    return m("batch").Part(
        id=m("ids").PartId("p" + digits),
        key=None if inline else f"{shard}/w{'cd' * 16}/p{digits}.parquet",
        data=data if inline else None,
        format="ipc" if inline else "parquet",
        schema_id=1,
        rows=1_000,
        size=512 if inline else 50_000,
        checksum=3_000_000_000 + number,
        footer_size=2_000,
        footer_checksum=2_000_000_000 + number,
        key_lower=b"\x01first key",
        key_upper=b"\x01last key",
        time=time,
        time_min=time,
        time_max=time,
        diff_min=1,
        diff_max=1,
        diff_sum=1_000,
        sorted=True,
    )


def batch_of(m: Callable[[str], ModuleType], time: int) -> Any:
    frontier = m("antichain").Antichain
    desc = m("batch").Description(frontier(time), frontier(time + 1), frontier(0))
    return m("batch").batch_of(desc, (m("batch").Run((part_of(m, time, time, time % 6 == 5),)),))


def states(m: Callable[[str], ModuleType]) -> tuple[Any, Any]:
    """A State of 36 batches with writers, readers and rollups, and the one after an append."""
    state, ids, frontier = m("state"), m("ids"), m("antichain").Antichain
    writers = {
        ids.WriterId(f"w{n:032x}"): state.WriterState(n, 60_000, ids.Token(f"i{n:032x}"), frontier(n), frontier(n + 1))
        for n in range(4)
    }
    readers = {
        ids.ReaderId(f"r{n:032x}"): state.LeasedReader(frontier(0), ids.SeqNo(7), n, 60_000, "snapshot")
        for n in range(2)
    }
    fields = {
        "name": "eu/orders",
        "shard_id": ids.ShardId("s" + "ab" * 16),
        "walltime_ms": 1_900_000_000_000,
        "since": frontier(0),
        "schemas": {1: state.SchemaRecord(bytes(600), ("id",))},
        "leased_readers": readers,
        "rollups": {ids.SeqNo(n): state.Rollup(f"s{'ab' * 16}/v{n:020d}/r{n:032x}.rollup", 9_000) for n in (32, 64)},
        "event_count": 36_000,
        "byte_count": 1_800_000,
    }
    trace = m("trace").trace_of([batch_of(m, time) for time in range(BATCHES)])
    old = state.State(seqno=ids.SeqNo(70), trace=trace, writers=writers, **fields)
    last, appended = ids.WriterId(f"w{3:032x}"), trace.push(batch_of(m, BATCHES))
    recorded = state.WriterState(9, 60_000, ids.Token("i" + "ef" * 16), frontier(BATCHES), frontier(BATCHES + 1))
    new = state.State(seqno=ids.SeqNo(71), trace=appended, writers={**writers, last: recorded}, **fields)
    return old, new


def microseconds(call: Callable[[Any], object], argument: object, loops: int) -> float:
    started = time.perf_counter()
    for _ in range(loops):
        call(argument)
    return (time.perf_counter() - started) / loops * 1e6


def main() -> None:
    loops, m = int(sys.argv[1]), modules()
    old, new = states(m)
    codec, change = m("codec"), m("state_diff").diff(old, new, "0" * 32)
    rollup, entry = codec.encode_state(old), codec.encode_diff(change)
    assert codec.decode_state(rollup) == old
    assert codec.decode_diff(entry) == change
    print(json.dumps({"state": len(rollup), "diff": len(entry)}), flush=True)
    for _ in sys.stdin:
        found = {
            "decode_state": microseconds(codec.decode_state, rollup, loops),
            "encode_state": microseconds(codec.encode_state, old, loops),
            "decode_diff": microseconds(codec.decode_diff, entry, loops),
            "encode_diff": microseconds(codec.encode_diff, change, loops),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
