"""Builds that are broken on purpose: the proof that the checkers can fail.

Each mutation is a mistake that somebody could make, as small as possible, switched on for one run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pyarrow.compute as pc

import compactor.orphans
import persist.client.idempotency
import persist.client.listen
import persist.client.pipelined
import persist.client.snapshot
import persist.client.write
import persist.commit.commit_plan
import persist.core.state_diff
import persist.core.transitions
import persist.core.transitions.attribute_updates
import persist.core.transitions.lifecycle
import persist.core.transitions.reader_holds
from compactor.engine import LocalEngine
from compactor.orphans import Sweeper
from persist.client.listen import Listen
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.commit.committer import Machine
from persist.commit.log_writer import LogWriter
from persist.commit.spill_files import SpillReader
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Trace
from persist.core.blob_keys import is_bundle_key, is_part_key
from persist.core.bundles import Moves
from persist.core.errors import Conflict, Indeterminate, Unavailable
from persist.core.frontier import Antichain, meet
from persist.core.ids import SeqNo, Token, mint
from persist.core.readable_times import latest_time
from persist.core.record import replace
from persist.core.shard_view import ViewRequest
from persist.core.state import Claim, State
from persist.core.transitions import Context, history_control, part_maintenance, writers
from persist.maintenance.collector import Collector, GcReport
from persist.parts import KeyRange, PartWriter
from persist.parts.consolidate import Times
from tests.simulation import (
    clock_mutations,
    cloning,
    dating,
    erasing,
    history_mutations,
    ingesting,
    narrow_mutations,
    publishing,
    restoring,
    retaining,
    sharing,
    tagging,
    truncating,
    trusting,
)
from tests.simulation.breaking import Broken, every, outcomes_stay_unread, resent_as, transition
from tests.simulation.host import WEATHER

SLOW_S = 3


def gc_ignores_leases() -> Broken:
    """The collector takes the newest rollup for its horizon, whatever readers hold."""

    def horizon(self: Collector, state: State, first: SeqNo) -> SeqNo:
        return max((seqno for seqno in state.rollups if seqno > first), default=first)

    return patch.object(Collector, "_horizon", horizon)


def gc_reads_beyond_its_horizon() -> Broken:
    """The collector deletes what any later state diff says is gone."""
    real = Collector._delete_gone
    return patch.object(
        Collector, "_delete_gone", lambda self, machine, first, last: real(self, machine, first, SeqNo(10**9))
    )


def gc_forgets_the_rollup_of_the_log() -> Broken:
    """Rollups up to the horizon are forgotten, with the one at which the log begins."""
    real = part_maintenance.remove_rollups
    return transition(
        c.RemoveRollups, lambda s, command, x: real(s, replace(command, below=SeqNo(command.below + 1)), x)
    )


def sweep_ignores_age() -> Broken:
    """The sweep takes what nothing names, however young and whoever may be about to name it."""
    return every(
        patch.object(compactor.orphans._Age, "is_young", lambda self, stat: False),
        patch.object(compactor.orphans, "_WRITER", re.compile("(?!)")),
    )


def merge_applied_by_time_bounds() -> Broken:
    """A merge replaces the batches that some of its inputs are in, though others are gone; claims keep nobody out."""
    real, take = Trace.covering, part_maintenance.hold_claim

    def hold_claim(state: State, command: c.HoldClaim, context: Any) -> Any:
        others = {key: claim for key, claim in state.claims.items() if claim.owner == command.owner}
        return take(replace(state, claims=others), command, context)

    def covering(self: Trace, part_ids: frozenset[str]) -> tuple[int, int] | None:
        here = part_ids & {part.id for part in self.parts()}
        return real(self, here) if here else None

    return every(
        transition(c.HoldClaim, hold_claim),
        every(patch.object(Trace, "covering", covering), patch.object(part_maintenance, "_may_apply", lambda *_: True)),
    )


def merge_beyond_since() -> Broken:
    """Compaction advances times one beyond since."""
    real = LocalEngine.merge
    return patch.object(
        LocalEngine, "merge", lambda self, job, keep: real(self, dataclasses.replace(job, since=job.since + 1), keep)
    )


def merge_drops_retractions() -> Broken:
    """Compaction keeps insertions only."""
    real = PartWriter.write
    return patch.object(
        PartWriter, "write", lambda self, table: real(self, table.filter(pc.greater(table.column("__diff"), 0)))
    )


def retry_without_token() -> Broken:
    """Every retry is a new command."""

    def anew(transport: Any, _: str, command: Any) -> Any:
        return replace(command, token=mint(Token, transport.ids)) if hasattr(command, "token") else command

    return resent_as(anew)


def unknown_told_as_not_done() -> Broken:
    """The committer says "it did not happen" where nobody knows."""
    real = LogWriter.compare_and_set

    def compare_and_set(self: LogWriter, *arguments: Any, **named: Any) -> Any:
        try:
            return real(self, *arguments, **named)
        except Indeterminate as error:
            raise Unavailable(str(error)) from error

    def is_ours(self: LogWriter, *_: Any) -> bool:
        raise Unavailable("the outcome of a commit could not be read")

    return every(
        patch.object(LogWriter, "compare_and_set", compare_and_set), patch.object(LogWriter, "is_ours", is_ours)
    )


def lost_race_taken_for_won() -> Broken:
    """Another's commit at the seqno counts as one's own."""
    return patch.object(LogWriter, "is_ours", lambda self, change, deadline: True)


def refresh_from_the_cache() -> Broken:
    """Reads are answered from the cached State, however old."""
    real = Machine.wait_for

    def wait_for(self: Machine, ready: Callable[[State], bool], *limits: float) -> State:
        cached = self.state()
        return cached if ready(cached) else real(self, ready, *limits)

    return patch.object(Machine, "wait_for", wait_for)


def expiry_moves_since() -> Broken:
    """Forgetting a lapsed reader lets since jump to what the other readers hold, or to the latest time."""
    real = persist.commit.commit_plan.expire_lapsed

    def expire_lapsed(state: State, now_ms: int, checked_ms: int | None) -> State:
        expired = real(state, now_ms, checked_ms)
        if expired.leased_readers is state.leased_readers:
            return expired
        others = (*expired.leased_readers.values(), *expired.critical_readers.values())
        held = meet([latest_time(expired), *(reader.since for reader in others)])
        return replace(expired, since=max(expired.since, held))

    return patch.object(persist.commit.commit_plan, "expire_lapsed", expire_lapsed)


def since_ignores_leased_readers() -> Broken:
    """Since is the meet of what critical readers hold; leased ones are overlooked."""

    def held(state: State, *more: Antichain) -> Antichain:
        holds = [*(reader.since for reader in state.critical_readers.values()), *more]
        return meet(holds) if holds else state.since

    def moved(*given: Any, **named: Any) -> State:
        with patch.object(history_control, "held_since", held):
            return history_control.with_since(*given, **named)

    return patch.object(persist.core.transitions.reader_holds, "with_since", moved)


def listen_downgrades_before_reading() -> Broken:
    """A listener gives up its hold on the updates that it is about to read, is slow, and does not ask what is left."""
    real = Listen.next_events

    def next_events(self: Listen, timeout_s: float) -> Iterator[Any]:
        lease = self._lease
        view = lease._transport.view(lease._name, ViewRequest(with_batches=False))
        lease.downgrade(max(lease.since, Antichain(max(0, (view.upper.element or 1) - 1))), view.seqno)
        for _ in range(SLOW_S):
            lease._transport.clock.sleep(1.0)
            lease.keep()
        yield from real(self, timeout_s)

    return every(patch.object(Listen, "next_events", next_events), patch.object(persist.client.listen, "check_held"))


def listen_moves_before_reading() -> Broken:
    """A listener's frontier is beyond the updates that it failed to read."""
    real = Listen.next_events

    def next_events(self: Listen, timeout_s: float) -> Iterator[Any]:
        try:
            yield from real(self, timeout_s)
        except WEATHER:
            element = self.frontier.element
            self.frontier = Antichain(None if element is None else element + 1)
            raise

    return patch.object(Listen, "next_events", next_events)


def snapshot_not_clipped() -> Broken:
    """A snapshot shows the later updates of a batch that reaches beyond its time."""
    return patch.object(Times, "snapshot", classmethod(lambda cls, as_of: cls(advance=as_of)))


def snapshot_does_not_wait() -> Broken:
    """A snapshot is read before its time is complete."""

    def at_once(transport: Any, name: str, as_of: int, lease: Any, wait_s: float) -> Any:
        return transport.view(name, ViewRequest())

    return patch.object(persist.client.snapshot, "wait_for_upper", at_once)


def splits_overlap() -> Broken:
    """Every split of a snapshot has all keys."""

    def plan_splits(runs: Any, num_splits: int, *_: Any, **__: Any) -> list[KeyRange]:
        return [KeyRange(None, None)] * num_splits

    return patch.object(persist.client.snapshot, "plan_splits", plan_splits)


def append_not_clipped() -> Broken:
    """What another replica has written already is written again."""
    return patch.object(writers, "clipped", lambda runs, lower: tuple(runs))


def insert_joins_what_was_seen() -> Broken:
    """An insert joins the last batch though that was committed before."""
    real = writers.insert

    def insert(state: State, command: c.Insert, context: Any) -> Any:
        element = state.upper.element
        last = state.trace.batches[-1] if state.trace.batches else None
        if element and last is not None and last.runs and last.desc.lower == Antichain(element - 1):
            context = replace(context, inserted_at=element - 1)
        return real(state, command, context)

    return transition(c.Insert, insert)


def opaque_not_compared() -> Broken:
    """Whoever was fenced moves the critical reader all the same."""
    return patch.object(persist.core.transitions.reader_holds, "_check_opaque", lambda *_: None)


def conditions_ignored() -> Broken:
    """Attributes are set whatever they are."""
    real = persist.core.transitions.attribute_updates.updated

    def updated(updates: Any, current: Any) -> Any:
        met = [replace(update, verb="replace") if "if" in update.verb else update for update in updates]
        return real(met, current)

    return patch.object(persist.core.transitions.attribute_updates, "updated", updated)


def flush_covers_what_came_later() -> Broken:
    """A flush takes every value out of the State, those too that changed since it began."""
    real = persist.core.transitions.attribute_updates.flush

    def flush(state: State, command: c.FlushAttributes, context: Any) -> Any:
        following, result = real(state, command, context)
        return (replace(following, attributes={}) if following is not state else state), result

    return transition(c.FlushAttributes, flush)


def pipeline_without_conditions() -> Broken:
    """A pipelined writer sends its appends again without looking whether they landed."""
    unconditional = classmethod(lambda cls, key, value, expected: cls(key, "replace", value, expected))
    return patch.object(
        persist.client.pipelined,
        "AttributeUpdate",
        type("Update", (AttributeUpdate,), {"replace_if_equals": unconditional}),
    )


def evolution_in_place() -> Broken:
    """A new schema takes the place of the current one."""

    def evolve(state: State, command: c.EvolveSchema, context: Any) -> Any:
        return replace(state, schemas={**state.schemas, state.schema_id: command.schema}), c.SchemaRegistered(
            state.schema_id
        )

    return transition(c.EvolveSchema, evolve)


def drop_leaves_writers() -> Broken:
    """A drop ends reading, not writing."""
    real = persist.core.transitions.lifecycle.drop

    def drop(state: State, command: c.Drop, context: Any) -> Any:
        following, result = real(state, command, context)
        return replace(following, trace=state.trace), result

    return transition(c.Drop, drop)


def lives_not_told_apart() -> Broken:
    """A handle of a life that has ended goes on in the next life of the name."""
    return every(
        patch.object(OneShard, "apply", lambda self, *command: self.inner.apply(*command)),
        patch.object(OneShard, "view", lambda self, name, request: self.inner.view(name, request)),
    )


def tombstone_keeps_blobs() -> Broken:
    """The tombstone stands, and the data of the shard stays."""
    return patch.object(Collector, "_clear_tombstone", lambda self, machine, state, first: GcReport())


def gc_never_truncates() -> Broken:
    """The log of a shard grows for ever."""
    return patch.object(Collector, "_horizon", lambda self, state, first: first)


def sweep_overlooks_parts() -> Broken:
    """The sweep takes rollups only."""
    real = Sweeper._delete

    def delete(self: Sweeper, name: str, found: Any, report: Any) -> None:
        real(self, name, [stat for stat in found if not stat.key.endswith(".parquet")], report)

    return patch.object(Sweeper, "_delete", delete)


def claims_never_lapse() -> Broken:
    """What a dead worker had claimed nobody else may merge."""
    return patch.object(Claim, "lapsed", lambda self, now_ms, leases=1: False)


def tokens_forgotten() -> Broken:
    """A command that is retried is a new command."""
    alone = patch.object(writers, "answered", lambda state, command, context: None)
    return every(patch.object(writers, "_answered", lambda writer, token: None), alone, outcomes_stay_unread())


def outcome_files_unread() -> Broken:
    """What became of a token is forgotten when it is moved to a file."""
    return patch.object(SpillReader, "remembered", lambda self, state, commands: {})


def refusal_told_as_done() -> Broken:
    """A write that the store did not take is acknowledged."""
    real = persist.client.write.send

    def send(transport: Any, name: str, command: Any, retry_s: float, *caller: Any) -> Any:
        try:
            return real(transport, name, command, retry_s, *caller)
        except (Unavailable, Conflict):
            if isinstance(command, c.CompareAndAppend):
                return c.Appended(command.expected_upper, command.new_upper)
            raise

    return patch.object(persist.client.write, "send", send)


def wrong_time_told() -> Broken:
    """An insert is told another time than the one at which it landed."""
    real = WriteHandle.commit_insert

    def commit_insert(self: WriteHandle, *arguments: Any, **settings: Any) -> c.Appended:
        found = real(self, *arguments, **settings)
        later = Antichain((found.lower.element or 0) + 1)
        return c.Appended(later, Antichain((later.element or 0) + 1))

    return patch.object(WriteHandle, "commit_insert", commit_insert)


def departures_unmentioned() -> Broken:
    """State diffs do not say which blobs left."""
    return patch.object(persist.core.state_diff, "gone_between", lambda old, new: ())


def staged_age_ignored() -> Broken:
    """What was written long ago is named, though it may have been swept."""
    return patch.object(Context, "may_be_swept", lambda self, state, key: False)


def sweep_overlooks_bundles() -> Broken:
    """The sweep takes what bundles list for orphans."""
    return patch.object(Sweeper, "_parts_of", lambda self, state, bundle: [])


def bundle_swept_while_named() -> Broken:
    """The sweep takes the bundles that the State names."""
    real = Sweeper._live_keys
    return patch.object(
        Sweeper,
        "_live_keys",
        lambda self, state: {key for key in real(self, state) if not is_bundle_key(key)},
    )


def parts_of_a_gone_bundle_kept() -> Broken:
    """The collector deletes bundles and leaves what they list; the sweep takes only what nothing ever named."""

    def live_keys(self: Sweeper, state: State) -> set[str]:
        return real(self, state) | {stat.key for stat in self._location.blob.list("s") if is_part_key(stat.key)}

    real = Sweeper._live_keys
    return every(
        patch.object(Collector, "_listed", lambda self, machine, bundles: iter(())),
        patch.object(Sweeper, "_live_keys", live_keys),
    )


def bundled_parts_told_as_gone() -> Broken:
    """Parts that go to a bundle are told as gone."""
    return patch.object(Moves, "gone", lambda self, unnamed: unnamed)


MUTATIONS: dict[str, Callable[[], Broken]] = {
    broken.__name__: broken
    for broken in (
        gc_ignores_leases,
        gc_reads_beyond_its_horizon,
        gc_forgets_the_rollup_of_the_log,
        sweep_ignores_age,
        merge_applied_by_time_bounds,
        merge_beyond_since,
        merge_drops_retractions,
        retry_without_token,
        unknown_told_as_not_done,
        lost_race_taken_for_won,
        refresh_from_the_cache,
        expiry_moves_since,
        since_ignores_leased_readers,
        listen_downgrades_before_reading,
        listen_moves_before_reading,
        snapshot_not_clipped,
        snapshot_does_not_wait,
        splits_overlap,
        append_not_clipped,
        insert_joins_what_was_seen,
        opaque_not_compared,
        conditions_ignored,
        flush_covers_what_came_later,
        pipeline_without_conditions,
        evolution_in_place,
        drop_leaves_writers,
        lives_not_told_apart,
        tombstone_keeps_blobs,
        gc_never_truncates,
        sweep_overlooks_parts,
        sweep_overlooks_bundles,
        bundle_swept_while_named,
        parts_of_a_gone_bundle_kept,
        bundled_parts_told_as_gone,
        claims_never_lapse,
        tokens_forgotten,
        outcome_files_unread,
        refusal_told_as_done,
        wrong_time_told,
        departures_unmentioned,
        staged_age_ignored,
        *trusting.TRUSTING,
        *clock_mutations.BROKEN,
        *tagging.BROKEN,
        *restoring.BROKEN,
        *truncating.BROKEN,
        *retaining.BROKEN,
        *erasing.BROKEN,
        *dating.BROKEN,
        *cloning.BROKEN,
        *publishing.BROKEN,
        *ingesting.BROKEN,
        *sharing.BROKEN,
        *narrow_mutations.MEANT_FOR,
        *history_mutations.MEANT_FOR,
    )
}

# Broken builds that only this check counts for.
MEANT_FOR = {
    broken.__name__: check for broken, check in (narrow_mutations.MEANT_FOR | history_mutations.MEANT_FOR).items()
}

# Broken builds that show only where all of these faults strike, in a run with all of these roles; other seeds are
# passed over and do not count.
NEEDED: dict[str, set[str]] = (
    {broken.__name__: {"timekeeper"} for broken in history_mutations.MEANT_FOR}
    | {
        "advance_over_tag": {"tagger"},
        "advance_short_of_tag": {"tagger"},
        "claims_never_lapse": {"crash"},
        "conditions_ignored": {"accountant"},
        "drop_leaves_writers": {"demolisher"},
        "evolution_in_place": {"evolver"},
        "history_aged_by_any_clock": {"timekeeper", "wild_clock"},
        "lives_not_told_apart": {"demolisher"},
        "pipeline_without_conditions": {"pipeliner"},
        "refused_while_under_way": {"held_up"},
        "policy_by_its_own_clock": {"retainer", "wild_clock"},
        "policy_by_the_newest_cut": {"retainer"},
        "policy_passes_a_consumer": {"retainer"},
        "restore_ignores_the_upper": {"restorer"},
        "restore_lands_twice": {"restorer"},
        "staged_age_ignored": {"hibernate"},
        "tombstone_keeps_blobs": {"demolisher"},
        "truncate_by_time_only": {"truncator"},
        "truncate_ignores_the_upper": {"truncator"},
        "truncated_once_more": {"truncator"},
        "truncated_rows_count_again": {"truncator"},
        "drop_ignores_retractions": {"truncator"},
        "merge_over_the_cut": {"truncator"},
        "drop_unheard": {"truncator"},
        "drop_forgotten_early": {"truncator"},
        "clock_compared_at_one_side": {"wild_clock"},
    }
    | {broken.__name__: {"eraser"} for broken in erasing.BROKEN}
    | {"date_before_its_mark": {"dater"}}
    | {broken.__name__: {"cloner"} for broken in cloning.BROKEN}
    | {broken.__name__: {"publisher"} for broken in publishing.BROKEN}
    | {broken.__name__: {"ingester"} for broken in ingesting.BROKEN}
)

# Broken builds that take some hundred seeds, so only `python -m tests.simulation.controls` looks for them. Tests of
# their own show the same in a moment: staged_age.txt, test_retention.py, test_wrong_clocks.py, test_checked_clock.py,
# test_outcomes.py, test_clone_scenes.py, and test_late_requests.py.
RARE = {
    "clock_compared_at_one_side",
    "staged_age_ignored",
    "frontier_not_committed",
    "heartbeats_by_the_lease_clock",
    "lend_below_rollup",
    "lost_holds_unnoticed",
    "outcome_files_unread",
    "policy_by_its_own_clock",
    "refused_while_under_way",
    "sweep_by_its_own_clock",
    "untaken_ended_without_fence",
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The build with that mutation, or the sound one."""
    with MUTATIONS[name]() if name else nullcontext():
        yield
