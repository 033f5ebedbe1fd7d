"""Whoever pauses for longer than any lease goes on afterwards, and misses nothing."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from persist.bindings import Binding, Bindings, Ingester, Minter
from persist.core.errors import Expired
from persist.sources.partition_map import Routes
from persist.sources.routed import RoutedReader, RoutedWriter
from persist.sources.wal import FrontEnd, Replica
from tests.support.clocks import DAY_MS, Machine, World

ROWS = pa.schema([("id", pa.int64())])


class Numbers:
    """A source whose records are their positions."""

    def __init__(self) -> None:
        self.last = 0

    def watermarks(self) -> dict[str, int]:
        return {"": self.last}

    def read(self, partition: str, after: int, upto: int) -> list[pa.Table]:
        found = pa.array(range(after + 1, upto + 1), pa.int64())
        return [pa.table({"id": found, "position": found})]


def pause(world: World, machine: Machine) -> None:
    """So long that every lease has lapsed, as somebody sees who commits meanwhile."""
    other = world.machine()
    for _ in range(3):
        world.pass_ms(DAY_MS)
        for name in machine.client.shards():
            other.shard(name).advance_upper((other.shard(name).upper().element or 0) + 1)


def test_bindings_go_on_after_a_pause() -> None:
    world = World()
    machine = world.machine()
    bindings = Bindings.open(machine.client, "bindings")
    rival = Bindings.open(world.machine().client, "bindings")
    rival.get_binding(1)
    bindings.refresh()
    pause(world, machine)
    assert rival.get_binding(5).time == 4
    assert bindings.get_binding(4) == Binding({"": 5}, 4)


def test_an_ingester_goes_on_after_a_pause() -> None:
    world = World()
    machine, source = world.machine(), Numbers()
    bindings = Bindings.open(machine.client, "bindings")
    numbers = machine.client.create_shard("numbers", ROWS, ["id"])
    ingester = Ingester(bindings, source, numbers)
    for last in (0, 3):
        source.last = last
        Minter(bindings, source.watermarks).tick()
        while ingester.step():
            pass
        assert numbers.count() == last + 1
        world.pass_ms(3 * DAY_MS)


def test_front_ends_and_replicas_go_on_after_a_pause() -> None:
    world = World()
    machine = world.machine()
    log = machine.client.create_shard("log", ROWS, ["id"], history="forever")
    front, replica = FrontEnd(log, "front"), Replica.open(machine.client, "log", "table")
    for count in (1, 2):
        front.write([{"id": count}])
        while replica.step():
            pass
        assert machine.shard("table").count() == count
        world.pass_ms(3 * DAY_MS)


def test_routed_writers_and_readers_go_on_after_a_pause() -> None:
    world = World()
    machine = world.machine()
    for name in ("s0", "s1"):
        machine.client.create_shard(name, ROWS, ["id"], history="forever")
    routes = Routes.open(machine.client, "routes", ["s0", "s1"], by=["id"])
    writer, reader = RoutedWriter(routes, "w"), RoutedReader(routes)
    writer.append([{"id": number} for number in range(9)])
    assert sum(len(event.updates) for event in reader.next_events()) == 9
    world.pass_ms(3 * DAY_MS)
    assert writer.append([{"id": 9}]) == 2
    found = []
    for _ in range(2):  # the first may be told that nobody has asked for too long
        with suppress(Expired):
            found += [event.updates.column("id").to_pylist() for event in reader.next_events()]
    assert found == [[9]]
