"""Rivals who mint bindings in one shard, beside a model that is as naive as can be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from compactor.embedded import maintain
from consensus.memory_logs import MemoryConsensus
from persist.bindings import Binding, Bindings, BindingsSettings
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.core.errors import Indeterminate, Unavailable
from tests.support.location import AscendingIds, memory_location

PARTITIONS = ["a", "b", "c"]
SMALL = BindingsSettings(whole_every_rows=4, known_rows_max=6)


class Processes:
    """Clients of one location in memory, each as if in a process of its own."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob("mem:"), MemoryConsensus("mem:")
        self.opened = 0

    def client(self) -> Client:
        self.opened += 1
        ids = AscendingIds(self.opened)
        return Client(EmbeddedTransport(memory_location(blob=self.blob, consensus=self.consensus, ids=ids), maintain))


class Model:
    """All bindings ever minted, in order. Every question is answered by going through them."""

    def __init__(self) -> None:
        self.minted: list[tuple[dict[str, int], int]] = []
        self.upper = 0

    def stands(self, time: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for positions, at in self.minted:
            if at <= time:
                found |= {name: max(position, found.get(name, -1)) for name, position in positions.items()}
        return found

    def time_of(self, partition: str, position: int) -> int | None:
        for positions, at in self.minted:
            if positions.get(partition, -1) >= position:
                return at
        return None

    def binding(self, asked: dict[str, int]) -> Binding:
        """The answer to `get_binding`, which mints at the next time where it must."""
        heads = self.stands(self.upper)
        moved = {name: position for name, position in asked.items() if position > heads.get(name, -1)}
        if moved:
            self.minted.append((moved, self.upper))
            self.upper += 1
        times = [self.time_of(name, position) for name, position in asked.items()]
        last = max(time for time in times if time is not None)
        stands = self.stands(last)
        return Binding({name: stands[name] for name in asked}, last)


class Disturbed:
    """A writer before whose commits somebody else acts, or whose answers are lost."""

    def __init__(self, writer: Any, act: Callable[[], None], chosen: random.Random) -> None:
        self._writer, self._act, self._chosen = writer, act, chosen

    def compare_and_append(self, *args: Any) -> Any:
        fate = self._chosen.random()
        if fate < 0.3:
            self._act()
        if fate > 0.9:
            raise Indeterminate("the answer was lost, and so was the request")
        if 0.85 < fate < 0.87:
            raise Unavailable("nobody answers")
        found = self._writer.compare_and_append(*args)
        if fate > 0.8:
            raise Indeterminate("the answer was lost")
        return found

    def close(self) -> None:
        self._writer.close()


class Minters:
    """A story of rivals by its seed."""

    def __init__(self, seed: int, rivals: int = 3) -> None:
        self.chosen = random.Random(seed)
        self.processes = Processes()
        self.model = Model()
        self.disturbing = False
        self.rivals = [self.opened() for _ in range(rivals)]

    def opened(self) -> Bindings:
        found = Bindings.open(self.processes.client(), "bindings", settings=SMALL)
        found._writer = Disturbed(found._writer, self.disturb, self.chosen)  # type: ignore[assignment]
        return found

    def asked(self) -> dict[str, int]:
        names = self.chosen.sample(PARTITIONS, self.chosen.randint(1, len(PARTITIONS)))
        far = 5 + 2 * len(self.model.minted)
        return {name: self.chosen.randrange(far) for name in names}

    def disturb(self) -> None:
        """A rival binds something while another one is about to."""
        if not self.disturbing:
            self.disturbing = True
            try:
                fresh = Bindings.open(self.processes.client(), "bindings", settings=SMALL)
                asked = self.asked()
                assert fresh.get_binding(asked) == self.model.binding(asked)
            finally:
                self.disturbing = False

    def act(self) -> None:
        number = self.chosen.randrange(len(self.rivals))
        rival, what = self.rivals[number], self.chosen.random()
        if what < 0.1:  # it is killed, and another one starts
            self.rivals[number] = self.opened()
        elif what < 0.6:
            self.bind(rival)
        elif what < 0.8:
            name = self.chosen.choice(PARTITIONS)
            positions = [self.chosen.randrange(5 + 2 * len(self.model.minted)) for _ in range(5)]
            expected = [self.model.time_of(name, position) for position in positions]
            assert rival.times_of(name, pa.array(positions)).to_pylist() == expected
        elif self.model.upper:
            time = self.chosen.randrange(-1, self.model.upper)
            assert rival.upto(time) == self.model.stands(time)

    def bind(self, rival: Bindings) -> None:
        asked = self.asked()
        for _ in range(20):  # until somebody answers
            try:
                found = rival.get_binding(asked)
                break
            except Unavailable:
                continue
        # What a disturbing rival has minted meanwhile came first, so the model takes ours now.
        assert found == self.model.binding(asked)

    def check(self) -> None:
        """A process that knows nothing answers as the model."""
        fresh = Bindings.open(self.processes.client(), "bindings", settings=SMALL)
        assert fresh.upper == self.model.upper
        assert fresh.heads == self.model.stands(self.model.upper)
        for name in PARTITIONS:
            far = range(8 + 2 * len(self.model.minted))
            assert fresh.times_of(name, list(far)).to_pylist() == [self.model.time_of(name, at) for at in far]
