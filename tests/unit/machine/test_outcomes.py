"""Outcomes of tokens: known for their time in the State, in files, after restarts, and by files that took others in."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import InvalidUsage, OutcomeForgotten
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, Token, WriterId, token_of_key, writer_of
from persist.core.spill import OUTCOMES
from persist.core.state import Policy, initial_state
from persist.maintenance.collector import Collector
from persist.parts import ShardSchema
from tests.support.location import AscendingIds, TestClock, memory_location
from tests.support.shard import NAME, first_write

SCHEMA = ShardSchema(pa.schema([("k", pa.string())]), ("k",)).to_record()
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
POLICY = Policy(overlay_flush_at=20)


def minted(now_ms: int, number: int) -> Token:
    return Token(f"i{now_ms:012x}7{number:019x}")


def command(token: Token, body: int = 0) -> c.UpdateAttributes:
    return c.UpdateAttributes(writer_of(token), token, (), digest=bytes([body]) * 16)


class ClockIds(AscendingIds):
    """Ids that tell the time at which they were made, as those of version 7 do."""

    def __init__(self, clock: TestClock, origin: int) -> None:
        super().__init__(origin)
        self._clock = clock

    def uuid7(self) -> str:
        return f"{self._clock.now_ms():012x}{super().uuid7()[12:]}"


class World:
    """One location, and processes of it that come and go. Its clock begins in 2030."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.clock = TestClock(1_900_000_000_000)
        self.policy = policy
        blob = MemoryBlob("mem:", now_ms=self.clock.now_ms)
        self.first = memory_location(
            blob=blob, clock=self.clock, ids=ClockIds(self.clock, 1), policy=policy, compares_clock=True
        )
        self.first.machine(NAME).create(initial_state(NAME, SCHEMA, self.clock.now_ms()))
        self.processes = 1

    def restarted(self, clock: TestClock | None = None) -> Machine:
        """A process that starts now; `clock`: of its machine."""
        self.processes += 1
        location: Location = memory_location(
            blob=self.first.blob,
            consensus=self.first.consensus,
            clock=clock or self.clock,
            ids=ClockIds(clock or self.clock, self.processes),
            policy=self.policy,
            compares_clock=True,
        )
        return location.machine(NAME)

    def pass_days(self, machine: Machine, days: int) -> None:
        """Any commit moves the lease clock, and has upkeep look."""
        for _ in range(days):
            self.clock.advance_ms(DAY_MS)
            machine.apply(c.AdvanceUpper(Antichain((machine.state().upper.element or 0) + 1)))


def test_a_thousand_tokens_are_known_after_a_restart_and_a_new_one_is_not() -> None:
    world, chance = World(), random.Random(7)
    machine = world.first.machine(NAME)
    tokens = []
    for number in range(1_000):
        world.clock.advance_ms(chance.randrange(60_000))
        token = token_of_key(f"load-{number}") if number % 2 else minted(world.clock.now_ms(), chance.getrandbits(70))
        tokens.append(token)
        machine.apply(command(token, number % 200 + 1))
        assert len(machine.state().outcomes) <= 20
    files = machine.state().files_of(OUTCOMES)
    assert len(files) < 16, "files take in newer ones"
    assert sum(file.count for file in files) + len(machine.state().outcomes) == 1_000
    again = world.restarted()
    seqno = again.refresh().seqno
    for number, token in enumerate(tokens):
        again.apply(command(token, number % 200 + 1))
        with pytest.raises(InvalidUsage, match="has landed"):
            again.apply(command(token, 255))
    assert again.refresh().seqno == seqno, "nothing was written"
    again.apply(command(token_of_key("load-1001")))
    assert again.refresh().seqno > seqno


def test_what_was_kept_for_its_time_is_forgotten_and_its_blobs_leave_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persist.commit.cached_state.LEASE_STEP_MS_MAX", DAY_MS)
    world = World()
    machine = world.first.machine(NAME)
    tokens = [minted(world.clock.now_ms(), number) for number in range(20)]
    keys = [token_of_key(f"{number}") for number in range(20)]
    for token in (*tokens, *keys):
        machine.apply(command(token, 1))
    for day in range(1, 7):
        world.clock.advance_ms(DAY_MS)
        machine.apply(c.AdvanceUpper(Antichain(day)))  # any commit moves the lease clock, and has upkeep look
    for token in (*tokens, *keys):
        assert world.restarted().apply(command(token, 1)) == c.Done()
    for day in (7, 8, 9):
        world.clock.advance_ms(DAY_MS)
        machine.apply(c.AdvanceUpper(Antichain(day)))
    assert machine.state().files_of(OUTCOMES) == ()
    for token in tokens:
        with pytest.raises(OutcomeForgotten, match="no longer known"):
            world.restarted().apply(command(token, 1))
    assert machine.apply(command(keys[0], 2)) == c.Done(), "a free-form key is a new one"
    fresh = minted(world.clock.now_ms(), 99)
    assert machine.apply(command(fresh, 1)) == c.Done()


def test_a_token_of_an_ended_life_is_refused_by_every_later_one() -> None:
    """Its clock was ahead by an hour. The second life had moved it to a file, and the third one let it land."""
    world = World()
    machine, token = world.first.machine(NAME), minted(1_900_003_600_000, 1)
    machine.apply(command(token, 1))
    for life in range(1, 4):
        machine.apply(c.Drop(force=True))
        machine.create(initial_state(NAME, SCHEMA, world.clock.now_ms()))
        assert machine.state().incarnation == life
        for number in range(30):
            world.clock.advance_ms(1)
            machine.apply(command(minted(world.clock.now_ms(), 100 * life + number), 1))
        assert sum(file.count for file in machine.state().files_of(OUTCOMES)) >= 19, "and there are tokens of its own"
        with pytest.raises(OutcomeForgotten, match="than a drop of the shard"):
            world.restarted().apply(command(token, 1))


def test_ids_from_the_future_hold_up_nobody_when_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine of 2099 made a shard take no new writer and no new token, for ever."""
    monkeypatch.setattr("persist.commit.cached_state.LEASE_STEP_MS_MAX", DAY_MS)
    world = World()
    machine, future = world.first.machine(NAME), TestClock(4_070_908_800_000)
    wrong = world.restarted(future)
    for number in range(20):
        wrong.apply(command(minted(future.now_ms(), number), 1))
    machine.refresh()
    world.pass_days(machine, 9)
    assert (machine.state().files_of(OUTCOMES), machine.state().outcomes) == ((), {})
    assert machine.state().forgotten_ms <= world.clock.now_ms()
    assert machine.apply(command(minted(world.clock.now_ms(), 99), 1)) == c.Done()
    writer = WriterId(f"w{world.clock.now_ms():012x}7{1:019x}")
    assert machine.apply(first_write(writer)) == c.Done()


@pytest.mark.parametrize("dropper_off_ms", [-365 * DAY_MS, -HOUR_MS, 0, HOUR_MS, 365 * DAY_MS])
@pytest.mark.parametrize("minter_off_ms", [-HOUR_MS, 0, 2_000, HOUR_MS])
def test_a_drop_ends_the_tokens_of_this_life_and_no_others_by_whichever_clock(
    dropper_off_ms: int, minter_off_ms: int
) -> None:
    """By a slow clock a token landed again in the next life. By a fast one nobody's token did."""
    world = World()
    machine = world.first.machine(NAME)
    token = minted(world.clock.now_ms() + minter_off_ms, 5)
    machine.apply(command(token, 1))
    world.clock.advance_ms(60_000)
    dropper = world.restarted(TestClock(world.clock.now_ms() + dropper_off_ms))
    dropper.apply(c.Drop())
    dropper.create(initial_state(NAME, SCHEMA, world.clock.now_ms()))
    machine.refresh()
    with pytest.raises(OutcomeForgotten, match="or than a drop of the shard"):
        machine.apply(command(token, 1))
    world.clock.advance_ms(1)
    assert machine.apply(command(minted(world.clock.now_ms(), 6), 1)) == c.Done()


def test_a_collector_that_asked_for_the_stores_time_before_ends_the_tokens_that_came_since() -> None:
    """It took that time again for a minute: of the tokens born since then only some were known in the next life."""
    world = World()
    machine, collector = world.first.machine(NAME), Collector(world.first)
    other = memory_location(blob=world.first.blob, consensus=world.first.consensus, clock=world.clock)
    other.machine("earlier").create(initial_state("earlier", SCHEMA, world.clock.now_ms()))
    other.machine("earlier").apply(c.Drop())
    collector.run("earlier")
    tokens = []
    for number in range(40):  # twenty of them, at least, are in a file
        world.clock.advance_ms(1_000)
        tokens.append(minted(world.clock.now_ms(), number))
        machine.apply(command(tokens[-1], 1))
    assert machine.state().files_of(OUTCOMES)
    machine.apply(c.Drop())
    collector.run(NAME)
    machine.create(initial_state(NAME, SCHEMA, world.clock.now_ms()))
    for token in tokens:
        with pytest.raises(OutcomeForgotten, match="or than a drop of the shard"):
            machine.apply(command(token, 1))


def test_time_in_which_a_commit_looks_things_up_counts_once() -> None:
    """It was counted by the commit and by the one after it: a lease of 15 minutes ended after 8."""
    world = World()
    machine = world.first.machine(NAME)
    for number in range(40):
        machine.apply(command(minted(world.clock.now_ms(), number), 1))
    reader, known = ReaderId("r" + "0" * 31 + "1"), machine._known

    def slowly(*arguments: Any) -> Any:
        world.clock.advance_ms(500)
        return known(*arguments)

    machine._known = slowly  # type: ignore[method-assign]
    machine.apply(c.RegisterReader(reader, None, 60_000, "x"))
    begun_ms, lease_ms = world.clock.now_ms(), machine.state().lease_clock_ms
    while reader in machine.state().leased_readers:
        machine.apply(c.AdvanceUpper(Antichain((machine.state().upper.element or 0) + 1)))
        world.clock.advance_ms(50)
        assert machine.state().lease_clock_ms - lease_ms <= world.clock.now_ms() - begun_ms
    assert world.clock.now_ms() - begun_ms >= 60_000


def test_a_process_that_was_away_while_files_were_merged_and_collected_still_answers() -> None:
    world = World()
    machine, sleeper = world.first.machine(NAME), world.restarted()
    for number in range(20):
        machine.apply(command(token_of_key(f"{number}"), 1))
    old = sleeper.refresh().files_of(OUTCOMES)
    for number in range(20, 60):
        machine.apply(command(token_of_key(f"{number}"), 1))
    assert old[0] not in machine.state().files_of(OUTCOMES)
    world.first.blob.delete([file.key for file in old])
    assert sleeper.apply(command(token_of_key("3"), 1)) == c.Done()
