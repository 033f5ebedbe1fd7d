"""The state machine: `step(state, command, context) -> (state', result)`, pure.

A command that is refused raises an error of the tree and changes nothing. A command that changes nothing
returns the same State object, so that the committer can tell. Nothing here reads a clock, does I/O or makes
randomness: the time is in the context and ids are in the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core import shard_phases
from persist.core.errors import UnknownShard
from persist.core.state import State
from persist.core.transitions import (
    attribute_updates,
    history_control,
    lease_expiry,
    lifecycle,
    outcomes_and_audit,
    part_maintenance,
    policy_and_erasure_progress,
    reader_holds,
    rewrites,
    wall_clocks,
    writers,
)
from persist.core.transitions.context import Context
from persist.core.transitions.lease_expiry import expire_lapsed

__all__ = ["Context", "expire_lapsed", "step"]

_Transition = Callable[[State, Any, Context], tuple[State, c.Result]]

_TRANSITIONS: Mapping[type[Any], _Transition] = {
    c.ExpireWriter: writers.expire,
    c.CompareAndAppend: writers.compare_and_append,
    c.Append: writers.append,
    c.Insert: writers.insert,
    c.Rewrite: rewrites.rewrite,
    c.NoteRewritten: policy_and_erasure_progress.note_rewritten,
    c.ProveErasure: policy_and_erasure_progress.prove,
    c.ReadErasures: policy_and_erasure_progress.read,
    c.AdvanceUpper: writers.advance_upper,
    c.UpdateAttributes: writers.update_attributes,
    c.ReadAttributes: attribute_updates.read,
    c.ScanAttributes: attribute_updates.scan,
    c.FlushAttributes: attribute_updates.flush,
    c.Flush: outcomes_and_audit.flush,
    c.RegisterReader: reader_holds.register,
    c.DowngradeSince: reader_holds.downgrade_since,
    c.ExpireReader: reader_holds.expire,
    c.RegisterCriticalReader: reader_holds.register_critical,
    c.CompareAndDowngradeSince: reader_holds.compare_and_downgrade_since,
    c.ExpireCriticalReader: reader_holds.expire_critical,
    c.ResolveTime: wall_clocks.resolve_time,
    c.TimesShown: wall_clocks.times_shown,
    c.LowerSeal: wall_clocks.lower_seal,
    c.SetSettings: history_control.set_settings,
    c.ForgetOutlived: history_control.forget_outlived,
    c.ForgetHistory: history_control.forget_history,
    c.SetTag: history_control.set_tag,
    c.RemoveTag: history_control.remove_tag,
    c.ReadRetention: policy_and_erasure_progress.read_retention,
    c.TakeCuts: policy_and_erasure_progress.take_cuts,
    c.NoteLooked: policy_and_erasure_progress.note_looked,
    c.EvolveSchema: lifecycle.evolve_schema,
    c.Drop: lifecycle.drop,
    c.Finalise: lifecycle.finalise,
    c.Recreate: lifecycle.recreate,
    c.Lend: lifecycle.lend,
    c.LendOn: lifecycle.lend_on,
    c.ShrinkLoan: lifecycle.shrink,
    c.EndLoan: lifecycle.end,
    c.Returned: lifecycle.returned,
    c.BeginClone: lifecycle.begin_clone,
    c.HandOver: lifecycle.hand_over,
    c.AddRollup: part_maintenance.add_rollup,
    c.RemoveRollups: part_maintenance.remove_rollups,
    c.HoldClaim: part_maintenance.hold_claim,
    c.ReleaseClaim: part_maintenance.release_claim,
    c.MergeResult: part_maintenance.apply_merge,
    c.BundleParts: part_maintenance.bundle_parts,
    c.ReplacePart: part_maintenance.replace_part,
    c.ForgetLapsed: lease_expiry.forget_lapsed,
}


def step(state: State, command: c.Command, context: Context) -> tuple[State, c.Result]:
    """Apply one command. Raises an error of the tree when it is refused; the State is then unchanged.

    A retry is answered as its first try in any phase but the last: the shard may have been closed in between.
    """
    if command.shard is not None and command.shard != state.shard_id:
        if isinstance(command, shard_phases.GIVING_BACK):  # its hold ended with that life
            return state, c.Done()
        raise UnknownShard(shard_phases.outlived(state.name))
    if context.verdict.shard not in (None, state.shard_id):  # the name was reused after the parts were validated
        raise UnknownShard(shard_phases.outlived(state.name))
    phase = shard_phases.phase_of(state)
    if (
        phase is not shard_phases.Phase.TOMBSTONE
        and (again := writers.answered_before(state, command, context)) is not None
    ):
        return state, again
    shard_phases.check(state, command, phase)
    transition = _TRANSITIONS[type(command)]
    if state.handed_over and isinstance(command, lifecycle.HOLDS):
        return state, lifecycle.held(state, command, lambda: transition(state, command, context)[1])
    following, result = transition(state, command, context)
    if following is not state and not isinstance(command, c.HandOver):
        lifecycle.check_here(state)
    shard_phases.check_end(state, following, command)
    return following, result
