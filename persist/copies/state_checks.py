"""Whether a State agrees with itself: its counts, bounds, order, schemas, holds and names of blobs. Pure.

`persist.core.invariants` has what every commit checks before it is made. This has what a commit cannot get wrong by
itself, and what damaged bytes can all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from persist.core.batch import HollowBatch, Part, Run
from persist.core.drops import begins
from persist.core.keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.loans import is_foreign
from persist.core.merge_plan import claim_is_for_merge
from persist.core.state import State, auxiliary_blob_keys

EXACT_BYTES_MAX = 128  # a bound of at most so many bytes is a key; a longer one may lie beyond the keys of the part

Said = tuple[str, str]  # what is wrong, and the key of the blob; "": it is of no blob


def contradictions(state: State) -> Iterator[Said]:
    """What is wrong within the State, beyond its invariants."""
    yield from _counts(state)
    for batch in state.trace.batches:
        yield from _of_batch(state, batch)
    yield from _holds(state)
    yield from _claims(state)
    for seqno, rollup in state.rollups.items():
        if belongs_to(rollup.key, shard_of(rollup.key)) and is_rollup_key(rollup.key):
            if rollup_seqno(rollup.key) != seqno:
                yield f"the rollup v{seqno} has the key of another version", rollup.key
        else:
            yield f"the rollup v{seqno} has a key that no rollup can have", rollup.key
    for key in dict.fromkeys(auxiliary_blob_keys(state)):
        if is_foreign(key, state.shard_id) and not state.borrowed:
            yield f"the blob {key} belongs to another shard, of which nothing is borrowed", key


def of_runs(runs: Iterable[Run]) -> Iterator[Said]:
    """Whether the parts of each run lie in the order of their keys."""
    for run in runs:
        for one, following in pairwise(run.parts):
            ends = one.key_upper
            if following.key_lower < one.key_lower:
                yield f"part {following.id} stands after part {one.id}, and its keys begin before", following.key or ""
            elif ends is not None and len(ends) <= EXACT_BYTES_MAX and following.key_lower < ends:
                yield f"part {following.id} has keys that part {one.id}, before it, has too", following.key or ""


def of_part(state: State, batch: HollowBatch, part: Part) -> Iterator[Said]:
    """Whether what the State says of a part can be true together."""
    key = part.key or ""
    if part.schema_id not in state.schemas:
        yield f"part {part.id} names schema {part.schema_id}, which is not registered", key
    if part.key is not None and not belongs_to(part.key, shard_of(part.key)):
        yield f"part {part.id} has a key that no blob can have", key
    elif part.key is not None and is_foreign(part.key, state.shard_id) and not state.borrowed:
        yield f"part {part.id} belongs to another shard, of which nothing is borrowed", key
    if part.key_upper is not None and part.key_upper < part.key_lower:
        yield f"part {part.id} has keys that end before they begin", key
    if part.time_max < part.time_min or part.diff_max < part.diff_min:
        yield f"part {part.id} has a greatest time or diff below the least", key
    lower, upper, since = batch.desc.lower.element, batch.desc.upper.element, batch.desc.since.element
    last = max((bound for bound in (None if upper is None else upper - 1, since) if bound is not None), default=None)
    if lower is not None and begins(part) < lower:
        yield f"part {part.id} has times from {begins(part)}, before its batch {batch.desc}", key
    if upper is not None and last is not None and part.time_max > last:
        yield f"part {part.id} has times up to {part.time_max}, beyond its batch {batch.desc}", key


def _counts(state: State) -> Iterator[Said]:
    for batch in state.trace.batches:
        if batch.rows != (rows := sum(part.rows for part in batch.parts())):
            yield f"batch {batch.desc} says that it has {batch.rows} rows, and its parts have {rows}", ""
    if state.trace.rows != (rows := sum(batch.rows for batch in state.trace.batches)):
        yield f"the shard says that it has {state.trace.rows} rows, and its batches have {rows}", ""


def _of_batch(state: State, batch: HollowBatch) -> Iterator[Said]:
    yield from of_runs(batch.runs)
    for part in batch.parts():
        yield from of_part(state, batch, part)


def _holds(state: State) -> Iterator[Said]:
    """Nobody holds a time that since has passed: since moves to the meet of what is held, and no further."""
    for name, hold in state.critical_readers.items():
        if hold.since < state.since:
            yield f"critical reader {name} holds {hold.since}, which since {state.since} has passed", ""
    for reader_id, reader in state.leased_readers.items():
        if not reader.point and reader.since < state.since:
            yield f"reader {reader_id} holds {reader.since}, which since {state.since} has passed", ""


def _claims(state: State) -> Iterator[Said]:
    """Parts that a claim names may have left, by another's merge; but no worker claims a merge of nothing."""
    for key, claim in state.claims.items():
        if claim_is_for_merge(key) and not claim.inputs:
            yield f"the claim {key} of {claim.owner} is for nothing", ""
