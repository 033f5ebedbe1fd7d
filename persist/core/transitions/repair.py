"""Mending a shard that names a part which cannot be read: the part goes, or another one takes its place."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run, batch_of
from persist.core.errors import InvalidUsage
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.bundling import check_bundle, unbundled
from persist.core.transitions.context import Context
from persist.core.transitions.naming import check_replacement


def replace_part(state: State, command: c.ReplacePart, context: Context) -> tuple[State, c.PartReplaced]:
    """Since, upper and the times of batches stay. Claims of merges that read the part end: they could never be applied.

    Where a bundle itself goes, what it lists goes with it. The rows that were written stay counted (EVENT_COUNT): what
    was appended was appended.
    """
    new, unreadable = command.replacement, {command.part, command.within}
    if new is not None and state.trace.holds(new.id):
        return state, c.PartReplaced(None)  # an earlier try landed
    if command.within is not None:
        context.verdict.check()
        state = unbundled(state, command.within, command.listed)
    for index, batch in enumerate(state.trace.batches):
        old = next((part for part in batch.parts() if part.id == command.part), None)
        if old is None:
            continue
        if new is not None:
            _check_like(state, old, new)
            if old.bundle is None:
                check_replacement(state, new, context)
            else:
                check_bundle(state, new)
                context.verdict.check()
        mended = state.trace.splice(index, 1, [_mended(batch, old, new)])
        claims = {key: claim for key, claim in state.claims.items() if unreadable.isdisjoint(claim.inputs)}
        return replace(state, trace=mended, claims=claims), c.PartReplaced(old)
    raise InvalidUsage(f"part {command.part} is not in shard {state.name!r}; `persist check --deep` lists the damage")


def _mended(batch: HollowBatch, old: Part, new: Part | None) -> HollowBatch:
    runs = []
    for run in batch.runs:
        parts = tuple(part for part in run.parts if part.id != old.id)
        if new is not None and len(parts) < len(run.parts):
            parts = tuple(new.without_receipt() if part.id == old.id else part for part in run.parts)
        if parts:
            runs.append(Run(parts))
    return batch_of(batch.desc, tuple(runs))


def _check_like(state: State, old: Part, new: Part) -> None:
    """The same bytes under another key: what the State says of them stays."""
    if replace(new.without_receipt(), id=old.id, key=old.key) != old:
        raise InvalidUsage(
            f"the replacement of part {old.id} of shard {state.name!r} is no copy of it: that has {old.size} bytes and "
            f"the checksum {old.checksum}"
        )
