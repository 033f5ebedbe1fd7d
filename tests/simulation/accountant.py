"""Attributes: conditional updates, alone and together with rows, and reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from persist.client.shard import Shard
from persist.client.write import WriteHandle
from persist.core.attribute import AttributeKey, AttributeUpdate, named_key
from persist.core.errors import Corruption, Expired
from tests.simulation.host import MAIN, WEATHER, Host, expect_damage, extras_of, me
from tests.simulation.oracle import Write, expect
from tests.simulation.writers import as_table, attempted, retried, rows, told

PAIR = (named_key("left"), named_key("right"))  # they change together, so they are equal
COUNTER = named_key("counter")
HIGHEST = named_key("highest")
OTHERS = tuple(named_key(f"other {number}") for number in range(12))
LOCK = named_key("lock")  # 1 or 2; what was refused may become possible again
KEYS = (*PAIR, COUNTER, HIGHEST, LOCK, *OTHERS)


def accountant(host: Host) -> None:
    """Changes attributes under conditions, and reads them."""
    shard = host.open(MAIN)
    writer, extras = shard.open_writer(), extras_of(shard)
    known: dict[AttributeKey, int | None] = {}
    while host.work():
        if not known or host.random.random() < 0.4:
            known = read_attributes(host, shard) or known
        write = Write(0, host.random.choice(("attributes", "insert")), me(host), MAIN, [])
        write.attributes = _updates(host, known)
        if write.kind == "insert":
            write.updates = [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)]
        _write(host, writer, extras, write)
        if write.answer == "unknown":
            writer = shard.open_writer()
        host.sleep(host.random.choice((0.0, 0.02, 0.3)))


def _updates(host: Host, known: Mapping[AttributeKey, int | None]) -> tuple[AttributeUpdate, ...]:
    pick, run = host.random, host.run
    run.numbers += 1
    kind = pick.randrange(4)
    if kind < 3 and "held_up" in run.faults:
        held = known.get(LOCK)
        return (AttributeUpdate.replace_if_equals(LOCK, 2 if held == 1 else 1, held),)
    if kind == 0:
        return tuple(AttributeUpdate.replace_if_equals(key, run.numbers, known.get(PAIR[0])) for key in PAIR)
    if kind == 1:
        return (AttributeUpdate.accumulate(COUNTER, pick.choice((1, 2, -1))),)
    if kind == 2:
        return (AttributeUpdate.replace_if_greater(HIGHEST, pick.randrange(100)),)
    picked = pick.sample(OTHERS, 3)
    return (*(AttributeUpdate.replace(key, run.numbers) for key in picked[:2]), AttributeUpdate.delete(picked[2]))


def _write(host: Host, writer: WriteHandle, extras: Sequence[str], write: Write) -> None:
    updates = write.attributes
    if write.kind == "attributes":
        with attempted(host, write) as token:
            told(write, writer.update_attributes(updates, token=token))
        if write.answer == "unknown":
            retried(host, write, lambda t: writer.update_attributes(updates, token=t))
        return
    table = as_table(write.updates, timed=False, extras=extras)
    with attempted(host, write) as token:
        runs = writer.stage(table, None)
        told(write, writer.commit_insert(runs, token=token, attributes=updates))
    if write.answer == "unknown":
        retried(host, write, lambda t: writer.commit_insert(runs, token=t, attributes=updates))


def read_attributes(host: Host, shard: Shard) -> dict[AttributeKey, int | None] | None:
    """What the attributes are, checked against what they were at that time."""
    invoked = host.run.oracle.tick()
    try:
        if host.random.random() < 0.7:
            found: dict[AttributeKey, int | None] = shard.attributes.get_many(KEYS)
            left, right = (found[key] for key in PAIR)
            expect(left == right, "attribute", f"a pair that changes together is {left} and {right}")
        else:
            scanned = dict(shard.attributes.scan())
            found = {key: scanned.get(key) for key in KEYS}
    except WEATHER:
        host.sleep(0.3)
        return None
    except Expired:
        return None
    except Corruption:
        expect_damage(host)
        return None
    host.run.truth(MAIN).attributes.check(found.items(), invoked, host.run.oracle.tick())
    host.run.path("attributes read")
    return found


__all__ = ["KEYS", "accountant", "read_attributes"]
