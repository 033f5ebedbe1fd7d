"""Writers that race on one key, in threads or in processes, and the judge of what they did."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from consensus import Consensus, ConsensusIndeterminate, ConsensusUnavailable, open_consensus
from tests.support.waiting import LOOK_S, WAIT_S

KEY = "raced/key"
ATTEMPTS_MAX = 100_000
T = TypeVar("T")


@dataclass(frozen=True)
class Win:
    """`writer` was told that its value is entry `seqno`."""

    seqno: int
    writer: int
    data: bytes


def write_until(consensus: Consensus, writer: int, wins_wanted: int) -> list[Win]:
    """Append until `wins_wanted` appends are acknowledged. Doubtful ones are settled by reading the log."""
    wins: list[Win] = []
    head = _read(lambda: consensus.head(KEY))
    seqno = 1 if head is None else head.seqno + 1
    for attempt in range(ATTEMPTS_MAX):
        if len(wins) == wins_wanted:
            return wins
        data = f"{writer}:{attempt}".encode()
        try:
            won = consensus.compare_and_set(KEY, seqno, data)
        except ConsensusUnavailable:
            continue
        except ConsensusIndeterminate:
            landed = _read(partial(consensus.scan, KEY, seqno, 1))
            won = bool(landed) and landed[0].data == data
        if won:
            wins.append(Win(seqno, writer, data))
            seqno += 1
        else:
            head = _read(lambda: consensus.head(KEY))
            seqno = 1 if head is None else head.seqno + 1
    raise AssertionError(f"writer {writer} won only {len(wins)} of {wins_wanted} races in {ATTEMPTS_MAX} attempts")


def race_threads(consensus: Consensus, writers: int, wins_each: int) -> list[Win]:
    """`writers` threads that share one store."""
    wins: list[list[Win]] = [[] for _ in range(writers)]
    failures: list[BaseException] = []
    gate = threading.Barrier(writers)

    def run(writer: int) -> None:
        try:
            gate.wait()
            wins[writer] = write_until(consensus, writer, wins_each)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [win for each in wins for win in each]


def _race_in_process(task: tuple[str, int, int]) -> list[Win]:
    url, writer, wins_each = task
    consensus = open_consensus(url)
    try:
        return write_until(consensus, writer, wins_each)
    finally:
        consensus.close()


def race_processes(url: str, writers: int, wins_each: int) -> list[Win]:
    """`writers` processes, each with a store of its own."""
    context = multiprocessing.get_context("forkserver")
    with context.Pool(writers) as pool:
        done = pool.map(_race_in_process, [(url, writer, wins_each) for writer in range(writers)], chunksize=1)
        pool.close()
        pool.join()
    return [win for each in done for win in each]


def read_log(consensus: Consensus, page: int = 1000) -> list[tuple[int, bytes]]:
    """The whole live log of the raced key."""
    found: list[tuple[int, bytes]] = []
    while entries := _read(lambda: consensus.scan(KEY, found[-1][0] + 1 if found else 0, page)):
        found.extend((entry.seqno, entry.data) for entry in entries)
    return found


def _read(read: Callable[[], T]) -> T:
    """Read again while a store cannot be reached, for at most WAIT_S: a busy machine may take long to connect."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(ConsensusUnavailable):
            return read()
        time.sleep(LOOK_S)
    return read()


def judge(wins: Sequence[Win], log: Sequence[tuple[int, bytes]]) -> None:
    """AssertionError unless every seqno had exactly one winner, without a gap, and no acknowledged one is lost."""
    seqnos = sorted(win.seqno for win in wins)
    doubles = {seqno for seqno in seqnos if seqnos.count(seqno) > 1} if len(set(seqnos)) != len(seqnos) else set()
    assert not doubles, f"several winners at seqnos {sorted(doubles)[:5]}"
    assert seqnos == list(range(1, len(seqnos) + 1)), "the won seqnos have a gap"
    assert [seqno for seqno, _ in log] == seqnos, "the log's seqnos are not those that were won"
    by_seqno = dict(log)
    lost = [win.seqno for win in wins if by_seqno[win.seqno] != win.data]
    assert not lost, f"acknowledged updates were lost at seqnos {lost[:5]}"
