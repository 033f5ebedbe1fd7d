"""The commit history: a shard that keeps it for ever, writers that say who they are, and what it tells of them.

The oracle knows which commands landed, and with which commit. The history must tell exactly these, in that order.
"""

from __future__ import annotations

from collections import Counter

from persist.client.commit_info import HistoryEntry
from persist.client.shard import Shard
from persist.core.errors import Corruption, PersistError
from persist.core.spill import ENTRIES
from persist.maintenance.collector import Collector
from tests.simulation.host import SCHEMA, WEATHER, Host, expect_damage, me
from tests.simulation.oracle import Write
from tests.simulation.oracle_errors import expect
from tests.simulation.writers import as_table, attempted, retried, rows, told

CHRONICLE = "chronicle"
PAGE = 7


def chronicler(host: Host) -> None:
    """Inserts, says the number of each write, reads a page, and collects now and then."""
    shard = _opened(host)
    writer = shard.open_writer(purpose=me(host))
    while host.work():
        write = Write(0, "insert", me(host), CHRONICLE, [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)])
        with attempted(host, write) as token:
            runs = writer.stage(as_table(write.updates, timed=False), None)
            told(write, writer.commit_insert(runs, token=token, info={"write": write.number}))
        if write.answer == "unknown":
            retried(host, write, lambda t: writer.commit_insert(runs, token=t, info={"write": write.number}))  # noqa: B023
            writer = shard.open_writer(purpose=me(host))
        try:
            if host.random.random() < 0.3:
                Collector(host.location).run(CHRONICLE)
            _check_page(host, shard.history(PAGE))
        except Corruption:
            expect_damage(host)
        except PersistError as error:
            expect(isinstance(error, WEATHER), "told", f"the history of {CHRONICLE} cannot be read: {error!r}")
        host.sleep(host.random.choice((0.0, 0.02, 0.3)))


def check_chronicle(host: Host) -> None:
    """At rest the whole history is what landed: each write once, with the commit with which it landed."""
    if CHRONICLE not in host.run.oracle.shards:
        return
    shard, found = host.client.shard(CHRONICLE), list[HistoryEntry]()
    while page := shard.history(PAGE, before=found[-1] if found else None):
        found += page
    places = [(entry.seqno, entry.number) for entry in found]
    expect(places == sorted(set(places), reverse=True), "told", f"the history is out of order: {places}")
    expect([entry.operation for entry in found[-1:]] == ["create"], "told", "the history has lost its beginning")
    inserts = Counter((entry.seqno, _number(entry)) for entry in found if entry.operation == "insert")
    landed = _landed(host)
    expect(inserts == landed, "told", f"told, not landed: {inserts - landed}; landed, not told: {landed - inserts}")
    state = host.run.truth(CHRONICLE).state
    host.run.oracle.paths["entries in files"] += sum(file.count for file in state.files_of(ENTRIES))
    host.run.path("history told")


def _check_page(host: Host, page: list[HistoryEntry]) -> None:
    """What is told did land: the oracle sees every commit before anybody can read it."""
    inserts = Counter((entry.seqno, _number(entry)) for entry in page if entry.operation == "insert")
    more = inserts - _landed(host)
    expect(not more, "told", f"the history tells of what did not land: {more}")


def _landed(host: Host) -> Counter[tuple[int, object]]:
    """The writes that landed and took a time, each with the commit that took it."""
    found: Counter[tuple[int, object]] = Counter()
    for write in host.run.truth(CHRONICLE).landed.values():
        if write is not None and write.landed and write.landed[0] != write.landed[1]:
            found[write.landed_seqno, write.number] += 1
    return found


def _number(entry: HistoryEntry) -> object:
    return entry.info["write"] if entry.info else None


def _opened(host: Host) -> Shard:
    while True:
        try:
            return host.client.create_shard(CHRONICLE, SCHEMA, ["k"], history="forever")
        except WEATHER:
            host.sleep(0.5)
        except Corruption:
            expect_damage(host)
            host.sleep(0.5)
