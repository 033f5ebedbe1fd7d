"""Erasure against a model: what is there is what was not erased, and of the rest no byte is left in the end."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.erasing import Eraser
from compactor.worker import Worker
from persist.commit.collector import Collector
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.state import Policy
from tests.support.clocks import World
from tests.support.examples import examples
from tests.support.markers import in_memory, marker, uncompressed, where

NAME = "orders"
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.int64())])
KEYS = [marker() for _ in range(4)]

ROW = st.tuples(st.sampled_from(range(4)), st.integers(0, 1), st.sampled_from([-1, 1, 2]))
WRITES = st.tuples(st.just("write"), st.lists(ROW, min_size=1))
STEPS = st.one_of(
    WRITES,
    WRITES,
    st.tuples(st.just("erase"), st.sets(st.sampled_from(range(4)), max_size=2)),
    st.tuples(st.just("forget"), st.integers(0, 20)),
    st.tuples(st.just("tag"), st.integers(0, 20)),
    st.tuples(st.just("hold"), st.integers(0, 20)),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("merge"), st.booleans()),
    st.tuples(st.just("step"), st.none()),
)


class Run:
    """A shard, what it should hold, and what was erased and not written since."""

    def __init__(self) -> None:
        self.world = World(policy=Policy(inline_part_bytes_max=300))
        self.machine = self.world.machine()
        self.shard = self.machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")
        self.model: Counter[tuple[int, int]] = Counter()
        self.erased: set[int] = set()
        self.held: list[tuple[object, object]] = []
        self.collector = Collector(self.machine.location)
        self.eraser = Eraser(self.machine.location, self.collector)

    def write(self, rows: list[tuple[int, int, int]]) -> None:
        self.shard.insert([{"id": KEYS[key], "v": v, "__diff": diff} for key, v, diff in rows])
        for key, v, diff in rows:
            self.model[key, v] += diff
            self.erased.discard(key)

    def erase(self, keys: set[int]) -> None:
        if not self.shard.upper().element:
            return
        self.shard.erase(keys=[KEYS[key] for key in sorted(keys)] if keys else None)
        for row in [row for row in self.model if row[0] in keys]:
            del self.model[row]
        self.erased |= keys

    def forget(self, time: int) -> None:
        if time < (self.shard.upper().element or 0):
            self.shard.forget(time)

    def tag(self, time: int) -> None:
        try:
            self.shard.tag(f"t{time}", time)
        except (InvalidUsage, NotReadable):
            return

    def hold(self, time: int) -> None:
        if time >= (self.shard.upper().element or 0):
            return
        try:
            held = self.shard.snapshot(time)
        except NotReadable:
            return
        self.held.append((held, self.shard.snapshot(time).to_arrow()))

    def release(self, _: None) -> None:
        while self.held:
            held, shown = self.held.pop()
            assert held.to_arrow() == shown, "what is held shows what it did, whatever is erased"  # type: ignore[attr-defined]

    def merge(self, idle: bool) -> None:
        Worker(self.machine.location).run(NAME, idle=idle)

    def step(self, _: None) -> None:
        self.eraser.run(NAME)
        self.collector.run(NAME)

    def check(self) -> None:
        found = Counter({(KEYS.index(r["id"]), r["v"]): r["__diff"] for r in self.rows()})
        assert found == Counter({row: count for row, count in self.model.items() if count})

    def rows(self) -> list[dict[str, object]]:
        return self.shard.snapshot().to_arrow().to_pylist() if self.shard.upper().element else []

    def end(self) -> None:
        self.release(None)
        for tag in self.shard.tags():
            self.shard.untag(tag)
        for _ in range(4):
            self.merge(False)
            self.step(None)
        assert [one.phase for one in self.shard.erasures().values() if not one.done] == []


@examples(2, of_a_proof=120)
@given(steps=st.lists(STEPS, max_size=25))
def test_what_was_erased_is_nowhere_and_the_rest_is_there(steps: list[tuple[str, object]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        uncompressed(patch)
        run = Run()
        for name, argument in steps:
            getattr(run, name)(argument)
            run.check()
        run.end()
        run.check()
        stored = in_memory(run.world.blob, run.world.consensus)
        left = {key for key in run.erased if where(stored, KEYS[key])}
        assert left == set()
