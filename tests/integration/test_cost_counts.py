"""What `persist cost` counts is what a metered store has seen: every PUT, or what is deleted without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from blob.forwarding import ForwardingBlob
from blob.memory import MemoryBlob
from blob.metrics import MeteredBlob
from compactor.worker import Worker, WorkerSettings
from consensus.memory import MemoryConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.collector import Collector
from persist.commit.location import Location, LocationSettings
from persist.commit.system import SystemClock, SystemIds
from persist.core.keys import born_ms, is_rollup_key
from persist.core.state import Policy
from persist.cost.document import CostDocument, cost_document
from persist.cost.priced import WrittenTold
from persist.cost.prices import built_in
from persist.cost.tally import MULTIPART_BYTES, PIECE_BYTES, PUT_KINDS, put_requests
from persist.cost.watching import ShardWatcher, Window
from persist.inspect.looking import Look
from persist.inspect.usage import usage_document
from tests.support.location import InlineBackground

SCHEMA = pa.schema([("id", pa.int64()), ("note", pa.string())])
SMALL = Policy(inline_part_bytes_max=0, rollup_every=4)
INSERTS, ROWS = 40, 30


class Seen(ForwardingBlob):
    """Remembers the keys that were put, and those that were deleted."""

    def __init__(self, inner: MemoryBlob) -> None:
        super().__init__(inner)
        self.puts: dict[str, int] = {}
        self.deleted: set[str] = set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._inner.put(key, data)
        self.puts[key] = memoryview(data).nbytes

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)
        self.deleted.update(key for key in keys if key in self.puts)


class Place:
    """A location in memory whose store counts, and a look at it."""

    def __init__(self, policy: Policy) -> None:
        self.calls: list[tuple[str, int]] = []
        self.seen = Seen(MemoryBlob())
        self.consensus = MemoryConsensus()
        self.location = Location(
            MeteredBlob(self.seen, lambda verb, outcome, _, size: self.calls.append((verb, size))),
            self.consensus,
            settings=LocationSettings(policy),
            clock=SystemClock(),
            ids=SystemIds(),
            background=InlineBackground(),
        )
        self.client = Client(EmbeddedTransport(self.location))

    def work(self, name: str, history: str = "none") -> None:
        shard = self.client.create_shard(name, SCHEMA, ["id"], history=history)
        for number in range(INSERTS):
            ids = range(number * ROWS, (number + 1) * ROWS)
            shard.insert(pa.table({"id": ids, "note": [f"{number}"] * ROWS}, SCHEMA))
        while Worker(self.location, WorkerSettings()).run(name, idle=True):
            pass

    def cost(self) -> CostDocument:
        return cost_document(Look(self.seen, self.consensus, owns=False), None, 7, built_in())

    def puts(self) -> tuple[int, int]:
        """How many, and their bytes, as the meter saw them."""
        sizes = [size for verb, size in self.calls if verb == "put"]
        return len(sizes), sum(sizes)


@pytest.fixture(params=[SMALL, Policy(rollup_every=4)], ids=["staged", "inline"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    yield made
    made.client.close()


def puts_of(written: WrittenTold) -> tuple[int, int]:
    kinds = [getattr(written, kind) for kind in PUT_KINDS]
    return sum(one.requests for one in kinds), sum(one.bytes for one in kinds)


def counted(document: CostDocument) -> tuple[int, int]:
    """PUTs and bytes that are told, of shards and of what lies beside them."""
    assert document.location is not None
    assert document.location.beside is not None
    requests, size = puts_of(document.location.written)
    beside = document.location.beside.written
    return requests + beside.requests, size + beside.bytes


def test_until_something_is_collected_every_put_and_every_byte_is_counted(place: Place) -> None:
    for name in ("a", "b/c"):
        place.work(name)
    document = place.cost()
    untold = [key for key in place.seen.deleted if not _is_of_a_shard(key)]  # probes come and go
    size = sum(place.seen.puts[key] for key in untold)
    requests, nbytes = counted(document)
    assert document.findings == []
    assert (requests + len(untold), nbytes + size) == place.puts()
    for shard in document.shards:
        assert shard.is_whole
        assert shard.puts == puts_of(shard.written)[0]
        assert shard.written.rows == INSERTS * ROWS
        assert shard.written.commits > INSERTS
        assert shard.written.merges >= 1
        assert shard.compaction.wrote.blobs >= 1


def test_once_something_was_collected_what_is_not_counted_was_deleted(place: Place) -> None:
    """Every PUT is one that is told, or of a blob whose deletion is not told either."""
    place.work("a")
    for _ in range(4):
        Collector(place.location).run("a")
    document = place.cost()
    [shard] = document.shards
    deleted = [key for key in place.seen.deleted if _is_of_a_shard(key)]
    assert deleted
    assert not shard.is_whole
    without_trace = len(place.seen.deleted) - shard.written.deleted
    assert counted(document)[0] + without_trace == place.puts()[0]
    assert puts_of(shard.written)[0] <= shard.puts <= place.puts()[0]


def test_since_its_counts_are_whole_a_shard_knows_every_blob(place: Place) -> None:
    place.work("a", "7d")
    Collector(place.location).run("a")
    place.client.shard("a").insert(pa.table({"id": range(ROWS), "note": ["x"] * ROWS}, SCHEMA))
    look = Look(place.seen, place.consensus, owns=False)
    watcher = ShardWatcher("a", Window(0, look.clock.now_ms() + 1))
    usage = usage_document(look, "a", lambda _: watcher)
    from_ms = watcher.did(look, usage.findings).whole_from_ms
    late = {key for key in place.seen.puts if _is_of_a_shard(key) and born_ms(key) >= from_ms}
    assert late
    assert late <= {key for key, _ in watcher.blobs()}
    assert 0 < from_ms <= look.clock.now_ms()


def test_once_all_was_collected_the_commit_history_tells_about_how_many_puts_there_were() -> None:
    """One for each merge and for so many versions: more than half of what a meter saw, and never more than all."""
    place = Place(Policy())
    for _ in range(5):
        place.work("a", "7d")
        Collector(place.location).run("a")
    [shard] = place.cost().shards
    place.client.close()
    seen = sum(_is_of_a_shard(key) for key in place.seen.puts)
    assert puts_of(shard.written)[0] < shard.puts <= seen
    assert shard.puts > seen / 2


def test_a_collection_is_counted_as_deletes_while_the_log_tells_them(place: Place) -> None:
    place.work("a")
    [before] = place.cost().shards
    assert before.written.deleted == 0
    rollups = [key for key in place.seen.puts if is_rollup_key(key)]
    assert before.written.rollups.blobs == len(rollups)


def test_a_large_blob_takes_several_requests() -> None:
    assert put_requests(0) == put_requests(MULTIPART_BYTES) == 1
    assert put_requests(MULTIPART_BYTES + 1) == 2 + 3
    assert put_requests(10 * PIECE_BYTES) == 2 + 10


def _is_of_a_shard(key: str) -> bool:
    return key.partition("/")[0].startswith("s") and len(key.partition("/")[0]) == 33
