"""What must hold in every State. Cheap checks run before every compare-and-set, all of them in tests.

The numbers are those of the design's section 3.
"""

from __future__ import annotations

from itertools import pairwise

from persist.core.batch import HollowBatch
from persist.core.blob_keys import shard_of
from persist.core.errors import Corruption
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.readable_times import cut_times, earliest_readable, is_kept
from persist.core.spill import ENTRIES
from persist.core.state import State
from persist.core.state_diff import StateDiff, apply
from persist.core.truncations_and_drops import begins


def check_step(old: State, new: State) -> None:
    """Checks between two consecutive States (2: frontiers never move back in one life). Raises Corruption."""
    if new.incarnation != old.incarnation:
        _check_rebirth(old, new)
        return
    if new.since < old.since:
        raise Corruption(f"since of shard {old.name!r} would move back from {old.since} to {new.since}")
    if new.upper < old.upper:
        raise Corruption(f"upper of shard {old.name!r} would move back from {old.upper} to {new.upper}")
    if new.floor < old.floor and not new.tombstone:
        raise Corruption(f"the floor of shard {old.name!r} would move back from {old.floor} to {new.floor}")
    if not old.schema_floor <= new.schema_floor <= new.schema_id:
        raise Corruption(f"shard {old.name!r} would take rows again that were staged before its constraints")
    if new.schema_times is not old.schema_times and not old.schema_times.items() <= new.schema_times.items():
        raise Corruption(f"shard {old.name!r} would forget from which times on its columns were what they are")
    if new.shard_id != old.shard_id:
        raise Corruption(f"shard {old.name!r} would change its id from {old.shard_id} to {new.shard_id}")
    if new.lease_clock_ms < old.lease_clock_ms or new.swept_before_ms < old.swept_before_ms:
        raise Corruption(f"the lease clock of shard {old.name!r}, or its frontier of sweeps, would move back")
    if new.seal.sealed_ms < old.seal.sealed_ms and new.seal.repairs == old.seal.repairs:
        raise Corruption(f"the seal of shard {old.name!r} would move back without a repair")
    if new.history_hold < old.history_hold and new.settings == old.settings:
        raise Corruption(f"the history that shard {old.name!r} holds would begin earlier again")
    if new.cuts is not old.cuts:
        _check_cuts(old, new)
    if new.tags is not old.tags:
        _check_tags(old, new)
    if new.drops is not old.drops:
        _check_drops(old, new)
    if new.truncations is not old.truncations:
        _check_truncations(old, new)
    appended = new.trace.batches[len(old.trace.batches) :]
    if appended and old.trace.batches and appended[0].desc.lower != new.trace.batches[-len(appended) - 1].desc.upper:
        raise Corruption(f"a batch of shard {old.name!r} would not begin where the one before it ends")
    if new.erasures is not old.erasures or new.upper != old.upper:
        _check_erasures(new)
    if new.rollups is not old.rollups and old.rollups and max(new.rollups, default=0) < max(old.rollups):
        raise Corruption(f"shard {old.name!r} would lose its newest rollup")


def _check_cuts(old: State, new: State) -> None:
    """As for tags: the time before a cut is one that can be read."""
    for at_ms, cut in new.cuts.items():
        if at_ms not in old.cuts and not is_kept(old, cut.upper - 1):
            raise Corruption(f"a cut of shard {old.name!r} would keep the time {cut.upper - 1}, which is forgotten")


def _check_tags(old: State, new: State) -> None:
    """A time that since has passed is only tagged where it was kept already: merges tell no other apart."""
    for name, tag in new.tags.items():
        if name not in old.tags and not is_kept(old, tag.time):
            raise Corruption(f"tag {name!r} of shard {old.name!r} would name the time {tag.time}, which is forgotten")


def _check_drops(old: State, new: State) -> None:
    """A new drop is at a time of this commit, with a readable time before its cut. It is kept while it is needed."""
    for drop in new.drops:
        is_new = drop not in old.drops
        is_told_apart = is_kept(old, drop.cut - 1) or drop.cut - 1 in cut_times(old)
        if is_new and not (is_told_apart and old.upper.less_equal(drop.at)):
            raise Corruption(f"shard {old.name!r} would drop rows before {drop.cut}, a time that was forgotten")
    # One that is not effective yet may be taken back.
    gone = [drop for drop in old.drops if drop not in new.drops and not old.upper.less_equal(drop.at)]
    if gone and not new.tombstone and (earliest_readable(new) < Antichain(gone[-1].at) or new.floor < gone[-1].cut):
        raise Corruption(f"shard {old.name!r} would forget the drop at {gone[-1].at}, which a readable time precedes")


def _check_truncations(old: State, new: State) -> None:
    """Their cuts ascend. Retractions of a new one have a time of this commit, so that they are distinguishable."""
    for one, following in pairwise(new.truncations):
        if not (one.before < following.before and one.at <= following.at):
            raise Corruption(f"truncations of shard {old.name!r} would not ascend: {one}, then {following}")
    known = {one.at for one in old.truncations}  # what they took may be counted anew
    for one in new.truncations:
        if one.wrote and one.at not in known and not old.upper.less_equal(one.at):
            raise Corruption(f"shard {old.name!r} would remember a truncation at {one.at}, which it did not make")


def _check_rebirth(old: State, new: State) -> None:
    """The next life of a name begins at its tombstone, as another shard, with what the log needs and nothing else."""
    if not old.tombstone or new.incarnation != old.incarnation + 1:
        raise Corruption(f"shard {old.name!r} would begin life {new.incarnation} before life {old.incarnation} ended")
    # A clone names blobs of others, and of its own what this very commit has merged.
    own = (key for key in new.trace.blob_keys if not is_foreign(key, new.shard_id))
    of_before = any(shard_of(key) != new.shard_id for key in own)
    if new.shard_id != shard_id_of(new.name, new.incarnation) or of_before:
        raise Corruption(f"shard {old.name!r} would begin a life with something of the one before")
    if new.loans != old.loans:
        raise Corruption(f"shard {old.name!r} would forget what it has lent")
    if new.rollups != old.rollups:
        raise Corruption(f"shard {old.name!r} would lose the rollups that its log needs")


def check_diff(change: StateDiff, old: State, new: State) -> None:
    """Check 4: the state diff leads from the old State to the new one, also after encoding. Raises Corruption."""
    if apply(change, old) != new:
        raise Corruption(f"the state diff v{change.seqno} of shard {old.name!r} does not lead to its State")


def check_state(state: State) -> None:
    """Checks within one State (1: batches tile `[0, upper)`; their sinces; single-use part ids). Raises Corruption."""
    expected = MINIMUM
    seen: set[str] = set()
    for batch in state.trace.batches:
        _check_batch(state, batch, expected)
        for part in batch.parts():
            if part.id in seen:
                raise Corruption(f"part {part.id} occurs twice in shard {state.name!r}")
            if part.is_staged:
                raise Corruption(f"part {part.id} of shard {state.name!r} has what only a command needs")
            seen.add(part.id)
        expected = batch.desc.upper
    if state.trace.inline_bytes != sum(b.inline_size for b in state.trace.batches):
        raise Corruption(f"inline bytes of shard {state.name!r} are miscounted")
    _check_others(state)


def check_batches_replaced(old: State, new: State) -> None:
    """As `check_state`, of a State that follows one for which it holds, where batches of it were replaced.

    Where they were only added at the end, `check_step` has looked. Raises Corruption. It costs what changed, unless
    rows were dropped or another life began: then all is looked at.
    """
    change = old.trace.difference(new.trace)
    if change is None or change[0] == len(old.trace.batches):
        return
    if old.floor != new.floor or old.incarnation != new.incarnation:
        check_state(new)
        return
    first, count, came = change
    expected = new.trace.batches[first - 1].desc.upper if first else MINIMUM
    for batch in came:
        _check_batch(new, batch, expected)
        for part in batch.parts():
            if new.trace.occurs_twice(part.id):
                raise Corruption(f"part {part.id} occurs twice in shard {new.name!r}")
        expected = batch.desc.upper
    end = first + len(came)
    if end < len(new.trace.batches) and new.trace.batches[end].desc.lower != expected:
        raise Corruption(f"batches of shard {new.name!r} do not tile: {new.trace.batches[end].desc} follows {expected}")
    gone = old.trace.batches[first : first + count]
    added = sum(batch.inline_size for batch in came) - sum(batch.inline_size for batch in gone)
    if new.trace.inline_bytes != old.trace.inline_bytes + added:
        raise Corruption(f"inline bytes of shard {new.name!r} are miscounted")
    _check_others(new)


def _check_batch(state: State, batch: HollowBatch, expected: Antichain) -> None:
    desc = batch.desc
    if desc.lower != expected or desc.is_empty_interval:
        raise Corruption(f"batches of shard {state.name!r} do not tile: {desc} follows {expected}")
    if state.since < desc.since:
        raise Corruption(f"batch {desc} of shard {state.name!r} was advanced beyond the since {state.since}")
    for part in batch.parts():
        if begins(part) < state.floor:
            raise Corruption(f"part {part.id} of shard {state.name!r} has dropped rows, from before {state.floor}")
        if part.clip is None and part.rows <= 0:
            raise Corruption(f"part {part.id} of shard {state.name!r} has no rows")


def _check_others(state: State) -> None:
    _check_index(state)
    if state.history_hold < state.since and not state.since.is_empty:
        raise Corruption(f"since {state.since} of shard {state.name!r} is beyond what its own history holds")
    if state.seal.last is not None and any(at_ms >= state.seal.last.at_ms for at_ms in state.marks):
        raise Corruption(f"a mark of shard {state.name!r} is not older than its last one")
    _check_entries(state)
    _check_erasures(state)
    if any(seqno > state.seqno for seqno in state.rollups):
        raise Corruption(f"shard {state.name!r} names a rollup of the future")
    if any(reader.seqno > state.seqno for reader in state.leased_readers.values()):
        raise Corruption(f"a reader of shard {state.name!r} holds a seqno of the future")


def _check_erasures(state: State) -> None:
    """A pending erasure is at the next time, which is settled by whatever moves the upper."""
    if any(one.pending is not None and state.upper != Antichain(one.at) for one in state.erasures.values()):
        raise Corruption(f"an erasure of shard {state.name!r} is pending, and not at the upper {state.upper}")


def _check_index(state: State) -> None:
    """The chunks of the attribute index follow each other up to its end, and hold every live node."""
    root, at = state.attribute_root, None
    for first in sorted(state.attribute_chunks):
        if at is not None and first != at:
            raise Corruption(f"chunks of the attribute index of shard {state.name!r} do not follow each other at {at}")
        at = first + state.attribute_chunks[first].length
    if root.height and (at != root.end or min(state.attribute_chunks) > root.lowest):
        raise Corruption(f"the attribute index of shard {state.name!r} has nodes outside its chunks")


def _check_entries(state: State) -> None:
    """Every commit is in the commit history once, and in order: files, then what the State itself holds."""
    files = state.files_of(ENTRIES)
    bounds = [bound for file in files for bound in (file.first, file.last)]
    seqnos = [*bounds, *sorted(state.entries), state.seqno]
    if any(later < earlier for earlier, later in pairwise(seqnos)):
        raise Corruption(f"the commit history of shard {state.name!r} is out of order")
    firsts = [*(file.first for file in files[1:]), *([min(state.entries)] if state.entries else [])]
    lasts = [file.last for file in files]
    if any(first == last for first, last in zip(firsts, lasts, strict=False)):
        raise Corruption(f"the commit history of shard {state.name!r} holds a commit twice")
    if state.info_bytes != sum(commit.info_bytes for commit in state.entries.values()):
        raise Corruption(f"what callers said in the commit history of shard {state.name!r} is miscounted")
