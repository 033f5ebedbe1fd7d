"""A client in a process of its own: `python -m tests.crash.actor ROLE JOURNAL SEED POINT:CALLS CLOCK CONNECTION...`.

It says in the journal what it is about to do and what it was told, a line each. CONNECTION is the URLs of servers, or
the URLs of the two stores; then its stores have a fuse.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from blob import open_blob
from consensus import open_consensus
from persist.client.client import Client, connect
from persist.client.shard import Shard
from persist.client.write import WriteHandle
from persist.commit.location import Location
from persist.core.commands import Appended
from persist.core.errors import (
    Expired,
    Indeterminate,
    NotReadable,
    OutcomeForgotten,
    Overloaded,
    PersistError,
    Unavailable,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.ids import Token, mint
from tests.crash.clocks import set_clock
from tests.crash.fuses import Fuse, FusedBlob, FusedConsensus
from tests.crash.small import HANDLES, LOCATION, TIMEOUT_S
from tests.support.location import client_of

SHARD = "crash"
SCHEMA = pa.schema([pa.field("who", pa.string()), pa.field("n", pa.int64()), pa.field("size", pa.int64())])
SIZES = (1, 1, 2, 80)  # rows of a write; the last does not fit inline
TOKEN_RATE = 0.7  # of writes; the others come with a writer that is registered, under its lease
RETRIES_MAX = 3
KEPT_TIMES = 8  # how far since stays behind upper
STEPS_MAX = 20  # of a listener, before it begins anew
WEATHER = (Unavailable, Overloaded, Indeterminate)
PAUSE_S = 0.02

Ranges = dict[str, list[list[int]]]


class Journal:
    """Lines that survive the process: each is one write to a file opened for appending."""

    def __init__(self, path: str, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = who

    def say(self, what: str, **line: Any) -> None:
        told = {"what": what, "who": self._who, "ns": time.monotonic_ns(), **line}
        os.write(self._file, (json.dumps(told, separators=(",", ":")) + "\n").encode())


def connected(connection: Sequence[str], fuse: Fuse) -> Client:
    """A client, as soon as the weather lets it be."""
    while True:
        try:
            if len(connection) == 1:
                return connect(connection[0], handles=HANDLES, timeout_s=TIMEOUT_S)
            blob, consensus = FusedBlob(open_blob(connection[0]), fuse), open_consensus(connection[1])
            location = Location(blob, FusedConsensus(consensus, fuse), settings=LOCATION)
            return client_of(location, HANDLES)
        except WEATHER:
            time.sleep(PAUSE_S)


def opened(client: Client) -> Shard:
    while True:
        try:
            return client.create_shard(SHARD, SCHEMA, ["who"], history="none")
        except WEATHER:
            time.sleep(PAUSE_S)


# --- writing


def write(client: Client, journal: Journal, seed: int) -> None:
    """Inserts and compare-and-appends; no two writes have rows alike."""
    shard = opened(client)
    writer = shard.open_writer()
    pick = random.Random(seed)
    number = 0
    while True:
        number += 1
        if not _write(shard, writer, journal, pick, seed, number):
            writer = shard.open_writer()


def _write(shard: Shard, writer: WriteHandle, journal: Journal, pick: random.Random, seed: int, number: int) -> bool:
    """One write, recorded; whether its outcome is known."""
    size = pick.choice(SIZES)
    rows = pa.table({"who": [f"{seed}.{number}"] * size, "n": list(range(size)), "size": [size] * size})
    lower: int | None = None
    if pick.random() < 0.5:
        lower = upper_of(shard, journal)
        if lower is None:
            return True
    upper = None if lower is None else lower + pick.choice((1, 3))
    token = mint(Token, shard._transport.ids) if pick.random() < TOKEN_RATE else None
    journal.say("write", name=f"{seed}.{number}", size=size, lower=lower, upper=upper)
    answer: dict[str, Any] = {}
    try:
        runs = writer.stage(rows, lower)
    except WEATHER:
        journal.say("answer", name=f"{seed}.{number}", answer="refused")
        return True
    for _ in range(RETRIES_MAX):
        answer = _committed(writer, runs, lower, upper, token, is_retry=bool(answer))
        if answer["answer"] != "unknown" or token is None:
            break
    journal.say("answer", name=f"{seed}.{number}", **answer)
    return bool(answer["answer"] == "ok")


def _committed(
    writer: WriteHandle, runs: Any, lower: int | None, upper: int | None, token: Token | None, *, is_retry: bool
) -> dict[str, Any]:
    """What the caller knows after one call. A retry that is refused for now leaves the first try's outcome unknown."""
    try:
        if lower is None or upper is None:
            told: Appended = writer.commit_insert(runs, token=token)
        else:
            told = writer.commit_compare_and_append(runs, lower, upper, token=token)
    except UpperMismatch as error:
        actual = Antichain.from_json(error.details["actual"])
        return {"answer": "refused", "actual": actual.element}
    except OutcomeForgotten:
        return {"answer": "refused", "why": "token"}  # its birth or the shard's clock is wrong
    except (Unavailable, Overloaded):
        return {"answer": "unknown" if is_retry else "refused"}
    except Expired:
        return {"answer": "unknown", "why": "expired"}
    except Indeterminate:
        return {"answer": "unknown"}
    return {"answer": "ok", "told": [told.lower.element, told.upper.element]}


def upper_of(shard: Shard, journal: Journal) -> int | None:
    """The shard's upper, recorded with its since as the reads of registers that they are."""
    invoked = time.monotonic_ns()
    try:
        view = shard.view()
    except WEATHER:
        return None
    journal.say("view", invoked=invoked, upper=view.upper.element, since=view.since.element)
    return view.upper.element


# --- reading


def read(client: Client, journal: Journal, seed: int) -> None:
    """Snapshots of random times, in splits; now and then history is forgotten."""
    shard = opened(client)
    pick = random.Random(seed)
    while True:
        try:
            view = shard.view()
            upper, since = view.upper.element or 0, view.since.element or 0
            if upper > since:
                as_of = pick.randrange(since, upper)
                table = shard.snapshot(as_of, num_splits=pick.choice((1, 3)), wait_s=5.0).to_arrow()
                journal.say("read", as_of=as_of, names=_ranges(_whole(table)))
            if pick.random() < 0.1 and upper > KEPT_TIMES:
                shard.downgrade_since(max(since, upper - KEPT_TIMES))
        except (*WEATHER, Expired, NotReadable) as error:
            journal.say("expired" if isinstance(error, Expired) else "weather")
        time.sleep(PAUSE_S)


def listen(client: Client, journal: Journal, seed: int) -> None:
    """A snapshot and every update after it; what that makes is what a snapshot of each later time would show."""
    shard = opened(client)
    while True:
        try:
            as_of = None if shard.upper().element else 0
            with shard.snapshot(as_of, wait_s=5.0) as snapshot:
                names = _whole(snapshot.to_arrow())
                events = shard.listen(snapshot.as_of)
            with events:
                for _ in range(STEPS_MAX):
                    for event in events.next_events(1.0):
                        _merge(names, _whole(event.updates))
                    frontier = events.frontier.element
                    assert frontier is not None
                    journal.say("read", as_of=frontier - 1, names=_ranges(names), listened=True)
        except (*WEATHER, Expired, NotReadable) as error:
            journal.say("expired" if isinstance(error, Expired) else "weather")
            time.sleep(PAUSE_S)


def _whole(table: pa.Table) -> set[str]:
    """The names of the writes in a table. Every write is there as a whole and once, or it is not definite."""
    found = table.group_by("who").aggregate(
        [("n", "count"), ("n", "count_distinct"), ("n", "max"), ("size", "min"), ("size", "max"), ("__diff", "sum")]
    )
    size = found.column("size_max")
    for column in ("n_count", "n_count_distinct", "size_min", "__diff_sum"):
        if not pc.all(pc.equal(found.column(column), size)).as_py() and found.num_rows:
            raise AssertionError(f"a write is there by halves, or twice: {found.to_pylist()[:5]}")
    return set(found.column("who").to_pylist())


def _merge(names: set[str], more: set[str]) -> None:
    if names & more:
        raise AssertionError(f"a listener hears of {sorted(names & more)[:5]} twice")
    names |= more


def _ranges(names: Iterable[str]) -> Ranges:
    """Names by writer, as ranges of their numbers with both ends: there are many, and few gaps."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        seed, _, number = name.partition(".")
        numbers.setdefault(seed, []).append(int(number))
    found: Ranges = {}
    for seed, ascending in numbers.items():
        spans: list[list[int]] = []
        for number in sorted(ascending):
            if spans and spans[-1][1] == number - 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        found[seed] = spans
    return found


def main(words: Sequence[str]) -> None:
    role, path, seed, point, clock, *connection = words
    journal = Journal(path, f"{role} {seed}")
    set_clock(clock, journal.say)
    client = connected(connection, Fuse.of(point))
    try:
        {"writer": write, "reader": read, "listener": listen}[role](client, journal, int(seed))
    except (PersistError, AssertionError) as error:  # nothing else may happen, whatever the weather
        journal.say("broken", error=repr(error))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
