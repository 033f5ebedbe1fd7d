"""Clones in the simulation: who makes, uses and drops them, and the broken builds that lose or leave what is lent.

A clone of `main` is called `main.1`, and a clone of that `main.1.2`. So the oracle knows what each is a clone of.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.batch import trace_of
from persist.core.errors import Conflict, Expired, UnknownShard
from persist.core.ids import SeqNo
from persist.core.named_holds import is_foreign
from persist.core.record import replace
from persist.core.transitions import lifecycle
from persist.maintenance import clones_and_loans, collector
from persist.maintenance.clones_and_loans import LoanLists
from tests.simulation.breaking import Broken, transition
from tests.simulation.host import COPIES, DOOMED, MAIN, Host, extras_of, lived, weathered
from tests.simulation.lifecycle import drop_shard, insert
from tests.simulation.oracle import expect, is_clone, source_of
from tests.simulation.readers import read_once, reading
from tests.simulation.writers import rows

CLONES_FROM = 20_000  # seeds from here on have clones, so that those before it mean what they meant
NAMES_MAX = 5  # of clones in a run
DEPTH_MAX = 2  # clones of clones, and no further


def cloner(host: Host) -> None:
    """Makes clones of what is there, writes to them, reads them, drops them, and uses their names again."""
    for name in (MAIN, COPIES):
        host.open(name)
    while host.work():
        chance = host.random.random()
        try:
            with weathered(host, "cloner failed"):
                if chance < 0.35:
                    _clone(host)
                elif (name := _live(host)) is not None:
                    _use(host, host.client.shard(name), chance)
        except (UnknownShard, Conflict):  # dropped meanwhile
            host.run.path("clone gone meanwhile")
        host.sleep(0.5)


def _live(host: Host) -> str | None:
    truths = host.run.oracle.shards
    found = [name for name in sorted(truths) if is_clone(name) and not truths[name].state.is_closed]
    return host.random.choice(found) if found else None


def _clone(host: Host) -> None:
    """A clone under a new name, or under that of one that was dropped and of which no clone was ever made."""
    run, truths = host.run, host.run.oracle.shards
    sources = [name for name in sorted(truths) if name.count(".") < DEPTH_MAX and _is_usable(host, name)]
    source = host.random.choice(sources)
    again = [n for n in sorted(truths) if is_clone(n) and truths[n].state.is_closed and n not in run.cloned]
    again = [name for name in again if _is_usable(host, source_of(name))]
    if again and host.random.random() < 0.6:
        name = host.random.choice(again)
        source = source_of(name)
    elif run.clones_named < NAMES_MAX:
        run.clones_named += 1
        name = f"{source}.{run.clones_named}"
    else:
        return
    run.cloned.add(source)
    before, erased = run.truth(source).state.upper, _is_erased(host, source)
    run.oracle.note(f"{host.process.name} clones {source} as {name}")
    try:
        host.client.clone(source, name)
    except Conflict as error:
        if "erasure" in error.message:
            expect(erased or _is_erased(host, source), "cloned", f"{source} was not cloned, and is not erased")
            return
        taken = name in truths or _uses_own(host, source, name)
        expect(taken, "cloned", f"{name} is not there, and a clone of that name was refused")
        return
    except Expired:  # too much went on, or its clock is behind
        run.path("clone expired")
        return
    expect(name in truths, "cloned", f"clone {name} was acknowledged, and is not there")
    expect(before <= run.truth(name).state.upper, "cloned", f"{name} has less than {source} had")
    run.path("clone acknowledged")


def _is_usable(host: Host, name: str) -> bool:
    truth = host.run.oracle.shards.get(name)
    return truth is not None and not truth.state.is_closed and name != DOOMED


def _is_erased(host: Host, name: str) -> bool:
    """Whether an erasure of the shard is not complete."""
    return any(erasure.proof is None for erasure in host.run.truth(name).state.erasures.values())


def _uses_own(host: Host, source: str, name: str) -> bool:
    """Whether the source borrows of an earlier life of that name."""
    return name in host.run.truth(source).state.borrowed.values()


def _use(host: Host, shard: Shard, chance: float) -> None:
    if chance < 0.5:
        drop_shard(host, shard)
    elif chance < 0.75:
        updates = [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)]
        insert(host, shard.open_writer(), updates, extras_of(shard), lived(shard))
    else:
        upper = host.run.truth(lived(shard)).state.upper.element or 0
        as_of = max(0, upper - host.random.choice((1, 1, 2, 4)))
        with reading(host, lived(shard), as_of):
            read_once(host, shard, as_of, pause_s=host.random.choice((0.0, 1.0)))


# --- broken builds


def borrower_deletes() -> Broken:
    """A clone's collector deletes what it has borrowed as if it were its own."""
    return patch.object(collector, "is_foreign", lambda key, shard: False)


def owner_forgets_loans() -> Broken:
    """The owner's collector does not look into the lists of what is lent."""
    return patch.object(LoanLists, "not_held", lambda self, machine, state, keys: iter(keys))


def lend_below_rollup() -> Broken:
    """The owner lends of a State that its collections have passed."""
    return patch.object(lifecycle, "lends_from", lambda state: SeqNo(0))


def returned_while_versions_need_it() -> Broken:
    """A clone gives back what its newest State does not name, though older versions that are read do."""
    whole = clones_and_loans.Lending._needed

    def needed(self: clones_and_loans.Lending, name: str, state: Any) -> tuple[SeqNo, set[str]]:
        first, _ = whole(self, name, state)
        return first, {key for key in state.blob_keys() if is_foreign(key, state.shard_id)}

    return patch.object(clones_and_loans.Lending, "_needed", needed)


def untaken_ended_without_fence() -> Broken:
    """A loan without a clone is ended, and the clone may begin afterwards."""

    def taken(self: clones_and_loans.Lending, state: Any, loan_id: Any, loan: Any) -> bool:
        try:
            return loan_id in self._committer_of(loan.borrower).refresh().borrowed
        except UnknownShard:
            return False

    return patch.object(clones_and_loans.Lending, "_may_be_taken", taken)


def loans_never_end() -> Broken:
    """What a clone gives back stays lent."""
    return transition(c.EndLoan, lambda state, command, context: (state, c.Lent(True)))


def clone_of_an_older_state() -> Broken:
    """A clone lacks the batch that was written last."""
    real = clones_and_loans.clone_of

    def clone_of(state: Any, *arguments: Any) -> Any:
        born = real(state, *arguments)
        return replace(born, trace=trace_of(born.trace.batches[:-1])) if len(born.trace.batches) > 1 else born

    return patch.object(clones_and_loans, "clone_of", clone_of)


BROKEN = (
    borrower_deletes,
    owner_forgets_loans,
    lend_below_rollup,
    returned_while_versions_need_it,
    untaken_ended_without_fence,
    loans_never_end,
    clone_of_an_older_state,
)
