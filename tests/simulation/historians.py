"""Those who ask by wall clock, change what a shard keeps, and forget history by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from persist.client.shard import Shard
from persist.client.timestamps import to_datetime
from persist.core.errors import Conflict, Corruption, NotReadable, UnknownShard
from persist.core.shard_settings import ShardSettings
from tests.simulation.host import COPIES, DOOMED, MAIN, WEATHER, Host, expect_damage, lived, me
from tests.simulation.instants import InstantTruth
from tests.simulation.oracle import expect
from tests.simulation.readers import read_once, reading
from tests.simulation.writers import observed_upper

HISTORIES = ("2s", "5s", "20s", "none", "forever", "2s,copies=none", "none,copies=5s", "forever,copies=2s")
AGES = ("1s", "2s", "4s", "none", "forever")
GRIDS_MS = (50, 250, 3_000)
GRID_RATE = 0.4
ASKED_AT_ONCE = 3
AGO_MS_MAX = 1_000
AHEAD_MS_MAX = 300
AFTER_MS_MAX = 3_000


def instants(host: Host, shard: Shard) -> InstantTruth:
    return host.run.truth(lived(shard)).instants


def timekeeper(host: Host) -> None:
    """Asks which time a wall clock names, reads as of it, and asks from when on a time is shown."""
    name = host.random.choice((MAIN, MAIN, MAIN, COPIES, COPIES, DOOMED))
    shard = host.open(name)
    while host.work():
        try:
            for _ in range(ASKED_AT_ONCE):
                ask(host, shard, _some_instant(host, shard), reads=host.random.random() < 0.2)
            if host.random.random() < 0.3:
                _ask_when_shown(host, shard)
        except UnknownShard:
            ended = host.run.truth(lived(shard)).state.is_closed
            expect(ended, "dropped", f"{lived(shard)} is unknown, but nobody has dropped it")
            shard = host.open(name)
        host.sleep(0.5)


def _some_instant(host: Host, shard: Shard) -> int:
    """One that somebody has asked for, or just now by the own clock, or soon after some commit."""
    truth, kind = instants(host, shard), host.random.random()
    if truth.answers and kind < 0.4:
        return host.random.choice(sorted(truth.answers))
    if kind < 0.7:
        return max(0, host.clock.now_ms() - host.random.randint(-AHEAD_MS_MAX, AGO_MS_MAX))
    return host.random.choice(truth.made).at_ms + host.random.randrange(AFTER_MS_MAX)


@contextmanager
def asking(host: Host, shard: Shard, at_ms: int) -> Iterator[None]:
    """What may come instead of an answer."""
    try:
        yield
    except WEATHER:  # also: nobody's clock can be trusted, or the instant is not over
        host.run.path("wall clock unanswered")
    except NotReadable:
        host.run.path("wall clock forgotten")
        instants(host, shard).refused(at_ms, host.run.truth(lived(shard)).state.since, me(host))
    except Corruption:
        expect_damage(host)


def ask(host: Host, shard: Shard, at_ms: int, *, reads: bool) -> None:
    """The upper by the instant, checked against all that is known of it; then the contents by it."""
    with asking(host, shard, at_ms):
        upper = shard.time_at(to_datetime(at_ms), wait_s=host.random.choice((0.0, 2.0)))
        instants(host, shard).answered(at_ms, upper, me(host))
        host.run.path("wall clock answered")
        if not reads or not upper.element:
            return
        as_of = upper.element - 1
        with reading(host, lived(shard), as_of):
            found = read_once(host, shard, to_datetime(at_ms), pause_s=host.random.choice((0.0, 0.05)))
            expect(found == as_of, "sealed", f"a snapshot of {at_ms} ms is as of {found}, not {as_of}")
            host.run.path("wall clock read")


def _ask_when_shown(host: Host, shard: Shard) -> None:
    state = host.run.truth(lived(shard)).state
    if not state.upper.element or state.since.element is None:
        return
    time = host.random.randint(min(state.since.element, state.upper.element - 1), state.upper.element - 1)
    try:
        found = shard.timestamp_of(time)
    except WEATHER:
        return
    except NotReadable:
        since = host.run.truth(lived(shard)).state.since
        expect(not since.less_equal(time), "readable", f"when {time} was written was refused with since {since}")
        return
    except Corruption:
        expect_damage(host)
        return
    if found is not None:
        host.run.path("instant told")
        instants(host, shard).shown.append((time, (found - to_datetime(0)) // timedelta(milliseconds=1)))


def configurator(host: Host) -> None:
    """Changes how much history a shard keeps, by what he knows of its settings, and forgets some by hand."""
    shard = host.open(host.random.choice((MAIN, MAIN, COPIES)))
    known: ShardSettings | None = None
    while host.work():
        kind = host.random.random()
        try:
            if known is None or kind < 0.3:
                known = shard.settings
            elif kind < 0.6:
                known = _configure(host, shard, known)
            else:
                _forget_by_hand(host, shard)
        except WEATHER:
            host.run.path("settings unanswered")
        except Corruption:
            expect_damage(host)
        host.sleep(0.7)


def _configure(host: Host, shard: Shard, known: ShardSettings) -> ShardSettings | None:
    grid_ms = host.random.choice(GRIDS_MS) if host.random.random() < GRID_RATE else None
    mark_every = None if grid_ms is None else timedelta(milliseconds=grid_ms)
    age = host.random.choice(AGES)
    try:
        found = shard.configure(history=age, mark_every=mark_every, expected_version=known.version)
    except Conflict:
        host.run.path("settings conflict")
        return None
    host.run.path("settings changed")
    host.run.history.settings.append((shard.name, me(host), found))
    return found


def _forget_by_hand(host: Host, shard: Shard) -> None:
    upper = observed_upper(host, shard)
    if upper:
        shard.forget(max(0, upper - host.random.choice((1, 2, 5, 10))))
        host.run.path("history forgotten by hand")


__all__ = ["HISTORIES", "ask", "configurator", "instants", "timekeeper"]
