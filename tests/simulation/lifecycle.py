"""Schemas that evolve while others write and read, and a name that is used, dropped and used again meanwhile."""

from __future__ import annotations

import pyarrow as pa

from persist.client.shard import Shard
from persist.client.write import WriteHandle
from persist.core.batch import Run
from persist.core.errors import Conflict, Corruption, SchemaMismatch, UnknownShard
from persist.parts import ShardSchema
from tests.simulation.host import DOOMED, EXTRAS, MAIN, WEATHER, Host, expect_damage, extras_of, lived, me
from tests.simulation.oracle import Update, Write, expect
from tests.simulation.readers import read_once, reading
from tests.simulation.writers import as_table, attempted, observed_upper, retried, rows, told

DROP_RATE = 0.15
EVOLVE_RATE = 0.2
RECREATE_RATE = 0.6  # how often one who finds a shard dropped uses its name again


def evolver(host: Host) -> None:
    """Adds columns, and writes rows that have them."""
    shard = host.open(MAIN)
    writer = shard.open_writer()
    while host.work():
        known = extras_of(shard)
        if len(known) < len(EXTRAS) and host.random.random() < EVOLVE_RATE:
            _evolve(host, shard, EXTRAS[len(known)])
        elif not insert(host, writer, _extended(host, rows(host, 0, 1), known), known, MAIN):
            writer = shard.open_writer()
        host.sleep(0.4)


def _evolve(host: Host, shard: Shard, column: str) -> None:
    """Add the column, unless another was faster: then learn of it."""
    known = shard.schema
    try:
        evolved = shard.evolve_schema(ShardSchema(known.arrow.append(pa.field(column, pa.int64())), known.key))
        expect(column in evolved.arrow.names, "schema", f"{column} was added, but the schema is {evolved.arrow.names}")
        return
    except SchemaMismatch:
        host.run.path("schema mismatch")
    except WEATHER:
        host.run.path("evolution failed")
    except Corruption:
        expect_damage(host)
    try:
        shard.refresh_schema()
    except WEATHER:
        host.run.path("evolution failed")
    except Corruption:
        expect_damage(host)


def _extended(host: Host, updates: list[Update], known: tuple[str, ...]) -> list[Update]:
    """The updates with values in the extra columns, now and then."""
    found: list[Update] = []
    for key, value, _, diff in updates:
        if known and host.random.random() < 0.7:
            extras = [host.random.randrange(3) if name in known else None for name in EXTRAS]
            found.append((key, (value, *extras), 0, diff))
        else:
            found.append((key, value, 0, diff))
    return found


def insert(host: Host, writer: WriteHandle, updates: list[Update], extras: tuple[str, ...], name: str) -> bool:
    """Insert the rows, recorded; whether the outcome is known."""
    write = Write(0, "insert", me(host), name, updates)
    if not updates:
        return True
    staged: list[tuple[Run, ...]] = []
    with attempted(host, write) as token:
        staged.append(writer.stage(as_table(updates, timed=False, extras=extras), None))
        told(write, writer.commit_insert(staged[0], token=token))
    if not staged:  # so nothing was sent
        write.answer = "refused"
    elif write.answer == "unknown":
        retried(host, write, lambda t: writer.commit_insert(staged[0], token=t))
    return write.answer != "unknown"


class _Life:
    """A life of the name, and what its user holds of it, also when it has long ended."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.writer = shard.open_writer()


def demolisher(host: Host) -> None:
    """Makes a shard that nobody else needs, writes to it, reads it, drops it one day, and uses its name again.

    He goes on to use what he holds of a life that has ended: nothing of it may reach the one after.
    """
    lives = [_Life(host.open(DOOMED))]
    while host.work():
        life = lives[-1] if host.random.random() < 0.6 else host.random.choice(lives)
        try:
            _use(host, life)
        except UnknownShard:
            ended = host.run.truth(lived(life.shard)).state.is_closed
            expect(ended, "dropped", f"{lived(life.shard)} is unknown, but nobody has dropped it")
            host.run.path("dropped shard found")
            if life is lives[-1] and host.random.random() < RECREATE_RATE:
                lives = [life, _Life(host.open(DOOMED))]
        host.sleep(0.5)


def _use(host: Host, life: _Life) -> None:
    kind = host.random.random()
    if kind < DROP_RATE:
        drop_shard(host, life.shard)
    elif kind < 0.2:
        _advance(host, life.shard)
    elif kind < 0.5:
        _read(host, life.shard)
    else:
        updates = [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)]
        if not insert(host, life.writer, updates, (), lived(life.shard)):
            life.writer = life.shard.open_writer()


def _advance(host: Host, shard: Shard) -> None:
    upper = observed_upper(host, shard)
    if upper is not None:
        write = Write(0, "advance", me(host), lived(shard), [], upper, upper + 1)
        with attempted(host, write):
            told(write, shard.advance_upper(upper + 1))


def drop_shard(host: Host, shard: Shard) -> None:
    drops = host.run.history.drops
    try:
        shard.drop(force=host.random.random() < 0.6)
        drops.setdefault(lived(shard), host.run.oracle.tick())
        host.run.path("drop answered")
        closed = host.run.truth(lived(shard)).state.is_closed
        expect(closed, "dropped", "a drop was acknowledged, but the shard is open")
    except WEATHER:
        host.run.path("drop unknown")
    except Conflict:
        host.run.path("drop refused")
    except Corruption:
        expect_damage(host)


def _read(host: Host, shard: Shard) -> None:
    upper = observed_upper(host, shard)
    as_of = max(0, (upper or 0) - host.random.choice((0, 1, 3)))
    with reading(host, lived(shard), as_of):
        read_once(host, shard, as_of, pause_s=host.random.choice((0.0, 1.0)))


__all__ = ["demolisher", "drop_shard", "evolver", "insert"]
