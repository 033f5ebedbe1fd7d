"""Time-outs against real servers: dead ones, stopped ones, ones that start again; and stores that hang."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from tests.support.server import Server, url_of
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
SHORT_S = 1.0


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a host that takes connections and never answers."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def refusing() -> str:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def within(call: Callable[[], object], seconds: float) -> BaseException | None:
    """The error of the call, which must end in this time."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    calling = threading.Thread(target=run, daemon=True)
    calling.start()
    calling.join(seconds)
    assert errors, "it hangs"
    return errors[0]


@pytest.mark.parametrize(("listens", "more", "seconds"), [(False, {}, "5"), (True, {"connect_s": 0.5}, "0.5")])
def test_a_silent_url_is_named(silent: str, listens: bool, more: dict[str, float], seconds: str) -> None:
    """Without waiting for a minute."""
    url = silent if listens else refusing()
    error = within(lambda: persist.connect(url, **more), WAIT_S)
    assert isinstance(error, persist.Unavailable)
    assert f"no server answered at {url} within {seconds} s" in str(error)


def test_a_server_that_starts_late_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names: list[list[str]] = []

    def connect() -> None:
        with persist.connect(f"http://127.0.0.1:{port}", connect_s=WAIT_S) as client:
            names.append(client.shards())

    waiting = threading.Thread(target=connect)
    waiting.start()
    with Server(tmp_path / "d", "--port", str(port)):
        waiting.join(WAIT_S)
        assert names == [[]]


def patient(url: str) -> persist.Client:
    """A client whose calls would go on for far longer than any test waits, but for a time-out."""
    long_s = 100 * WAIT_S
    settings = persist.HandleSettings(persist.WriteSettings(retry_s=long_s), persist.ReadSettings(retry_s=long_s))
    return persist.Client(persist.Connection(url, timeout_s=long_s).transport(), settings)


def test_calls_to_a_server_that_was_stopped_end_in_time_and_say_what_is_true(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server, patient(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 0}])
        token = client.new_token()
        short, hasty = shard.with_timeout(SHORT_S), client.with_timeout(SHORT_S)
        writer = shard.open_writer().with_timeout(SHORT_S)
        snapshot, listen = shard.snapshot().with_timeout(SHORT_S), shard.listen(None).with_timeout(SHORT_S)
        server.process.send_signal(signal.SIGSTOP)
        reads: list[Callable[[], object]] = [
            short.upper, short.snapshot, short.history, hasty.shards, lambda: list(listen.next_events(0.1)),
            lambda: short.settings, lambda: short.attributes.get(persist.EVENT_COUNT), lambda: hasty.shard("orders"),
        ]  # fmt: skip
        assert snapshot.to_arrow().num_rows == 1, "the rows are in the view"
        with ThreadPoolExecutor(len(reads)) as pool:
            told = [type(error).__name__ for error in pool.map(lambda read: within(read, WAIT_S), reads)]
        writes: list[Callable[[], object]] = [
            lambda: short.insert([{"id": 1}], token=token),
            lambda: writer.insert([{"id": 2}]),
            lambda: hasty.create_shard("more", SCHEMA, ["id"]),
        ]
        wrote = [within(write, WAIT_S) for write in writes]
        server.process.send_signal(signal.SIGCONT)
        assert told == ["Unavailable"] * len(reads)
        # What waits in the socket of a stopped server may happen yet: none of these may say that it did not.
        assert [type(error).__name__ for error in (wrote[0], wrote[2])] == ["Indeterminate"] * 2
        assert isinstance(wrote[1], (persist.Indeterminate, persist.Unavailable))
        shard.insert([{"id": 1}], token=token)
        found = shard.snapshot().to_arrow()
        assert found.filter(pa.compute.equal(found["id"], 1))["__diff"].to_pylist() == [1]


def is_let_go(shard: persist.Shard) -> bool:
    """Whether nobody holds it soon: the hold is given back beside the call, which waits no longer."""
    for _ in range(100):
        try:
            shard.drop()
            return True
        except persist.Conflict:
            threading.Event().wait(0.05)
    return False


@pytest.mark.parametrize("kind", ["directory", "server"])
def test_a_snapshot_of_a_time_that_does_not_come_ends_in_time_and_leaves_no_hold(kind: str, tmp_path: Path) -> None:
    with url_of(kind, tmp_path) as url, persist.connect(url) as client:
        for timeout_s in (1.0, 10.0, WAIT_S / 2):  # on a slow machine it may end before the hold was taken
            shard = client.create_shard(f"shard-of-{timeout_s}", SCHEMA, ["id"])
            shard.insert([{"id": 0}])
            error = within(lambda shard=shard, s=timeout_s: shard.with_timeout(s).snapshot(as_of=9), WAIT_S)
            assert isinstance(error, persist.Unavailable)
            if is_let_go(shard):
                return
        pytest.fail("a hold was left")


def test_a_pipelined_writer_whose_appends_are_not_acknowledged_in_time_goes_on(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server, persist.connect(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        settings = persist.PipelineSettings(window_appends_max=2)
        with shard.with_timeout(WAIT_S).pipelined_writer("p", settings) as writer:
            writer.append([{"id": 0}])
            writer.flush()
            server.process.send_signal(signal.SIGSTOP)
            hasty = writer.with_timeout(SHORT_S)
            hasty.append([{"id": 1}])
            hasty.append([{"id": 2}])
            flushed, full = within(hasty.flush, WAIT_S), within(lambda: hasty.append([{"id": 3}]), WAIT_S)
            server.process.send_signal(signal.SIGCONT)
            assert isinstance(flushed, persist.Indeterminate)
            assert isinstance(full, persist.Unavailable)
        assert sorted(shard.snapshot().to_arrow()["id"].to_pylist()) == [0, 1, 2]
