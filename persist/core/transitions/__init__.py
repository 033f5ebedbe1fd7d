"""The state machine: `step(state, command, context) -> (state', result)`, pure.

A command that is refused raises an error of the tree and changes nothing. A command that changes nothing
returns the same State object, so that the committer can tell. Nothing here reads a clock, does I/O or makes
randomness: the time is in the context and ids are in the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core import phases
from persist.core.errors import UnknownShard
from persist.core.state import State
from persist.core.transitions import (
    attributes,
    bundling,
    dropping,
    erasures,
    handing,
    history,
    leases,
    lifecycle,
    loans,
    maintenance,
    outcomes,
    readers,
    recording,
    repair,
    retention,
    tags,
    writers,
)
from persist.core.transitions.context import Context
from persist.core.transitions.leases import expire_lapsed

__all__ = ["Context", "expire_lapsed", "step"]

_Transition = Callable[[State, Any, Context], tuple[State, c.Result]]

_TRANSITIONS: Mapping[type[Any], _Transition] = {
    c.RegisterWriter: writers.register,
    c.HeartbeatWriter: writers.heartbeat,
    c.ExpireWriter: writers.expire,
    c.CompareAndAppend: writers.compare_and_append,
    c.Append: writers.append,
    c.Insert: writers.insert,
    c.Restore: writers.restore,
    c.Truncate: writers.truncate,
    c.DropBefore: writers.drop_before,
    c.Edit: writers.edit,
    c.Reshape: writers.reshape,
    c.Erase: erasures.erase,
    c.NoteRewritten: erasures.note_rewritten,
    c.ProveErasure: erasures.prove,
    c.ReadErasures: erasures.read,
    c.AdvanceUpper: writers.advance_upper,
    c.UpdateAttributes: writers.update_attributes,
    c.ReadAttributes: attributes.read,
    c.ScanAttributes: attributes.scan,
    c.FlushAttributes: attributes.flush,
    c.FlushOutcomes: outcomes.flush,
    c.RegisterReader: readers.register,
    c.HeartbeatReader: readers.heartbeat,
    c.DowngradeSince: readers.downgrade_since,
    c.MoveHold: readers.move_hold,
    c.ExpireReader: readers.expire,
    c.RegisterCriticalReader: readers.register_critical,
    c.CompareAndDowngradeSince: readers.compare_and_downgrade_since,
    c.ExpireCriticalReader: readers.expire_critical,
    c.ReadCriticalReaders: readers.read_critical,
    c.ResolveTime: history.resolve_time,
    c.TimeShown: history.time_shown,
    c.TimesShown: history.times_shown,
    c.LowerSeal: history.lower_seal,
    c.ReadShardSettings: history.read_settings,
    c.SetSettings: history.set_settings,
    c.AgeHistory: history.age_history,
    c.ForgetHistory: history.forget_history,
    c.FlushEntries: recording.flush,
    c.SetTag: tags.set_tag,
    c.RemoveTag: tags.remove_tag,
    c.ReadTags: tags.read_tags,
    c.ForgetTags: tags.forget_tags,
    c.ForgetDropped: dropping.forget_dropped,
    c.HoldPoint: readers.hold_point,
    c.ReadRetention: retention.read_retention,
    c.TakeCut: retention.take_cut,
    c.PassCut: retention.pass_cut,
    c.RetractAged: retention.retract_aged,
    c.NoteLooked: retention.note_looked,
    c.SetRungs: retention.set_rungs,
    c.EvolveSchema: lifecycle.evolve_schema,
    c.ReadSchemaTimes: lifecycle.read_schema_times,
    c.Constrain: lifecycle.constrain,
    c.Drop: lifecycle.drop,
    c.Finalise: lifecycle.finalise,
    c.Recreate: lifecycle.recreate,
    c.Lend: loans.lend,
    c.LendOn: loans.lend_on,
    c.ShrinkLoan: loans.shrink,
    c.EndLoan: loans.end,
    c.Returned: loans.returned,
    c.BeginClone: loans.begin_clone,
    c.HandOver: handing.hand_over,
    c.TakeBack: handing.take_back,
    c.AddRollup: maintenance.add_rollup,
    c.RemoveRollups: maintenance.remove_rollups,
    c.TakeClaim: maintenance.take_claim,
    c.SaveMergeProgress: maintenance.save_merge_progress,
    c.ReleaseClaim: maintenance.release_claim,
    c.MergeResult: maintenance.apply_merge,
    c.BundleParts: bundling.bundle_parts,
    c.ReplacePart: repair.replace_part,
    c.ForgetLapsed: leases.forget_lapsed,
    c.RefuseStagedBefore: maintenance.refuse_staged_before,
}


def step(state: State, command: c.Command, context: Context) -> tuple[State, c.Result]:
    """Apply one command. Raises an error of the tree when it is refused; the State is then unchanged.

    A retry is answered in any phase but the last, as its first try was: the shard may have been closed in between.
    """
    if command.shard is not None and command.shard != state.shard_id:
        if isinstance(command, phases.GIVING_BACK):  # it went with the life that has ended
            return state, c.Done()
        raise UnknownShard(phases.outlived(state.name))
    if context.verdict.shard not in (None, state.shard_id):  # a name was used again after the parts were looked at
        raise UnknownShard(phases.outlived(state.name))
    phase = phases.phase_of(state)
    if phase is not phases.Phase.TOMBSTONE and (again := writers.answered_before(state, command, context)) is not None:
        return state, again
    phases.check(state, command, phase)
    transition = _TRANSITIONS[type(command)]
    if state.handed_over and isinstance(command, handing.HOLDS):
        return state, handing.held(state, command, lambda: transition(state, command, context)[1])
    following, result = transition(state, command, context)
    if following is not state and not isinstance(command, handing.HANDING):
        handing.check_here(state)
    phases.check_end(state, following, command)
    return following, result
