"""Whatever is committed, the State that a process keeps is the one that others read from the stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from persist.client.shard import Shard
from persist.commit.blob_tasks import merged
from persist.commit.location_identity import raise_format
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, Token, WriterId, mint, token_of_key
from persist.core.state import Policy
from persist.formats.state_frames import Build
from tests.support.clocks import HOUR_MS, Machine, World
from tests.support.examples import examples

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])
POLICY = Policy(inline_part_bytes_max=0, rollup_every=5, outcomes_flush_at=3)
NEXT = Build(formats=(1, 2))


def upper(process: Machine) -> int:
    return process.shard(NAME).upper().element or 0


def insert(process: Machine, number: int) -> None:
    process.shard(NAME).insert([{"id": number}])


def insert_by_key(process: Machine, number: int) -> None:
    process.shard(NAME).insert([{"id": number}], token=token_of_key(f"{number}"))


def append_over(process: Machine, number: int) -> None:
    """Of times of which the shard has some, perhaps by inserts."""
    first = max(0, upper(process) - number)
    process.shard(NAME).append([{"id": number, "__time": first}], first, first + 2)


def write_once(process: Machine, number: int) -> None:
    """By a writer that is registered, writes, and is retired; or whose lease lapses later."""
    location = process.location
    machine, writer = location.machine(NAME), mint(WriterId, location.ids)
    machine.apply(c.RegisterWriter(writer, HOUR_MS))
    machine.apply(c.UpdateAttributes(writer, mint(Token, location.ids), ()))
    if number % 2:
        machine.apply(c.ExpireWriter(writer))


def read(process: Machine, number: int) -> None:
    machine = process.location.machine(NAME)
    machine.apply(c.RegisterReader(mint(ReaderId, process.location.ids), None, HOUR_MS * number + 1))


def tag(process: Machine, number: int) -> None:
    machine = process.location.machine(NAME)
    machine.apply(c.SetTag(f"t{number}", max(0, upper(process) - 1 - number)))
    machine.apply(c.HoldPoint(mint(ReaderId, process.location.ids), HOUR_MS, tag=f"t{number}"))
    if number % 2:
        machine.apply(c.RemoveTag(f"t{number}"))


def forget(process: Machine, number: int) -> None:
    process.shard(NAME).forget(max(0, upper(process) - 1 - number))


def wait(process: Machine, number: int) -> None:
    process.world.pass_ms(number * HOUR_MS // 2)
    process.location.machine(NAME).apply(c.AdvanceUpper(Antichain(upper(process) + 1)))


def merge(process: Machine, number: int) -> None:
    location = process.location
    state = location.machine(NAME).refresh()
    result = merged(state, state.trace.batches[-number - 2 :], location.blob, location.ids)
    if result is not None:
        location.machine(NAME).apply(result)


def sweep(process: Machine, number: int) -> None:
    process.location.machine(NAME).apply(c.RefuseStagedBefore(process.clock.now_ms() - number * HOUR_MS))


def live_again(process: Machine, number: int) -> None:
    process.shard(NAME).drop(force=True)
    process.client.create_shard(NAME, SCHEMA, ["id"])


def upgrade(process: Machine, number: int) -> None:
    raise_format(process.location.blob, NEXT)


STEPS: list[Callable[[Machine, int], None]] = [
    insert, insert, insert_by_key, append_over, write_once, write_once, read, tag, forget, wait, merge, sweep,
    live_again, upgrade,
]  # fmt: skip


@examples(1.2)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS), st.integers(0, 4)), min_size=1, max_size=16))
def test_what_a_process_keeps_is_what_others_read(
    steps: list[tuple[bool, Callable[[Machine, int], None], int]],
) -> None:
    world = World(Build(), POLICY)
    shard: Shard = world.machine().client.create_shard(NAME, SCHEMA, ["id"])
    shard.insert([{"id": 0}])
    world.build = NEXT
    processes = [world.machine(), world.machine()]
    for of_first, step, number in steps:
        process = processes[of_first]
        with suppress(PersistError):
            step(process, number)
        kept = process.location.machine(NAME).cached
        read = world.machine().location.machine(NAME).refresh()
        assert kept is None or kept == read or kept.seqno < read.seqno
        assert all(other.location.machine(NAME).refresh() == read for other in processes)
