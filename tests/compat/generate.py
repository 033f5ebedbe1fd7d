"""Makes a frozen location: `python -m tests.compat.generate NAME`. Run it once for each format version, never again.

The location holds state diffs, rollups, inline and Parquet parts, a merged batch, a clipped part, holds and an evolved
schema. `expected.json` beside it says what later code must read from it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa

from compactor.worker import Worker
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import LocationSettings, open_location
from persist.core.state import Policy
from persist.parts import ShardSchema

HERE = Path(__file__).resolve().parent
V1 = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
V2 = V1.append(pa.field("note", pa.string()))


def contents(client: Client) -> dict[str, dict[str, list[list[object]]]]:
    """Every row at every readable time of every shard."""
    found: dict[str, dict[str, list[list[object]]]] = {}
    for name in client.shards():
        shard = client.shard(name)
        low, high = shard.since().element, shard.upper().element
        assert low is not None
        assert high is not None
        found[name] = {}
        for as_of in range(low, high):
            table = shard.snapshot(as_of).to_arrow()
            rows = sorted((list(row) for row in zip(*table.to_pydict().values(), strict=True)), key=repr)
            found[name][str(as_of)] = rows
    return found


def make(directory: Path) -> None:
    policy = Policy(inline_part_bytes_max=600, rollup_every=6)
    location = open_location(f"persist://{directory}", settings=LocationSettings(policy=policy))
    with Client(EmbeddedTransport(location)) as client:
        orders = client.create_shard("orders", V1, ["k"])
        orders.open_reader(purpose="kept")
        for step in range(8):
            rows = [{"k": f"k{step % 3}", "v": step, "__diff": 1}, {"k": "x", "v": 0, "__diff": (-1) ** step}]
            orders.insert(rows if step % 4 else [{"k": f"big{n}", "v": n} for n in range(200)])
        Worker(location).run("orders", idle=True)
        orders.evolve_schema(ShardSchema(V2, ("k",)))
        orders.insert([{"k": "new", "v": 1, "note": "a column more"}])
        orders.downgrade_since(2, cursor="job")
        copies = client.create_shard("eu/copies", V1, ["k"])
        copies.append([{"k": "a", "v": 1, "__time": 0}], 0, 1)
        copies.append([{"k": "a", "v": 1, "__time": 0}, {"k": "b", "v": 2, "__time": 1}], 0, 2)
        copies.advance_upper(5)


def main() -> None:
    target = HERE / sys.argv[1]
    assert not target.exists(), "frozen samples are never made anew"
    make(target / "location")
    with Client(EmbeddedTransport(open_location(f"persist://{target}/location"))) as client:
        text = json.dumps(contents(client), indent=None, separators=(",", ":"))
    (target / "expected.json").write_text(text + "\n")
    for leftover in (target / "location").glob("consensus.db-*"):
        leftover.unlink()
    shutil.rmtree(target / "location" / "blob" / ".tmp", ignore_errors=True)


if __name__ == "__main__":
    main()
