"""Clients of one location in memory, each as if in a process of its own."""

from __future__ import annotations

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.bindings import Bindings
from persist.client.client import Client
from tests.support.location import AscendingIds, client_of, memory_location

PARTITIONS = ["a", "b", "c"]


class SmallBindings(Bindings):
    """Bindings of which few are in memory, so that the shard is asked."""

    WHOLE_EVERY_ROWS, KNOWN_ROWS_MAX = 4, 6


class Processes:
    """Clients of one location in memory, each as if in a process of its own."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob("mem:"), MemoryConsensus("mem:")
        self.opened = 0

    def client(self) -> Client:
        self.opened += 1
        ids = AscendingIds(self.opened)
        return client_of(memory_location(blob=self.blob, consensus=self.consensus, ids=ids))
