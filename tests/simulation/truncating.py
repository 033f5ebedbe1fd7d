"""Truncations in the simulation: who takes old rows away, beside writers, and the builds that fail him.

The oracle takes a truncation for what was there before its cut and still is at the moment it lands, and lets none land
whose cut is no later than that of an earlier one. So every later read of the shard is held against exactly the rest.
A drop takes away what was written before its cut, and leaves no row there less than no times.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import compactor.worker
import persist.client.listen
import persist.client.restore_and_truncate
import persist.commit.blob_tasks
import persist.core.shard_view
import persist.core.transitions.row_drops
import persist.maintenance.expiry
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.erasure_progress import erased_from
from persist.core.errors import Corruption, Indeterminate, InvalidUsage, NotReadable
from persist.core.ids import Token
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions import rewrites
from persist.core.truncations_and_drops import floor_at
from persist.maintenance.expiry import forget_outlived
from tests.simulation.breaking import Broken, every, ignores_the_upper, transition
from tests.simulation.host import KEYS, MAIN, WEATHER, Host, expect_damage, me
from tests.simulation.oracle import Write, expect
from tests.simulation.readers import read_once, reading
from tests.simulation.writers import as_table, attempted, retried, told

DROPPED = 0.5  # of the truncations are drops; of these as many go up to the upper
AGAIN = 0.3  # of the truncations take an earlier cut once more
BROUGHT_MAX = 3  # rows that were taken away and are written again


def truncator(host: Host) -> None:
    """Truncates before a time that is readable, and now and then writes again what went."""
    shard, cuts = host.open(MAIN), [0]
    while not host.run.stopping:  # it takes no operation from others
        state = host.run.truth(MAIN).state
        low, high = state.since.element, state.upper.element
        if low is not None and high:
            cut = host.random.randint(min(low, high - 1), high - 1)
            again = host.random.random() < AGAIN
            cuts.append(max(low, host.random.choice(cuts)) if again and max(cuts) < high else cut)
            drops = host.random.random() < DROPPED
            if drops and host.random.random() < DROPPED:
                cuts[-1] = high - 1  # no retraction can follow it
            _truncate(host, shard, cuts[-1], "drop" if drops else "truncate")
            if drops:
                _forget(host)
            if host.random.random() < AGAIN:
                _bring_back(host, shard, cuts[-1])
        host.sleep(0.3)


def _forget(host: Host) -> None:
    """As maintenance does, which not every run has."""
    try:
        forget_outlived(host.location.machine(MAIN), host.location.clock, ages=False)
    except WEATHER:
        host.run.path("not forgotten")
    except Corruption:
        expect_damage(host)


def _truncate(host: Host, shard: Shard, as_of: int, kind: str) -> None:
    write = Write(0, kind, me(host), MAIN, [], as_of=as_of)
    retries = host.random.choice((0, 0, 2))
    with attempted(host, write) as token:
        told(write, _ask(host, shard, write, token, retries))
    retried(host, write, lambda again: _ask(host, shard, write, again, retries=0))


def _bring_back(host: Host, shard: Shard, as_of: int) -> None:
    """Insert some of the rows that were there as of that time, and are not any more.

    They have no columns beside the first ones, so it is left out where one was added.
    """
    truth = host.run.truth(MAIN)
    if len(truth.state.schemas) > 1:
        return
    gone = truth.contents(as_of).keys() - truth.contents((truth.state.upper.element or 1) - 1).keys()
    plain = [(key, value) for key, value in sorted(gone, key=repr) if key in KEYS and isinstance(value, int)]
    rows = [(key, value, 0, 1) for key, value in plain[:BROUGHT_MAX]]
    if not rows:
        return
    write = Write(0, "insert", me(host), MAIN, rows)
    with attempted(host, write) as token:
        told(write, shard.insert(as_table(rows, timed=False), token=token))
    retried(host, write, lambda again: shard.insert(as_table(rows, timed=False), token=again))


def _ask(host: Host, shard: Shard, write: Write, token: Token | None, retries: int) -> c.Appended:
    """Truncate, and look at the contents that the answer tells of."""
    assert write.as_of is not None
    truth = host.run.truth(MAIN)
    try:
        if write.kind == "drop":
            found = shard.truncate(write.as_of + 1, mode="drop", token=token)
        else:
            found = shard.truncate(write.as_of + 1, token=token, retries=retries)
    except InvalidUsage as error:
        if "is fed by append" in error.message:
            host.run.path("truncation refused")
            raise Indeterminate("its writer owns the times, and an earlier try may be under way") from error
        refused = write.kind == "drop" and ("least" in error.details or "truncate with mode 'retract'" in error.message)
        taken = any(diff < 0 for *_, diff in truth.updates) or error.details.get("erasures")
        if not refused:
            raise
        expect(taken, "truncated", f"#{write.number} was refused, and nothing was ever taken away: {error.message}")
        host.run.path("drop refused")
        raise Indeterminate("it is refused, and an earlier try may be under way") from error
    except NotReadable as error:
        since = max(truth.state.since, erased_from(truth.state))
        expect(not since.less_equal(write.as_of), "readable", f"no truncation before {write.as_of + 1}, since {since}")
        raise Indeterminate("it is forgotten, and an earlier try may be under way") from error
    upper = found.upper.element or 0
    if not found.changed:
        as_of, dropping = write.as_of, write.kind == "drop"
        left = truth.dropping(as_of, upper) if dropping else truth.truncating(as_of, upper, upper)
        done = write.as_of < truth.cut or not left
        expect(done, "truncated", f"#{write.number} left rows from before {write.as_of + 1} in the shard at {upper}")
    host.run.path("truncated" if found.changed else "nothing to truncate")
    with reading(host, MAIN, upper - 1):
        read_once(host, shard, upper - 1, pause_s=0)
    return c.Appended(found.lower, found.upper)


# --- broken builds


def truncate_by_time_only() -> Broken:
    """What was there before the cut is taken away, whether it is there still or not."""

    def of(transport: Any, held: Any) -> Any:
        going = real(transport, held)
        floor = floor_at(going.view.drops, going.start)
        return dataclasses.replace(going, end=going.start, taken_at=(), floor=floor)

    real = persist.client.restore_and_truncate._RemovedRows.of
    return patch.object(persist.client.restore_and_truncate._RemovedRows, "of", of)


def truncate_ignores_the_upper() -> Broken:
    """A truncation lands though another write came since it looked."""
    return ignores_the_upper(c.TRUNCATE)


def truncated_once_more() -> Broken:
    """The cut is not remembered: what was written again since goes too when the truncation comes again."""
    real = rewrites.rewrite

    def rewrite(state: State, command: c.Rewrite, context: Any) -> Any:
        known = state if command.truncates is None else replace(state, truncations=())
        return real(known, command, context)

    return transition(c.Rewrite, rewrite)


def truncated_rows_count_again() -> Broken:
    """What earlier truncations took away since the cut counts as there, so equal rows that came later go for it."""
    return patch.object(persist.core.shard_view, "visible_truncations", lambda _: ())


def drop_ignores_retractions() -> Broken:
    """Rows are dropped that were taken away after the cut."""
    return patch.object(persist.core.transitions.row_drops, "check_droppable", lambda *_: None)


def merge_over_the_cut() -> Broken:
    """Merges bring rows from before the cut of a drop beyond it."""
    real = compactor.worker.kept_below
    without = lambda state, since: real(replace(state, drops=()), since)  # noqa: E731
    return every(
        patch.object(compactor.worker, "kept_below", without),
        patch.object(persist.commit.blob_tasks, "kept_below", without),
    )


def drop_unheard() -> Broken:
    """Who listens over a drop is not told what it took away."""
    return patch.object(persist.client.listen, "drops_within", lambda *_: ())


def drop_forgotten_early() -> Broken:
    """What a drop took away leaves the State while times before it can be read."""
    return every(
        patch.object(persist.core.transitions.row_drops, "forgettable", lambda state: len(state.drops)),
        patch.object(persist.maintenance.expiry, "forgettable", lambda state: len(state.drops)),
    )


BROKEN = (truncate_by_time_only, truncate_ignores_the_upper, truncated_once_more, truncated_rows_count_again)
BROKEN += (drop_ignores_retractions, merge_over_the_cut, drop_unheard, drop_forgotten_early)
