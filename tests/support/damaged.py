"""A healthy location on disk, and hands that damage its bytes: those of blobs, of the log, and of States within it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from compactor.engine import EngineSettings
from compactor.worker import Worker, WorkerSettings
from persist.attributes.node_codec import Leaf, decode
from persist.commit.location import Location, LocationSettings, open_location
from persist.core.attribute import KEY_BYTES, AttributeUpdate
from persist.core.batch import HollowBatch, Part, Run, trace_of
from persist.core.ids import PartId, SeqNo, token_of_key
from persist.core.merge_plan import MergePolicy
from persist.core.record import replace
from persist.core.state import Policy, State
from persist.core.state_diff import diff
from persist.formats.state_frames import decode_state, encode_diff, encode_state
from persist.parts import DIFF, ShardSchema, encode_parquet, valid_schemas
from tests.support.location import AscendingIds, InlineBackground, TestClock, client_of

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
SMALL = {"rollup_every": 8, "overlay_flush_at": 8}
PLAIN = Policy(inline_part_bytes_max=0, **SMALL)
BUNDLING = Policy(inline_part_bytes_max=0, plain_parts_max=1, rollup_every=8)
INLINE = Policy(**SMALL)
WORKER = WorkerSettings(
    policy=MergePolicy(fan_in=2, batches_soft=4),
    engine=EngineSettings(memory_bytes=1 << 20, part_bytes_target=1_000),
)


def opened(root: Path, policy: Policy = PLAIN, origin: int = 0) -> Location:
    """A process at the location, whose upkeep is done within its commits."""
    settings = LocationSettings(policy, history="7d", compares_clock=False)
    return open_location(
        f"persist://{root}",
        settings=settings,
        background=InlineBackground(),
        ids=AscendingIds(origin),
        clock=TestClock(),
    )


def healthy(root: Path, origin: int = 0) -> Path:
    """Shards of all kinds: merged into a run of several parts, bundled, inline, with attributes, cloned."""
    with closing(opened(root, origin=origin + 1)) as location:
        client, pick = client_of(location), random.Random(1)
        for name in ("orders", "other"):
            shard = client.create_shard(name, SCHEMA, ["id"])
            for first in range(0, 1_200, 200):
                shard.insert([{"id": first + n, "v": f"{pick.getrandbits(128):032x}"} for n in range(200)])
            Worker(location, WORKER).run(name, idle=True)
            for number in range(12):
                shard.attributes.update(AttributeUpdate.replace(bytes([number + 1] * KEY_BYTES), number))
            for word in ("a", "b", "c", "d", "e", "f"):
                shard.insert([{"id": 5_000 + n, "v": word} for n in range(3)], token=token_of_key(word))
        client.clone("orders", "copy")
    with closing(opened(root, BUNDLING, origin=origin + 2)) as location:
        shard = client_of(location).create_shard("bundled", SCHEMA, ["id"])
        writer = shard.open_writer()
        staged = [writer.stage([{"id": n, "v": "x"}], None) for n in range(6)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))
        shard.insert([{"id": 9, "v": "last"}])
    with closing(opened(root, INLINE, origin=origin + 3)) as location:
        shard = client_of(location).create_shard("inline", SCHEMA, ["id"])
        for number in range(5):
            shard.insert([{"id": number, "v": "x"}])
    return root


class Damaged:
    """Hands on one copy of the location. Each method leaves valid checksums, but where it is about them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # --- the log

    def entries(self, name: str) -> dict[int, bytes]:
        """The log, by seqno."""
        with closing(self._connection()) as connection:
            return dict(connection.execute("SELECT seqno, data FROM consensus_log WHERE key = ?", (name,)).fetchall())

    def set_entry(self, name: str, seqno: int, data: bytes | None) -> None:
        """None: it goes."""
        with closing(self._connection()) as connection, connection:
            connection.execute("DELETE FROM consensus_log WHERE key = ? AND seqno = ?", (name, seqno))
            if data is not None:
                connection.execute("INSERT INTO consensus_log (key, seqno, data) VALUES (?, ?, ?)", (name, seqno, data))

    def commit(self, name: str, change: Callable[[State], State], gone: tuple[str, ...] | None = None) -> None:
        """The State that `change` makes is committed as the next one, and nobody checks it."""
        old = self.state(name)
        commit_id = f"{old.seqno:032x}"
        new = replace(change(old), seqno=SeqNo(old.seqno + 1), commit_id=commit_id)
        self.set_entry(name, new.seqno, encode_diff(diff(old, new, commit_id, gone)))

    def _connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.root / "consensus.db")

    # --- the State

    def state(self, name: str) -> State:
        with closing(opened(self.root, origin=9)) as location:
            found = location.versions.load(name)
        assert found is not None
        return found

    def edit_part(self, name: str, at: int = 0, **fields: Any) -> str:
        """A commit says something else of the part at this place, which is told by its key."""
        part = list(self.state(name).trace.parts())[at]
        self.commit(name, lambda state: with_part(state, part.id, replace(part, **fields)))
        return part.key or ""

    def edit_batches(self, name: str, edit: Callable[[list[HollowBatch]], list[HollowBatch]]) -> None:
        self.commit(name, lambda state: replace(state, trace=trace_of(edit(list(state.trace.batches)))))

    # --- blobs

    def path(self, key: str) -> Path:
        return self.root / "blob" / key

    def read(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def write(self, key: str, data: bytes | None) -> str:
        """None: it goes. The key."""
        path = self.path(key)
        if path.exists():
            path.chmod(0o644)
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        return key

    def flip(self, key: str, at: float = 0.5) -> str:
        data = bytearray(self.read(key))
        data[int(len(data) * at)] ^= 1
        return self.write(key, bytes(data))

    def cut(self, key: str) -> str:
        return self.write(key, self.read(key)[:-1])

    def extend(self, key: str) -> str:
        return self.write(key, self.read(key) + b"x")

    def swap(self, one: str, other: str) -> str:
        data = self.read(one)
        self.write(one, self.read(other))
        self.write(other, data)
        return one

    def keys(self, name: str, ending: str) -> list[str]:
        """The blobs that the State names, in the order of its batches; then the others."""
        state = self.state(name)
        parts = [part.key for part in state.trace.parts() if part.key is not None]
        return [key for key in dict.fromkeys([*parts, *state.blob_keys()]) if key.endswith(ending)]

    def rollup(self, name: str, edit: Callable[[State], State], *, at: int = -1) -> str:
        """The rollup at this place is another one."""
        rollups = sorted(self.state(name).rollups.items())
        key = rollups[at][1].key
        return self.write(key, encode_state(edit(decode_state(self.read(key)))))

    def reencode(self, name: str, edit: Callable[[pa.Table], pa.Table], at: int = 0, **fields: Any) -> str:
        """The part at this place has other rows, in a sound file; the State says of it what it said, and `fields`."""
        state = self.state(name)
        part = list(state.trace.parts())[at]
        schema = valid_schemas(state.schemas)[part.schema_id]
        key = part.key or ""
        rows = edit(self.rows(key))
        kind = ShardSchema(rows.drop_columns(["__time", DIFF]).schema, schema.key)
        made, data = encode_parquet(rows, kind, part.schema_id, PartId(part.id), key)
        self.write(key, data)
        told = {name: getattr(made, name) for name in ("size", "checksum", "footer_size", "footer_checksum")}
        return self.edit_part(name, at, **{**told, **fields})

    def rows(self, key: str) -> pa.Table:
        return pq.read_table(self.path(key), partitioning=None)

    def leaf(self, name: str, edit: Callable[[bytes], bytes]) -> str:
        """The first leaf of the index of attributes has other keys, in a sound node."""
        state = self.state(name)
        first = min(state.attribute_chunks)
        key = state.attribute_chunks[first].key
        data = self.read(key)
        node = decode(data[: state.attribute_root.length], first)
        assert isinstance(node, Leaf)
        made = Leaf(edit(node.keys), node.values).encode(first)
        return self.write(key, made + data[len(made) :])


def with_part(state: State, part_id: PartId, other: Part | None) -> State:
    """The State with another part in its place; None: without it."""
    made = []
    for batch in state.trace.batches:
        runs = []
        for run in batch.runs:
            changed = (other if part.id == part_id else part for part in run.parts)
            parts = tuple(part for part in changed if part is not None)
            runs += [Run(parts)] if parts else []
        rows = sum(part.rows for run in runs for part in run.parts)
        made.append(HollowBatch(batch.desc, tuple(runs), rows))
    return replace(state, trace=trace_of(made))
