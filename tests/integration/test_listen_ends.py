"""A finished listener gives its hold back at once. A hold that stays keeps history, and the shard from its end."""

from __future__ import annotations

import gc
import pickle
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist import Client, Conflict, Corruption, Expired, Indeterminate, InvalidUsage, ListenEvent, Shard, Unavailable
from persist.client.embedded import EmbeddedTransport
from persist.client.row_reader import Rows
from persist.core.frontier import TIME_MAX
from tests.support.server import Server, url_of
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64())])


BY_BOTH = pytest.mark.parametrize("client", ["directory", "server"], indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    with url_of(getattr(request, "param", "directory"), tmp_path) as url, persist.connect(url) as client:
        yield client


def to_its_end(shard: Shard) -> None:
    assert len(list(shard.listen(None, until=2))) > 0


def left_at_the_first_event(shard: Shard) -> None:
    for _ in shard.listen(None):
        break


def left_by_an_error(shard: Shard) -> None:
    def fail(_event: ListenEvent) -> None:
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        for event in shard.listen(None):
            fail(event)
    gc.collect()


def an_iterator_that_is_forgotten(shard: Shard) -> None:
    iterator = iter(shard.listen(None))
    next(iterator)
    del iterator
    gc.collect()


def closed(shard: Shard) -> None:
    with shard.listen(None) as listen:
        assert next(iter(listen)).updates.num_rows > 0
    listen.close()
    with pytest.raises(InvalidUsage, match="closed"):
        list(listen)


def polled_to_its_end(shard: Shard) -> None:
    listen = shard.listen(None, until=2)
    while not listen.done:
        assert list(listen.next_events(WAIT_S))


def with_nothing_to_tell(shard: Shard) -> None:
    assert list(shard.listen(1, until=2)) == []


def a_snapshot_read_to_its_end(shard: Shard) -> None:
    assert sum(len(table) for table in shard.snapshot().batches()) == 2


def a_snapshot_whose_loop_was_left(shard: Shard) -> None:
    snapshot = shard.snapshot()
    for _ in snapshot.batches():
        break
    with pytest.raises(Expired):
        snapshot.to_arrow()


def a_snapshot_with_a_time_out_whose_loop_was_left(shard: Shard) -> None:
    snapshot = shard.with_timeout(WAIT_S).snapshot(num_splits=2)
    for _ in snapshot.batches():
        break


def a_snapshot_whose_iterator_was_closed(shard: Shard) -> None:
    pieces = shard.snapshot().batches()
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]


def snapshots_that_were_never_read(shard: Shard) -> None:
    for _ in range(2):
        shard.snapshot(num_splits=2)
        shard.with_timeout(WAIT_S).snapshot()


def changes_whose_loop_was_left(shard: Shard) -> None:
    changes = shard.changes(-1)
    for _ in changes.batches():
        break


def changes_that_were_never_read(shard: Shard) -> None:
    shard.changes(-1)
    shard.changes(0, 1, other=shard)


def wrong_arguments(shard: Shard) -> None:
    with pytest.raises(InvalidUsage):
        shard.listen(0, until="soon")  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage):
        shard.listen(TIME_MAX + 1)
    with pytest.raises(InvalidUsage):
        shard.snapshot(columns=["colour"])


USES: list[Callable[[Shard], None]] = [
    a_snapshot_read_to_its_end, a_snapshot_whose_loop_was_left, a_snapshot_with_a_time_out_whose_loop_was_left,
    a_snapshot_whose_iterator_was_closed, snapshots_that_were_never_read, changes_whose_loop_was_left,
    changes_that_were_never_read, wrong_arguments, to_its_end, left_at_the_first_event, left_by_an_error,
    an_iterator_that_is_forgotten, closed, polled_to_its_end, with_nothing_to_tell,
]  # fmt: skip


@BY_BOTH
def test_a_finished_listener_holds_nothing(client: Client) -> None:
    """It held since for 15 more minutes, and the next `drop` was refused: held by readers."""
    for use in USES:
        shard = client.create_shard(use.__name__, SCHEMA, ["id"])
        for number in range(2):
            shard.insert([{"id": number}])
        use(shard)
        shard.drop()


def test_a_loop_that_is_left_within_a_with_keeps_the_hold_until_its_end(shard: Shard) -> None:
    with shard.snapshot() as snapshot:
        assert len(next(snapshot.batches())) == 1
        assert snapshot.to_arrow().num_rows == 1
    shard.drop()


@pytest.fixture
def shard(client: Client) -> Shard:
    """With one row."""
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 1}])
    return shard


@BY_BOTH
@pytest.mark.parametrize("open_read", [lambda shard: shard.snapshot(num_splits=2), lambda shard: shard.changes(-1)])
def test_splits_keep_the_hold_of_their_read(client: Client, shard: Shard, open_read: Callable[[Shard], Rows]) -> None:
    def held() -> None:
        with pytest.raises(Conflict):
            shard.drop()

    splits = open_read(shard).splits
    held()
    assert sum(len(table) for split in splits for table in split.read(client.transport)) == 1
    elsewhere = pickle.dumps(splits)
    del splits
    gc.collect()
    held()  # until the lease lapses: nothing is known of who reads them
    assert sum(len(table) for split in pickle.loads(elsewhere) for table in split.read(client.transport)) == 1


def test_a_close_gives_back_the_hold_of_splits_that_were_pickled(client: Client, shard: Shard) -> None:
    snapshot = shard.snapshot(num_splits=2)
    elsewhere = pickle.dumps(snapshot.splits)
    snapshot.close()
    with pytest.raises(Expired):
        next(pickle.loads(elsewhere)[0].read(client.transport))
    shard.drop()


def test_a_listener_that_its_own_error_ends_holds_nothing(tmp_path: Path) -> None:
    """A loop over a part that is gone was left by Corruption, and the shard could not be dropped for 15 minutes."""
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert(pa.table({"id": list(range(50_000))}))
        for part in (tmp_path / "data").rglob("p*.parquet"):
            part.unlink()
        listen = shard.listen(None)
        with pytest.raises(Corruption):
            list(listen)
        shard.drop()


def test_a_loop_that_unavailable_ends_can_be_begun_again(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = shard.listen(None, until=1)

    def away(*_: object) -> None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(EmbeddedTransport, "view", away)
        with pytest.raises(Unavailable):
            list(listen)
    assert sum(event.updates.num_rows for event in listen) == 1


def test_a_listener_that_goes_on_holds_what_it_needs(shard: Shard) -> None:
    with shard.listen(None) as listen:
        assert sum(event.updates.num_rows for event in listen.next_events(WAIT_S)) == 1
        with pytest.raises(Conflict, match="held"):
            shard.drop()
        shard.insert([{"id": 2}])
        assert sum(event.updates.num_rows for event in listen.next_events(WAIT_S)) == 1
    shard.drop()


def is_dropped(shard: Shard) -> bool:
    try:
        shard.drop()
    except Conflict:
        return False
    return True


def test_a_stream_over_http_that_ends_or_is_left_holds_nothing(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server, persist.connect(server.url) as client:
        for number, accept in enumerate(("text/event-stream", "application/octet-stream")):
            for how, query in (("ended", "?until=2"), ("left", "")):
                shard = client.create_shard(f"{how}-{number}", SCHEMA, ["id"])
                for row in range(2):
                    shard.insert([{"id": row}])
                url = f"{server.url}/v1/shards/{shard.name}/listen{query}"
                request = urllib.request.Request(url, headers={"accept": accept})
                with closing(urllib.request.urlopen(request)) as answer:
                    assert answer.read(None if query else 10)
                wait_until(lambda shard=shard: is_dropped(shard), "the hold was given back")


@BY_BOTH
def test_closing_a_client_ends_the_waits_of_other_threads(client: Client) -> None:
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 1}])
    listen, started, ended = shard.listen(None), threading.Semaphore(0), []

    def follow() -> None:
        for _event in listen:
            started.release()

    def await_a_time_to_come() -> None:
        started.release()
        shard.snapshot(50, wait_s=2 * WAIT_S)

    def run(wait: Callable[[], None]) -> None:
        with pytest.raises(InvalidUsage, match="closed"):
            wait()
        ended.append(wait)

    threads = [threading.Thread(target=run, args=(wait,), daemon=True) for wait in (follow, await_a_time_to_come)]
    for thread in threads:
        thread.start()
        assert started.acquire(timeout=WAIT_S)
    client.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ended) == 2
    with pytest.raises(InvalidUsage, match="closed"):
        shard.upper()


@BY_BOTH
def test_a_listener_that_another_thread_closes_ends_without_an_error(client: Client) -> None:
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 1}])
    listen, got, seen = shard.listen(None), [], threading.Event()

    def follow() -> None:
        for event in listen:
            got.append(event.updates["id"].to_pylist())
            seen.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert seen.wait(WAIT_S)
    listen.close()
    shard.insert([{"id": 2}])  # which ends the wait
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert got == [[1]]


@pytest.mark.parametrize("place", ["directory", "server"])
def test_writes_that_a_closing_client_interrupts_are_told_the_truth(place: str, tmp_path: Path) -> None:
    landed, refused = set(), set()
    with url_of(place, tmp_path) as url:
        client = persist.connect(url)
        shard = client.create_shard("orders", SCHEMA, ["id"])
        begun = threading.Semaphore(0)

        def write(first: int) -> None:
            for id_ in range(first, first + 100_000):
                try:
                    shard.insert([{"id": id_}])
                except InvalidUsage:
                    refused.add(id_)
                    return
                except (Unavailable, Indeterminate):
                    return
                landed.add(id_)
                begun.release()

        threads = [threading.Thread(target=write, args=(number * 100_000,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert begun.acquire(timeout=WAIT_S)
        client.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        with persist.connect(url) as other:
            there = set(other.shard("orders").snapshot().to_arrow()["id"].to_pylist())
    assert landed <= there
    assert not refused & there
