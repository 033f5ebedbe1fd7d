"""Commands that are committed together are answered as if each had come alone, and one harms no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pytest

from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_store import NodeCache
from persist.commit.blob_tasks import merged, write_bundles
from persist.commit.commit_plan import Outcome
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.commit.spill_files import SpillWriter
from persist.core import commands as c
from persist.core import invariants
from persist.core.attribute import AttributeKey, AttributeUpdate
from persist.core.audit_log import FUTURE_MS_MAX
from persist.core.errors import Corruption, Expired, InvalidUsage, TokenReused, Unavailable
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, Token, WriterId, mint, token_of_key, writer_of
from persist.core.spill import OUTCOMES
from persist.core.state import Policy, State, initial_state
from persist.core.transitions import writers
from persist.core.transitions.context import Context
from persist.parts import ShardSchema
from tests.support.location import TestClock, client_of, memory_location
from tests.support.shard import NAME, SCHEMA, first_write

NEXT_SCHEMA = ShardSchema(pa.schema([("k", pa.string())]), ("k",)).to_record()
KEY = AttributeKey("ab" * 16)
OTHER = AttributeKey("cd" * 16)
FLUSHING = Policy(overlay_flush_at=1)
READER = ReaderId("r" + "1" * 32)


class AwayBlob(MemoryBlob):
    """A store that can be away. It counts how often it was asked meanwhile."""

    is_away = False
    asked = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self.is_away:
            self.asked += 1
            raise BlobUnavailable("the store is away")
        return super().get_range(key, start, length)


def opened(blob: MemoryBlob | None = None, policy: Policy | None = None) -> Location:
    location = memory_location(blob=blob, policy=policy, clock=TestClock(1_900_000_000_000), small_merges=False)
    location.machine(NAME).create(initial_state(NAME, SCHEMA, location.clock.now_ms()))
    return location


def restarted(location: Location) -> Machine:
    """The machine of a process that has nothing in its caches."""
    return memory_location(
        blob=location.blob, consensus=location.consensus, clock=TestClock(1_900_000_000_000), small_merges=False
    ).machine(NAME)


def together(machine: Machine, *commands: c.Command) -> list[Outcome]:
    """The outcomes of commands that are all queued before the first of them is committed."""
    answers: dict[int, Outcome] = {}
    leads: list[Callable[[], None]] = []
    for number, command in enumerate(commands):
        machine.submit(command, leads.append, partial(answers.__setitem__, number))
    while leads:
        leads.pop(0)()
    return [answers[number] for number in range(len(commands))]


def adds(token: Token, amount: int = 1, key: AttributeKey = KEY) -> c.UpdateAttributes:
    update = AttributeUpdate.accumulate(key, amount)
    return c.UpdateAttributes(writer_of(token), token, (update,), digest=bytes([amount]) * 16)


def flushed(location: Location, machine: Machine) -> c.Flush:
    """The flush of all that the State remembers, as upkeep queues it."""
    writer = SpillWriter(location.versions, location.ids, NodeCache(1_000_000))
    flush = writer.flush(machine.state(), OUTCOMES, FLUSHING)
    assert flush is not None
    return flush


def test_a_bug_that_one_command_meets_is_told_to_its_caller_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who was committed with it was told of it, and nothing of them landed."""
    machine = opened().machine(NAME)
    real = writers.answered_before

    def meets_a_bug(state: State, command: c.Command, context: Context) -> c.Result | None:
        if isinstance(command, c.AdvanceUpper):
            raise ValueError("a bug")
        return real(state, command, context)

    monkeypatch.setattr(writers, "answered_before", meets_a_bug)
    outcomes = together(machine, adds(token_of_key("a")), c.AdvanceUpper(Antichain(1)), adds(token_of_key("b")))
    assert list(map(type, outcomes)) == [c.Done, ValueError, c.Done]
    assert value(machine) == 2


def value(machine: Machine, key: AttributeKey = KEY) -> int | None:
    result = machine.apply(c.ReadAttributes((key,)))
    assert isinstance(result, c.AttributeValues)
    return result.values[key]


TOKENS = {"minted": Token("i" + f"{1_900_000_000_000:012x}7{5:019x}"), "free-form": token_of_key("load-17")}


@pytest.mark.parametrize("token", TOKENS.values(), ids=list(TOKENS))
def test_a_token_that_comes_again_beside_the_flush_of_its_outcome_lands_once(token: Token) -> None:
    location = opened()
    machine = location.machine(NAME)
    machine.apply(adds(token))
    first, flush, again = together(machine, adds(token_of_key("a")), flushed(location, machine), adds(token))
    assert (first, flush, again) == (c.Done(), c.Flushed(True), c.Done())
    assert value(machine) == 2, "one for each token"


@pytest.mark.parametrize("token", TOKENS.values(), ids=list(TOKENS))
def test_a_token_that_comes_with_another_body_beside_the_flush_is_refused(token: Token) -> None:
    location = opened()
    machine = location.machine(NAME)
    machine.apply(adds(token))
    flush, other = together(machine, flushed(location, machine), adds(token, 2))
    assert flush == c.Flushed(True)
    assert isinstance(other, TokenReused)
    assert value(machine) == 1


def test_a_retired_writer_is_not_registered_again_beside_the_flush() -> None:
    location = opened()
    machine = location.machine(NAME)
    writer = mint(WriterId, location.ids)
    machine.apply(c.UpdateAttributes(writer, mint(Token, location.ids), ()))
    machine.apply(c.ExpireWriter(writer))
    flush, again = together(machine, flushed(location, machine), first_write(writer))
    assert flush == c.Flushed(True)
    assert isinstance(again, Expired)


def test_a_key_is_a_new_one_in_the_next_life_also_where_that_begins_in_the_same_group() -> None:
    location = opened()
    machine = location.machine(NAME)
    token = token_of_key("load-17")
    machine.apply(adds(token))
    machine.apply(flushed(location, machine))
    machine.apply(c.Drop())
    ended, begun, again = together(machine, c.Finalise(), c.Recreate(NEXT_SCHEMA), adds(token))
    assert (ended, begun, again) == (c.Finalised(True), c.Done(), c.Done())
    assert value(machine) == 1


ROWS = pa.table({"id": [1, 2, 3], "v": ["a", "b", "c"]})


def test_a_part_that_leaves_by_a_merge_is_not_named_again_beside_it() -> None:
    location = memory_location(policy=Policy(inline_part_bytes_max=0), small_merges=False)
    shard = client_of(location).create_shard("s", ROWS.schema, key=["id"])
    machine = location.machine("s")
    runs = tuple(shard.open_writer().stage(ROWS, None))

    def insert() -> c.Insert:
        token = mint(Token, location.ids)
        return c.Insert(writer_of(token), token, runs)

    machine.apply(insert())
    shard.insert([{"id": 7, "v": "x"}])
    machine.apply(c.AdvanceUpper(Antichain(9)))
    merge = merged(machine.state(), machine.state().trace.batches, location.blob, location.ids)
    assert merge is not None
    applied, again = together(machine, merge, insert())
    assert applied == c.MergeApplied(True)
    assert isinstance(again, InvalidUsage), "its rows would count twice"
    assert shard.snapshot().to_arrow().num_rows == 4


def test_a_part_that_moves_to_a_bundle_is_not_named_again_beside_it() -> None:
    plain = Policy(inline_part_bytes_max=0, plain_parts_max=1_000)
    location = memory_location(policy=plain, small_merges=False)
    shard = client_of(location).create_shard("s", ROWS.schema, key=["id"])
    machine, writer = location.machine("s"), shard.open_writer()
    runs = tuple(run for number in range(3) for run in writer.stage(ROWS.slice(number, 1), None))
    writer.commit_insert(runs)
    few = Policy(plain_parts_max=1)
    state, token = machine.state(), mint(Token, location.ids)
    bundling = write_bundles(location.versions, location.ids, few, state, state.trace.batches[0])
    assert bundling is not None
    applied, again = together(machine, bundling, c.Insert(writer_of(token), token, runs, digest=b"x" * 16))
    assert applied == c.Bundled(True)
    assert isinstance(again, InvalidUsage), "its rows would count twice"
    assert shard.snapshot().to_arrow().num_rows == 3


def test_a_command_that_leads_to_a_state_that_must_not_be_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariants hold the whole commit back. Which command was at fault shows when each is tried by itself."""
    machine, real = opened().machine(NAME), invariants.check_step

    def check_step(old: State, new: State) -> None:
        real(old, new)
        if new.upper == Antichain(13):
            raise Corruption("a check failed")

    monkeypatch.setattr(invariants, "check_step", check_step)
    *others, wrong, last = together(machine, *neighbours()[:2], c.AdvanceUpper(Antichain(13)), neighbours()[2])
    assert isinstance(wrong, Corruption)
    assert [type(other) for other in (*others, last)] == [c.Appended, c.ReaderRegistered, c.Done]


def neighbours() -> list[c.Command]:
    """Commands that need nothing of the blob store."""
    return [c.AdvanceUpper(Antichain(5)), c.RegisterReader(READER, None, 60_000), adds(token_of_key("new"), 1, OTHER)]


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "damaged"])
def test_a_file_of_outcomes_that_cannot_be_read_fails_only_who_needs_it(is_gone: bool) -> None:
    location = opened()
    machine = location.machine(NAME)
    machine.apply(adds(TOKENS["minted"]))
    machine.apply(flushed(location, machine))
    [file] = machine.state().files_of(OUTCOMES)
    size = len(location.blob.get(file.key))
    location.blob.delete([file.key])
    if not is_gone:
        location.blob.put(file.key, bytes(size))
    again, *others = together(restarted(location), adds(TOKENS["minted"]), *neighbours())
    assert isinstance(again, Corruption)
    assert ("has lost a blob of its metadata" in again.message) == is_gone
    assert [type(other) for other in others] == [c.Appended, c.ReaderRegistered, c.Done]


def test_a_store_that_is_away_fails_only_who_needs_it_and_is_asked_once() -> None:
    blob = AwayBlob("mem:")
    location = opened(blob)
    machine = location.machine(NAME)
    tokens = [Token("i" + f"{1_900_000_000_000:012x}7{number:019x}") for number in range(20)]
    for token in tokens:
        machine.apply(adds(token))
    machine.apply(flushed(location, machine))
    fresh = restarted(location)
    fresh.refresh()
    blob.is_away = True
    later = adds(Token(f"i{1_900_000_000_000 + FUTURE_MS_MAX // 2:012x}7{'1' * 19}"), 1, OTHER)
    outcomes = together(fresh, *neighbours()[:2], *map(adds, tokens), later)
    assert [type(outcome) for outcome in outcomes] == [c.Appended, c.ReaderRegistered, *[Unavailable] * 20, c.Done]
    assert blob.asked <= 2, "once for the group, and once to find out for whom"


def test_a_damaged_index_of_attributes_fails_only_who_needs_it() -> None:
    location = opened()
    machine = location.machine(NAME)
    machine.apply(adds(token_of_key("a")))
    index = AttributeIndex(location.blob, location.ids, NodeCache(1_000_000))
    machine.apply(index.flush(machine.state()))
    [chunk] = machine.state().attribute_chunks.values()
    data = location.blob.get(chunk.key)
    location.blob.delete([chunk.key])
    location.blob.put(chunk.key, bytes(len(data)))
    replaced = c.UpdateAttributes(
        writer_of(token_of_key("b")), token_of_key("b"), (AttributeUpdate.replace(KEY, 7),), digest=b"b" * 16
    )
    outcomes = together(restarted(location), adds(token_of_key("c")), *neighbours()[:2], replaced)
    assert isinstance(outcomes[0], Corruption)
    assert [type(outcome) for outcome in outcomes[1:]] == [c.Appended, c.ReaderRegistered, c.Done]
