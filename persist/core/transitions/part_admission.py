"""Which parts a command may add.

A command may name new parts of this shard that the committer has validated. A part is named at most once, ever. Ids of
present parts are in the State. `State.left` has the ids of staged parts that left the State; forgotten ones are refused
by their age. So committing staged parts a second time, late or by mistake, is refused, and no State names a deleted
blob. Inline rows are part of their command, whose token makes it land once, so their ids are not remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import islice

from persist.core.batch import Part, Run, parts_of
from persist.core.blob_keys import belongs_to, is_key_of, is_of_maintenance, is_part_key, part_id_of
from persist.core.errors import Expired, InvalidUsage, SchemaMismatch
from persist.core.frontier import TIME_MAX
from persist.core.ids import PartId, parse
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import Context

GIVEN_MAX = 2**48  # updates that one part may count for
LEFT_PARTS_MAX = 100_000  # remembered ids of staged parts that left the State
FORGOTTEN_MAX = 1_000  # parts that one commit checks, to forget those that may be swept
LEFT_FORGOTTEN_PART = 50  # the part of the remembered ids that is forgotten at once, since that scans all of them
DIFF_MAX = 2**32  # of a written multiplicity: two thousand million such updates of a row would overflow


def check_staged(state: State, runs: Iterable[Run], context: Context) -> None:
    """Raise an error unless all parts of a writer's command may be added. Their rows were validated before."""
    parts = list(parts_of(runs))
    if not parts:
        return
    for part in parts:
        _check_fields(state, part)
    _check_constrained(state, parts)
    _check_named(state, context)
    _check_new(state, parts)
    context.verdict.check()


def _check_constrained(state: State, parts: Sequence[Part]) -> None:
    """Refuse rows that were validated by a schema with weaker constraints than the present one."""
    oldest = min(part.schema_id for part in parts)
    if oldest < state.schema_floor:
        raise SchemaMismatch(
            f"rows were staged by schema {oldest} of shard {state.name!r}, whose schema {state.schema_floor} has "
            "stricter constraints; nothing was written: stage the rows again",
            expected=oldest,
            actual=state.schema_id,
        )


def _check_named(state: State, context: Context) -> None:
    """Refuse rows that were given by column name if the columns have changed since."""
    known = context.verdict.schema
    if known not in (None, state.schema_id):
        raise SchemaMismatch(
            f"the rows use the column names of schema {known} of shard {state.name!r}, whose current schema is "
            f"{state.schema_id}; nothing was written: prepare the rows again by its column names",
            expected=known,
            actual=state.schema_id,
        )


def check_merged(state: State, outputs: Sequence[Part], kept: Sequence[Part], context: Context) -> None:
    """Raise an error unless all outputs of a merge may be added. Those that a claim has `kept` were accepted before."""
    known = {part.id: part for part in kept}
    new = [part for part in outputs if known.get(part.id) != part.without_receipt()]
    if len({part.id for part in outputs}) < len(outputs):
        raise InvalidUsage(f"a merge in shard {state.name!r} names a part twice")
    for part in new:
        _check_name(state, part)
        _check_numbers(state, part)
        if part.time is not None or part.clip is not None or part.given is not None:
            raise InvalidUsage(
                f"part {part.id} has a time, a clip or a count of updates, which only parts of writers have; a merge "
                "writes rows with their own times"
            )
        _check_unused(state, part)
    if new:
        context.verdict.check()


def check_replacement(state: State, part: Part, context: Context) -> None:
    """Raise an error unless the replacement of a part may be added. It is a copy with the same metadata."""
    _check_name(state, part)
    _check_unused(state, part)
    context.verdict.check()


def departed(state: State, gone: Iterable[str]) -> State:
    """The State that remembers which staged parts left it: `gone` are the blob keys that it no longer names.

    Ids that may have been swept are refused by their age, so they are forgotten. Of the rest at most `LEFT_PARTS_MAX`
    are remembered: if more were forgotten, parts of their age are refused from then on.
    """
    went = {_compact(part_id_of(key)): int(state.seqno) for key in gone if is_part_key(key) and _is_staged(key)}
    if not went:
        return state
    left = with_changes(state.left, went)
    swept = [part_id for part_id in islice(left, FORGOTTEN_MAX) if _born_ms(part_id) < state.swept_before_ms]
    left = with_changes(left, {}, swept) if swept else left
    if len(left) <= LEFT_PARTS_MAX:
        return replace(state, left=left)
    # The oldest are forgotten: ids of a writer whose clock is far ahead are kept, and block no other writer.
    some = len(left) - LEFT_PARTS_MAX + LEFT_PARTS_MAX // LEFT_FORGOTTEN_PART
    forgotten = nsmallest(some, left)
    before_ms = max(state.left_before_ms, _born_ms(forgotten[-1]) + 1)
    return replace(state, left=with_changes(left, {}, forgotten), left_before_ms=before_ms)


def _check_fields(state: State, part: Part) -> None:
    """Check the metadata of a part against the State. Called 50,000 times for one commit of a Spark job."""
    _check_name(state, part)
    if part.key is not None and not _is_staged(part.key):
        raise InvalidUsage(f"part {part.id} was written by maintenance, not by a writer; write its rows again")
    if part.key is not None and _minted_ms(part) < state.swept_before_ms:
        raise Expired(
            f"part {part.id} was staged at {_minted_ms(part)} (ms since 1970, by its writer's clock), and maintenance "
            f"may have swept parts that were staged in shard {state.name!r} before {state.swept_before_ms}; stage its "
            "rows again"
        )
    _check_numbers(state, part)
    if part.given is not None and not 0 <= part.given <= GIVEN_MAX:
        raise InvalidUsage(f"part {part.id} counts for {part.given} updates; it must be in [0, {GIVEN_MAX}]")
    if part.clip is not None or (part.time is not None and not part.time_min == part.time == part.time_max):
        raise InvalidUsage(f"part {part.id} has a clip, or other times than the one of all its rows")
    if max(-part.diff_min, part.diff_max) > DIFF_MAX:
        raise InvalidUsage(
            f"part {part.id} has multiplicities from {part.diff_min} to {part.diff_max}; at most {DIFF_MAX} can be "
            "written at once, so that sums of them stay exact"
        )


def _check_numbers(state: State, part: Part) -> None:
    if part.schema_id not in state.schemas:
        raise InvalidUsage(f"shard {state.name!r} has no schema {part.schema_id}; its current one is {state.schema_id}")
    if part.rows <= 0:
        raise InvalidUsage(f"part {part.id} has no rows; leave it out")
    if part.data is not None and part.size != len(part.data):
        raise InvalidUsage(f"part {part.id} has {len(part.data)} bytes, but its size is {part.size}")
    if not 0 <= part.time_min <= part.time_max <= TIME_MAX:
        raise InvalidUsage(f"part {part.id} has times in [{part.time_min}, {part.time_max}]; times begin at 0")


def _check_name(state: State, part: Part) -> None:
    """Check that a part has a valid id, and either inline bytes or a key of this shard."""
    parse(PartId, part.id)
    if (part.key is None) == (part.data is None):
        raise InvalidUsage(f"part {part.id} must have either a blob key or inline bytes")
    if part.bundle is not None:
        raise InvalidUsage(f"part {part.id} is a bundle, which only persist itself makes; name the parts themselves")
    if part.key is None or is_key_of(part.key, state.shard_id, part.id):
        return
    if not belongs_to(part.key, state.shard_id) or not is_part_key(part.key):
        raise InvalidUsage(f"part key {part.key!r} does not belong to shard {state.name!r}")
    raise InvalidUsage(f"part key {part.key!r} is not that of part {part.id}")


def _check_unused(state: State, part: Part) -> None:
    if state.trace.holds(part.id) or _has_left(state, part):
        raise InvalidUsage(f"part {part.id} is or was in shard {state.name!r}: a merge writes new parts")


def _check_new(state: State, parts: Sequence[Part]) -> None:
    under_way = {part.id for claim in state.claims.values() for part in claim.done} if state.claims else ()
    seen = set()
    for part in parts:
        if part.id in seen:
            raise InvalidUsage(f"part {part.id} occurs twice in one command: its rows would count twice")
        seen.add(part.id)
        if state.trace.holds(part.id) or part.id in under_way:
            raise InvalidUsage(f"part {part.id} is in shard {state.name!r} already: its rows must not count twice")
        if part.key is None:
            continue
        if _has_left(state, part):
            raise InvalidUsage(f"part {part.id} was in shard {state.name!r} before: its rows must not count twice")
        if _minted_ms(part) < state.left_before_ms:
            raise Expired(
                f"part {part.id} was staged before {state.left_before_ms} ms, and shard {state.name!r} no longer knows "
                "which parts of that time it had; write its rows again"
            )


def _minted_ms(part: Part) -> int:
    """When the id of the part was minted, which its key has too: milliseconds since 1970 by its writer's clock."""
    return int(part.id[1:13], 16)


def _born_ms(compact: bytes) -> int:
    return int.from_bytes(compact[:6])


def _has_left(state: State, part: Part) -> bool:
    return bool(state.left) and _compact(part.id) in state.left


def _compact(part_id: str) -> bytes:
    return bytes.fromhex(part_id[1:])


def _is_staged(key: str) -> bool:
    """Whether a writer has staged the part with this key. Writers may not name parts that maintenance wrote."""
    return not is_of_maintenance(key)
