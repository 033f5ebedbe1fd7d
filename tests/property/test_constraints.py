"""Rivals who write to a shard with unique keys and a check, each between the look and the commit of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.worker import Worker
from persist import ConstraintViolated, Shard
from persist.client.write import WriteHandle
from tests.support.clocks import World

COLUMNS = pa.schema([("id", pa.int64()), ("n", pa.int64())])
Update = tuple[int, int, int]  # key, value, diff
Model = Counter[tuple[int, int]]
Step = tuple[str, Sequence[Update]]

keys = st.integers(0, 3)
added = st.tuples(keys, st.integers(-1, 2), st.sampled_from([1, 1, 2]))
removed = st.tuples(keys, st.integers(0, 2), st.just(-1))
single = st.lists(st.tuples(keys, st.integers(-1, 2), st.just(1)), min_size=1, max_size=3, unique_by=lambda row: row[0])
sound = st.lists(st.tuples(keys, st.integers(0, 2), st.just(1)), min_size=1, max_size=2)
some = st.lists(st.one_of(added, removed), min_size=1, max_size=3)
enforcing = st.one_of(
    st.tuples(st.sampled_from(["insert", "compare_and_append"]), some), st.tuples(st.just("upsert"), single)
)
stories = st.lists(st.tuples(enforcing, st.none() | enforcing), max_size=6)


def crowded(model: Model) -> set[int]:
    counts: Counter[int] = Counter()
    for (key, _), count in model.items():
        counts[key] += max(count, 0)
    return {key for key, count in counts.items() if count > 1}


def after(model: Model, step: Step) -> Model | None:
    """The contents after the step; None: it is refused."""
    verb, rows = step
    if any(value < 0 and diff > 0 for _, value, diff in rows):
        return None
    found, gains = Counter(model), {key for key, _, diff in rows if diff > 0}
    if verb == "upsert":
        found = Counter({row: count for row, count in found.items() if row[0] not in gains})
    for key, value, diff in rows:
        found[key, value] += diff
    return None if verb != "by hand" and gains & crowded(found) else found


def do(shard: Shard, step: Step) -> None:
    verb, rows = step
    given = [{"id": key, "n": value, "__diff": diff} for key, value, diff in rows]
    if verb == "upsert":
        shard.upsert([{"id": key, "n": value} for key, value, _ in rows])
    elif verb == "insert":
        shard.insert(given)
    elif verb == "compare_and_append":
        upper = shard.view().upper.element
        assert upper is not None
        shard.compare_and_append(given, upper, upper + 1)
    else:
        with closing(shard.open_writer()) as writer:
            writer.commit_insert(writer.stage(given, None))


@dataclass
class Story:
    """A shard, and what it has to hold."""

    shard: Shard
    model: Model = field(default_factory=Counter)

    def run(self, step: Step) -> None:
        """Raises AssertionError unless it is refused or written as the model says."""
        expected = after(self.model, step)
        try:
            do(self.shard, step)
        except ConstraintViolated:
            assert expected is None, step
            return
        assert expected is not None, step
        self.model = expected

    def check(self) -> None:
        rows = self.shard.snapshot().to_arrow().to_pylist() if self.shard.view().upper.element else []
        assert {(row["id"], row["n"]): row["__diff"] for row in rows} == {
            row: count for row, count in self.model.items() if count
        }
        found = self.shard.broken_constraints()
        assert [one.keys for one in found] == [[(key,) for key in sorted(crowded(self.model))]][: len(found)]
        assert bool(found) == bool(crowded(self.model))


def new_story(world: World) -> Story:
    checks = {"not-less": "n >= 0"}
    return Story(world.machine().client.create_shard("s", COLUMNS, ["id"], unique=True, checks=checks))


def tell(story: list[tuple[Step, Step | None]]) -> None:
    """A step at a time, with its rival between its look and its commit."""
    place = new_story(World())
    rivals: list[Step] = []
    commit = WriteHandle.commit_rewrite

    def interrupted(self: WriteHandle, *given: Any, **parts: Any) -> Any:
        if rivals:
            place.run(rivals.pop())
        return commit(self, *given, **parts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WriteHandle, "commit_rewrite", interrupted)
        for step, rival in story:
            if rival is not None and "compare_and_append" not in (step[0], rival[0]):
                rivals.append(rival)
            try:
                do(place.shard, step)
                happened = True
            except ConstraintViolated:
                happened = False
            expected = after(place.model, step)  # as if it had run after the rival, where that came between
            assert happened == (expected is not None), step
            place.model = place.model if expected is None else expected
            while rivals:
                place.run(rivals.pop())
            assert not crowded(place.model)
    place.check()


@given(stories)
def test_no_key_gets_a_second_row_whoever_comes_between(story: list[tuple[Step, Step | None]]) -> None:
    tell(story)


def test_a_build_that_does_not_look_at_what_came_between_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.client.dml_plans.BoundVerb.concerns", lambda *_: False)
    story: list[tuple[Step, Step | None]] = [
        (("insert", [(0, 0, 1)]), None),
        (("insert", [(1, 1, 1)]), ("insert", [(1, 2, 1)])),
    ]
    with pytest.raises(AssertionError):
        tell(story)
    monkeypatch.undo()
    tell(story)


@given(st.lists(st.one_of(enforcing, st.tuples(st.just("by hand"), sound)), max_size=6))
def test_what_others_do_is_found_and_nothing_else(story: list[Step]) -> None:
    world = World()
    place = new_story(world)
    for step in story:
        place.run(step)
        place.check()
    worker = Worker(world.machine().location)
    worker.run("s", idle=True)
    if not any(verb == "by hand" for verb, _ in story):
        assert worker.metrics.counters.crowded_keys == 0
    place.check()
