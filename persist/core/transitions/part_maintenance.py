"""Transitions of maintenance: rollups, claims, merge results, bundles, and the repair of lost parts.

None of those of rollups, claims and merges can make a writer fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist.core import commands as c
from persist.core.batch import Description, HollowBatch, Part, Run, batch_of, diff_sum_of, parts_of
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno
from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import Antichain, meet
from persist.core.ids import PartId, parse
from persist.core.merge_plan import claimed
from persist.core.readable_times import kept_below
from persist.core.record import replace
from persist.core.state import Claim, Rollup, State
from persist.core.transitions.context import Context
from persist.core.transitions.lease_expiry import CLAIM_KEPT_LEASES, check_lease, heartbeat_ms
from persist.core.transitions.outcomes_and_audit import cut
from persist.core.transitions.part_admission import check_merged, check_replacement
from persist.core.transitions.row_drops import brings_back, recounted
from persist.core.truncations_and_drops import clipped


def add_rollup(state: State, command: c.AddRollup, context: Context) -> tuple[State, c.RollupAdded]:
    known = state.rollups.get(command.seqno)
    if known is not None:
        return state, c.RollupAdded(known.key == command.key)
    if command.seqno > state.seqno:
        raise InvalidUsage(f"shard {state.name!r} is at v{state.seqno}: a rollup of v{command.seqno} cannot exist")
    newest = max(state.rollups, default=0)
    if command.seqno < newest or not belongs_to(command.key, state.shard_id):
        return state, c.RollupAdded(False)  # late: its key may have been removed already, and removed keys never return
    if not is_rollup_key(command.key) or rollup_seqno(command.key) != command.seqno:
        raise InvalidUsage(f"{command.key} is not the key of a rollup of v{command.seqno} of shard {state.name!r}")
    if context.may_be_swept(state, command.key):
        return state, c.RollupAdded(False)  # very late
    context.verdict.check()
    rollups = {**state.rollups, command.seqno: Rollup(command.key, command.size)}
    return replace(state, rollups=rollups), c.RollupAdded(True)


def remove_rollups(state: State, command: c.RemoveRollups, context: Context) -> tuple[State, c.Done]:
    newest = max(state.rollups, default=0)
    kept = {seqno: r for seqno, r in state.rollups.items() if seqno >= command.below or seqno == newest}
    long_diffs = {seqno: key for seqno, key in state.long_diffs.items() if seqno >= command.below}
    if len(kept) == len(state.rollups) and len(long_diffs) == len(state.long_diffs):
        return state, c.Done()
    return cut(replace(state, rollups=kept, long_diffs=long_diffs), command.below), c.Done()


def hold_claim(state: State, command: c.HoldClaim, context: Context) -> tuple[State, c.Claimed]:
    check_lease("claim", command.lease_ms)
    held, done = state.claims.get(command.key), command.done
    is_own = held is not None and held.owner == command.owner
    if not is_own and (done or (held is not None and not held.lapsed(context.lease_now_ms))):
        return state, c.Claimed(False, held.owner if held is not None else "")
    if (holder := _holder_of(state, command, context)) is not None:
        return state, c.Claimed(False, holder)
    if state.trace.covering(frozenset(command.inputs)) is None:
        return state, c.Claimed(False, command.owner)  # an input is gone: this merge can never be applied
    if _are_swept(state, held, done, context) or brings_back(state, (Run(done),)):
        return state, c.Claimed(False, command.owner)
    heartbeat = context.lease_now_ms if held is None else heartbeat_ms(held, context)
    known = held if held is not None and held.inputs == command.inputs else None
    claim = Claim(command.owner, heartbeat, command.lease_ms, command.inputs)
    if done:
        kept = known.done if known is not None else ()
        named = tuple(part.as_durable() for part in done)
        if named[: len(kept)] != kept:
            raise InvalidUsage(f"the outputs of claim {command.key!r} have to begin with those that it holds")
        _check_since(state, command.since)
        check_merged(state, done, kept, context)
        claim = replace(claim, done=named, resume_key=command.resume_key, since=command.since)
    elif known is not None:
        claim = replace(claim, done=known.done, resume_key=known.resume_key, since=known.since)
    state = replace(state, claims={**state.claims, command.key: claim})
    return state, c.Claimed(True, claim.owner, claim.inputs, claim.done, claim.resume_key, claim.since)


def release_claim(state: State, command: c.ReleaseClaim, context: Context) -> tuple[State, c.Done]:
    held = state.claims.get(command.key)
    if held is None or held.owner != command.owner:
        return state, c.Done()
    return replace(state, claims=_without(state, command.key)), c.Done()


def apply_merge(state: State, command: c.MergeResult, context: Context) -> tuple[State, c.MergeApplied]:
    """Replace input parts by outputs, iff every input part is still there (by id, never by time bounds)."""
    inputs = frozenset(command.inputs)
    if not inputs:
        raise InvalidUsage("a merge without inputs changes nothing")
    stretch = state.trace.covering(inputs)
    if stretch is None or not _may_apply(state, command, context) or brings_back(state, command.outputs):
        outputs = {part.id for part in parts_of(command.outputs)}
        landed = bool(outputs) and state.trace.covering(frozenset(outputs)) is not None
        return state, c.MergeApplied(landed)
    _check_since(state, command.since)
    first, count = _with_empty_neighbours(state, *stretch)
    batches = state.trace.batches[first : first + count]
    merged = _merged(state, inputs, command, batches, context)
    taken = (part for batch in batches for part in batch.parts() if part.id in inputs)
    state = recounted(state, taken, parts_of(command.outputs))
    trace = state.trace.splice(first, count, [merged])
    return replace(state, trace=trace, claims=_without(state, command.claim_key)), c.MergeApplied(True)


def _check_since(state: State, since: Antichain) -> None:
    """Refuse a merge beyond the shard's since: times at or beyond since may still be tagged."""
    if state.since < since:
        raise InvalidUsage(f"a merge to since {since} is beyond the since {state.since} of shard {state.name!r}")


def _merged(
    state: State, inputs: frozenset[str], command: c.MergeResult, batches: Sequence[HollowBatch], context: Context
) -> HollowBatch:
    taken = [part for batch in batches for part in batch.parts() if part.id in inputs]
    outputs = list(parts_of(command.outputs))
    held = state.claims.get(command.claim_key) if command.claim_key else None
    check_merged(state, outputs, held.done if held is not None else (), context)
    if sum(part.rows for part in outputs) > sum(part.rows for part in taken):
        raise InvalidUsage("the output of a merge has more rows than its inputs")
    before, after = diff_sum_of(taken), diff_sum_of(outputs)
    if before is not None and after is not None and before != after:
        raise Corruption(
            f"a merge in shard {state.name!r} changed the sum of diffs from {before} to {after}; it is not applied"
        )
    kept = [run for batch in batches for run in _runs_without(batch, inputs)]
    # Runs that were not merged keep the since of their batches, and so does the resulting batch.
    since = meet(batch.desc.since for batch in batches if batch.runs) if kept else command.since
    lower, upper = batches[0].desc.lower, batches[-1].desc.upper
    apart = tuple(t for t in kept_below(state, command.since) if lower.less_equal(t) and not upper.less_equal(t + 1))
    desc = Description(lower, upper, since, apart)
    named = (Run(tuple(part.as_durable() for part in run.parts)) for run in command.outputs if run.parts)
    return batch_of(desc, (*kept, *named))


def _may_apply(state: State, command: c.MergeResult, context: Context) -> bool:
    """Whether the outputs certainly exist: the claim, if there is one, is still held, and none is too old."""
    outputs = list(parts_of(command.outputs))
    if not command.claim_key:
        return not _are_swept(state, None, outputs, context)
    held = state.claims.get(command.claim_key)
    if held is None or held.owner != command.owner or held.inputs != command.inputs:
        return False
    if held.lapsed(context.lease_now_ms, CLAIM_KEPT_LEASES):
        return False
    return not _are_swept(state, held, outputs, context)


def _are_swept(state: State, held: Claim | None, outputs: Sequence[Part], context: Context) -> bool:
    """Whether an output that no claim has kept may have been swept since it was written.

    A malformed key is refused later.
    """
    kept = frozenset(part.key for part in held.done) if held is not None else frozenset()
    keys = [part.key for part in outputs if part.key is not None and part.key not in kept]
    return any(belongs_to(key, state.shard_id) and context.may_be_swept(state, key) for key in keys)


def _holder_of(state: State, command: c.HoldClaim, context: Context) -> str | None:
    """The other owner of a live claim on one of the inputs, if any."""
    wanted = set(command.inputs)
    for key, claim in state.claims.items():
        if key == command.key or claim.owner == command.owner or claim.lapsed(context.lease_now_ms):
            continue
        if not wanted.isdisjoint(claim.inputs):
            return claim.owner
    return None


def _with_empty_neighbours(state: State, first: int, count: int) -> tuple[int, int]:
    """The stretch of a merge, extended by adjacent empty batches, which are joined to its result."""
    batches = state.trace.batches
    end = first + count
    while first > 0 and not batches[first - 1].runs:
        first -= 1
    while end < len(batches) and not batches[end].runs:
        end += 1
    return first, end - first


def _runs_without(batch: HollowBatch, inputs: frozenset[str]) -> list[Run]:
    runs = [Run(tuple(part for part in run.parts if part.id not in inputs)) for run in batch.runs]
    return [run for run in runs if run.parts]


def _without(state: State, key: str) -> dict[str, Claim]:
    return {k: claim for k, claim in state.claims.items() if k != key}


# Bundling parts, and unbundling them. Rows, times and the order of batches do not change.


def bundle_parts(state: State, command: c.BundleParts, context: Context) -> tuple[State, c.Bundled]:
    """Parts of a merge under way are not bundled, since the merge names them by id.

    A bundle from before dropped rows were removed contains rows that its parts have lost since, so it is refused.
    """
    inputs, bundles = frozenset(command.inputs), list(parts_of(command.outputs))
    stretch = state.trace.covering(inputs) if inputs else None
    if stretch is None or stretch[1] != 1:
        return state, c.Bundled(False)
    if not inputs.isdisjoint(claimed(state, context.lease_now_ms)) or _are_swept(state, None, bundles, context):
        return state, c.Bundled(False)
    if brings_back(state, command.outputs):
        return state, c.Bundled(False)
    context.verdict.check()
    batch = state.trace.batches[stretch[0]]
    taken = [part for part in batch.parts() if part.id in inputs]
    for part in bundles:
        check_bundle(state, part)
    _check_same(state, taken, bundles)
    if sum(part.bundle.parts for part in bundles if part.bundle is not None) != len(taken):
        raise InvalidUsage(f"bundles of shard {state.name!r} do not list the parts that they replace")
    runs = (*_runs_without(batch, inputs), *command.outputs)
    return _with_batch(state, stretch[0], HollowBatch(batch.desc, runs, batch.rows)), c.Bundled(True)


def unbundled(state: State, bundle_id: str, listed: tuple[Run, ...]) -> State:
    """The State with the contents of a bundle in its place; the same State if it has no such bundle."""
    stretch = state.trace.covering(frozenset({bundle_id}))
    if stretch is None:
        return state
    batch = state.trace.batches[stretch[0]]
    runs: list[Run] = []
    for run in batch.runs:
        at = next((index for index, part in enumerate(run.parts) if part.id == bundle_id), None)
        if at is None:
            runs.append(run)
            continue
        inner = [part for each in listed for part in each.parts]
        _check_same(state, [run.parts[at]], inner)
        shown = clipped(listed, run.parts[at].clip or 0)  # a drop has removed earlier rows
        if len(run.parts) == 1:
            runs.extend(shown)
        else:  # bundles of one long run
            inner = [part for each in shown for part in each.parts]
            runs.append(Run((*run.parts[:at], *inner, *run.parts[at + 1 :])))
    return _with_batch(state, stretch[0], batch_of(batch.desc, tuple(run for run in runs if run.parts)))


def _with_batch(state: State, index: int, batch: HollowBatch) -> State:
    return replace(state, trace=state.trace.splice(index, 1, [batch]))


def check_bundle(state: State, part: Part) -> None:
    """Raise InvalidUsage unless the part is a bundle of the shard that it does not name yet."""
    parse(PartId, part.id)
    key = part.key or ""
    is_bundle = part.bundle is not None and part.data is None
    if not is_bundle or not belongs_to(key, state.shard_id) or not key.endswith(f"/{part.id}.bundle"):
        raise InvalidUsage(f"part {part.id} is no bundle of shard {state.name!r}")
    if state.trace.holds(part.id):
        raise InvalidUsage(f"bundle {part.id} is in shard {state.name!r} already")


def _check_same(state: State, before: list[Part], after: list[Part]) -> None:
    """Raise Corruption if the metadata of both lists of parts shows that they contain different rows."""
    sums = [(sum(p.rows for p in parts), sum(p.size for p in parts)) for parts in (before, after)]
    diffs = [diff_sum_of(parts) for parts in (before, after)]
    if sums[0] != sums[1] or (None not in diffs and diffs[0] != diffs[1]):
        raise Corruption(f"a bundle of shard {state.name!r} has other rows than the parts that it lists")


def replace_part(state: State, command: c.ReplacePart, context: Context) -> tuple[State, c.PartReplaced]:
    """Since, upper and the times of batches do not change. Claims of merges that read the part end, since they could
    not be applied.

    If a bundle is removed, the parts that it lists are removed with it. The removed rows are still counted in
    EVENT_COUNT, which counts appended rows.
    """
    new, unreadable = command.replacement, {command.part, command.within}
    if new is not None and state.trace.holds(new.id):
        return state, c.PartReplaced(None)  # a retry
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
        trace = state.trace.splice(index, 1, [_repaired(batch, old, new)])
        claims = {key: claim for key, claim in state.claims.items() if unreadable.isdisjoint(claim.inputs)}
        return replace(state, trace=trace, claims=claims), c.PartReplaced(old)
    raise InvalidUsage(f"part {command.part} is not in shard {state.name!r}; `persist check --deep` lists the damage")


def _repaired(batch: HollowBatch, old: Part, new: Part | None) -> HollowBatch:
    runs = []
    for run in batch.runs:
        parts = tuple(part for part in run.parts if part.id != old.id)
        if new is not None and len(parts) < len(run.parts):
            parts = tuple(new.as_durable() if part.id == old.id else part for part in run.parts)
        if parts:
            runs.append(Run(parts))
    return batch_of(batch.desc, tuple(runs))


def _check_like(state: State, old: Part, new: Part) -> None:
    """Raise InvalidUsage unless the new part has the same bytes and metadata under another key."""
    if replace(new.without_receipt(), id=old.id, key=old.key) != old:
        raise InvalidUsage(
            f"the replacement of part {old.id} of shard {state.name!r} is no copy of it: that has {old.size} bytes and "
            f"the checksum {old.checksum}"
        )
