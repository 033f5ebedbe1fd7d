"""What maintenance brings is checked as what writers bring: a merge that is not sound harms only itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from persist.client.shard import Shard
from persist.commit.blob_tasks import write_bundles
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR, part_key, rollup_key
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import PartId, SeqNo, Token, WriterId, mint
from persist.core.record import replace
from persist.core.state import Policy
from persist.parts.codec import encode_inline
from tests.support.location import client_of, memory_location

ROWS = pa.table({"id": [1, 2, 3], "v": ["a", "b", "c"]})
TWICE = ROWS.append_column("__diff", pa.array([2, 2, 2]))
SCHEMA = pa.schema([("id", pa.int64()), pa.field("v", pa.string(), nullable=False)])
POLICY = Policy(inline_part_bytes_max=0)
BUNDLING = Policy(plain_parts_max=1)
CLAIM, WORKER = "merge:0", "me"


@dataclass
class Place:
    """A shard of two equal parts, of which an earlier one has left it, so that it remembers which."""

    location: Location
    shard: Shard

    @classmethod
    def made(cls) -> Place:
        location = memory_location(policy=POLICY, small_merges=False)
        shard = client_of(location).create_shard("s", SCHEMA, key=["id"])
        place = cls(location, shard)
        shard.insert(ROWS)
        shard.downgrade_since(0)
        merge = c.MergeResult(place.inputs(), (Run((place.output(ROWS),)),), Antichain(0))
        assert place.machine.apply(merge) == c.MergeApplied(True)
        shard.insert(ROWS)
        shard.downgrade_since(1)
        assert place.machine.state().left
        return place

    @property
    def machine(self) -> Any:
        return self.location.machine("s")

    def inputs(self) -> tuple[str, ...]:
        return tuple(part.id for part in self.machine.state().trace.parts())

    def output(self, rows: pa.Table = TWICE) -> Part:
        """A part of these rows, as a worker writes it."""
        [run] = self.shard.open_writer().stage_for_one_commit(rows, 0)
        staged = run.parts[0].without_receipt()
        name = mint(PartId, self.location.ids)
        key = part_key(self.machine.state().shard_id, COMPACTOR, name)
        self.location.blob.put(key, self.location.blob.get(staged.key or ""))
        return replace(staged, id=name, key=key)

    def inline(self) -> Part:
        rows = self.shard.schema.conform(pa.table({"id": [1], "v": ["a"], "__diff": [6]}), 0)
        return encode_inline(rows, self.shard.schema, 1, mint(PartId, self.location.ids))

    def insert(self) -> c.Insert:
        writer = mint(WriterId, self.location.ids)
        return c.Insert(writer, mint(Token, self.location.ids), (Run((self.inline(),)),))

    def merging(self, output: Part) -> c.Command:
        return c.MergeResult(self.inputs(), (Run((output,)),), Antichain(1))

    def saving(self, output: Part) -> c.Command:
        claim = c.HoldClaim(CLAIM, WORKER, 60_000, self.inputs())
        self.machine.apply(claim)
        return replace(claim, done=(output,))

    def refused(self, command: c.Command, message: str) -> None:
        """The command is refused, and an insert that is committed with it lands."""
        before = self.machine.refresh()
        with pytest.raises(InvalidUsage, match=message):
            self.machine.apply(command)
        assert self.machine.refresh() == before
        outcomes: list[object] = []
        leads: list[Callable[[], None]] = []
        for one in (self.insert(), command):
            self.machine.submit(one, leads.append, outcomes.append)
        for lead in leads:
            lead()
        assert [type(outcome) for outcome in outcomes] == [c.Appended, InvalidUsage]


BRINGING = {"merge": Place.merging, "progress": Place.saving}

ODD_IDS = ["", "p", "pzz", "x" * 40, "p" + "0" * 31, "../../etc", "p" + "A" * 32, "\x00", "p" + "0" * 32 + "\n"]

ODD: dict[str, tuple[dict[str, Any], str]] = {
    "key and data": ({"data": b"x"}, "either a blob key or inline bytes"),
    "no key": ({"key": None}, "either a blob key or inline bytes"),
    "no part's key": ({"key": "nowhere"}, "does not belong to shard"),
    "no rows": ({"rows": 0}, "no rows"),
    "schema": ({"schema_id": 9}, "no schema 9"),
    "count": ({"given": -5}, "a time, a clip or a count"),
    "time": ({"time": 1, "time_min": 1, "time_max": 1}, "a time, a clip or a count"),
    "time to come": ({"time": 99, "time_min": 99, "time_max": 99}, "a time, a clip or a count"),
    "clip": ({"clip": 0}, "a time, a clip or a count"),
    "clip of all": ({"clip": 5, "diff_sum": None}, "a time, a clip or a count"),
    "times turned": ({"time_min": 7, "time_max": 3}, "times in"),
    "times below": ({"time_min": -1}, "times in"),
    "times beyond": ({"time_max": TIME_MAX + 1}, "times in"),
}


@pytest.mark.parametrize("brings", BRINGING.values(), ids=list(BRINGING))
@pytest.mark.parametrize("odd", ODD_IDS)
def test_an_id_that_is_none_is_refused(brings: Callable[[Place, Part], c.Command], odd: str) -> None:
    """It was told by a ValueError, also to those who were committed with it, or it stayed in the State."""
    place = Place.made()
    place.refused(brings(place, replace(place.inline(), id=odd)), "PartId is")


@pytest.mark.parametrize("brings", BRINGING.values(), ids=list(BRINGING))
@pytest.mark.parametrize("what", ODD)
def test_what_no_merge_writes_is_refused(brings: Callable[[Place, Part], c.Command], what: str) -> None:
    place = Place.made()
    changes, message = ODD[what]
    place.refused(brings(place, replace(place.output(), **changes)), message)


@pytest.mark.parametrize("brings", BRINGING.values(), ids=list(BRINGING))
def test_inline_bytes_of_another_length_are_refused(brings: Callable[[Place, Part], c.Command]) -> None:
    place = Place.made()
    place.refused(brings(place, replace(place.inline(), size=1)), "but its size is 1")


def test_what_merges_write_is_taken() -> None:
    place = Place.made()
    assert place.machine.apply(place.saving(place.output())).granted
    assert place.machine.apply(c.ReleaseClaim(CLAIM, WORKER)) == c.Done()
    assert place.machine.apply(place.merging(place.output())) == c.MergeApplied(True)
    assert place.machine.apply(place.merging(place.inline())) == c.MergeApplied(True)
    assert place.shard.snapshot().to_arrow().to_pylist() == [{"id": 1, "v": "a", "__diff": 6}]


def test_the_copy_of_a_part_has_an_id_and_one_place() -> None:
    place = Place.made()
    old = next(iter(place.machine.state().trace.parts()))
    place.refused(c.ReplacePart(old.id, replace(old, id="p")), "PartId is")
    place.refused(c.ReplacePart(old.id, replace(old, key=None, id=place.output().id)), "either a blob key or inline")
    copy = place.output()
    place.location.blob.delete([copy.key])
    place.location.blob.put(copy.key, place.location.blob.get(old.key))
    copy = replace(old, id=copy.id, key=copy.key)
    assert place.machine.apply(c.ReplacePart(old.id, copy)) == c.PartReplaced(old)


def test_the_id_of_a_bundle_is_one() -> None:
    """`w…/p…` ends the key of the bundle as its id does."""
    place = Place.made()
    writer = place.shard.open_writer()
    runs = [run for _ in range(2) for run in writer.stage_for_one_commit(ROWS, None)]
    writer.commit_insert(runs)
    state = place.machine.refresh()
    made = write_bundles(place.location.versions, place.location.ids, BUNDLING, state, state.trace.batches[-1])
    assert made is not None
    [[bundle]] = [run.parts for run in made.outputs]
    odd = replace(bundle, id=bundle.key.split("/", 1)[1].removesuffix(".bundle"))
    place.refused(replace(made, outputs=(Run((odd,)),)), "PartId is")
    assert place.machine.apply(made) == c.Bundled(True)


def test_only_a_rollup_of_its_state_is_named_as_one() -> None:
    """The key of a part was, and no other process could read the shard any more."""
    place = Place.made()
    state = place.machine.refresh()
    part = next(iter(state.trace.blob_keys))
    there, size = place.location.versions.write_rollup(state)
    missing = rollup_key(state.shard_id, state.seqno, place.location.ids)
    place.refused(c.AddRollup(state.seqno, part, 3), "is not the key of a rollup of v")
    place.refused(c.AddRollup(SeqNo(state.seqno - 1), there, size), "is not the key of a rollup of v")
    place.refused(c.AddRollup(state.seqno, missing, 3), "is not there; write it again")
    assert place.machine.apply(c.AddRollup(state.seqno, there, size)) == c.RollupAdded(True)
    other = memory_location(blob=place.location.blob, consensus=place.location.consensus, clock=place.location.clock)
    assert other.machine("s").refresh() == place.machine.refresh()
