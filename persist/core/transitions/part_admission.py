"""Which parts a command may add, and the checks of a shard's upper before a write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import islice

from persist.core.batch import Part, Run
from persist.core.blob_keys import belongs_to, is_key_of, is_of_maintenance, is_part_key, part_id_of
from persist.core.errors import Expired, InvalidUsage, SchemaMismatch, UpperMismatch
from persist.core.frontier import FAR_TIME, TIME_MAX, Antichain
from persist.core.ids import PartId, parse
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import Context

# Which parts a command may name: new ones, of this shard, of which the committer found that they are what they say.
#
# A part is named once, for ever. Ids of parts that are in the State show by themselves. `State.left` has those of parts
# that writers staged and that left the State; what it had to forget is refused by its age. So whoever commits staged
# parts a second time, late or by mistake, is refused, and no State names a blob that is deleted. Inline rows come with
# their command alone, which its token makes land once: their ids are not remembered.


GIVEN_MAX = 2**48  # updates that one part may count for
LEFT_PARTS_MAX = 100_000  # staged parts that left the State which it remembers
FORGOTTEN_MAX = 1_000  # parts that one commit looks at, to forget those that are swept
LEFT_FORGOTTEN_PART = 50  # of those that are remembered: so many are forgotten at once, since it looks at all of them
DIFF_MAX = 2**32  # of a multiplicity that is written: it takes two thousand million such updates of a row to overflow


def check_staged(state: State, runs: Iterable[Run], context: Context) -> None:
    """Refuse the parts of a writer's command, or accept them all. Only the verdict knows of their rows."""
    parts = [part for run in runs for part in run.parts]
    if not parts:
        return
    staged_from_ms = context.staged_from_ms(state)
    for part in parts:
        _check_fields(state, part, staged_from_ms)
    _check_constrained(state, parts)
    _check_named(state, context)
    _check_new(state, parts)
    context.verdict.check()


def _check_constrained(state: State, parts: Sequence[Part]) -> None:
    """Refuse rows that were looked at by a schema which asked less of them than the shard does by now."""
    oldest = min(part.schema_id for part in parts)
    if oldest < state.schema_floor:
        raise SchemaMismatch(
            f"rows were staged by schema {oldest} of shard {state.name!r}, which has got stricter constraints by "
            f"schema {state.schema_floor} since; nothing was written: stage the rows again",
            expected=oldest,
            actual=state.schema_id,
        )


def _check_named(state: State, context: Context) -> None:
    """Refuse rows that came by the names of columns, where columns have changed since: who has them reads them anew."""
    known = context.verdict.schema
    if known not in (None, state.schema_id):
        raise SchemaMismatch(
            f"rows came by the names of columns in schema {known} of shard {state.name!r}, which has schema "
            f"{state.schema_id} by now; nothing was written: read the rows anew by its names",
            expected=known,
            actual=state.schema_id,
        )


def check_merged(state: State, outputs: Sequence[Part], kept: Sequence[Part], context: Context) -> None:
    """Refuse the outputs of a merge, or accept them all. Those that a claim has `kept` were accepted before."""
    known = {part.id: part for part in kept}
    new = [part for part in outputs if known.get(part.id) != part.without_receipt()]
    if len({part.id for part in outputs}) < len(outputs):
        raise InvalidUsage(f"a merge in shard {state.name!r} names a part twice")
    for part in new:
        _check_name(state, part)
        _check_numbers(state, part)
        if part.time is not None or part.clip is not None or part.given is not None:
            raise InvalidUsage(
                f"part {part.id} comes with a time, a clip or a count of updates, which only commits of writers have; "
                "a merge writes rows with their own times"
            )
        _check_unused(state, part)
    if new:
        context.verdict.check()


def check_replacement(state: State, part: Part, context: Context) -> None:
    """Refuse what comes in the place of a part, or accept it. It is a copy, so what it says stays as it was."""
    _check_name(state, part)
    _check_unused(state, part)
    context.verdict.check()


def departed(state: State, gone: Iterable[str]) -> State:
    """The State that remembers which staged parts left it: `gone` are the blob keys that it names no more.

    What maintenance may have swept is refused by its age anyway, so it is forgotten. Of the rest at most
    `LEFT_PARTS_MAX` are remembered. Parts as old as one that was forgotten for that are refused from then on.
    """
    went = {_compact(part_id_of(key)): int(state.seqno) for key in gone if is_part_key(key) and _is_staged(key)}
    if not went:
        return state
    left = with_changes(state.left, went)
    swept = [part_id for part_id in islice(left, FORGOTTEN_MAX) if _born_ms(part_id) < state.swept_before_ms]
    left = with_changes(left, {}, swept) if swept else left
    if len(left) <= LEFT_PARTS_MAX:
        return replace(state, left=left)
    # Those that were minted first: what a writer minted whose clock is far ahead is kept, and holds up nobody.
    some = len(left) - LEFT_PARTS_MAX + LEFT_PARTS_MAX // LEFT_FORGOTTEN_PART
    forgotten = nsmallest(some, left)
    before_ms = max(state.left_before_ms, _born_ms(forgotten[-1]) + 1)
    return replace(state, left=with_changes(left, {}, forgotten), left_before_ms=before_ms)


def _check_fields(state: State, part: Part, staged_from_ms: int) -> None:
    """What a part says, as far as the State alone can tell. It is asked 50,000 times for one commit of a Spark job."""
    _check_name(state, part)
    if part.key is not None and not _is_staged(part.key):
        raise InvalidUsage(f"part {part.id} was written by maintenance, not by a writer; write its rows again")
    if part.key is not None and _minted_ms(part) < staged_from_ms:
        raise Expired(
            f"part {part.id} was staged at {_minted_ms(part)} (ms since 1970, by its writer's clock), and maintenance "
            f"may have swept what was staged in shard {state.name!r} before {staged_from_ms}; stage its rows again"
        )
    _check_numbers(state, part)
    if part.given is not None and not 0 <= part.given <= GIVEN_MAX:
        raise InvalidUsage(f"part {part.id} counts for {part.given} updates; it must be in [0, {GIVEN_MAX}]")
    if part.clip is not None or (part.time is not None and not part.time_min == part.time == part.time_max):
        raise InvalidUsage(f"part {part.id} comes with a clip, or with other times than the one of all its rows")
    if max(-part.diff_min, part.diff_max) > DIFF_MAX:
        raise InvalidUsage(
            f"part {part.id} has multiplicities from {part.diff_min} to {part.diff_max}; at most {DIFF_MAX} can be "
            "written at once, so that sums of them stay exact"
        )


def _check_numbers(state: State, part: Part) -> None:
    """What every new part says of its rows."""
    if part.schema_id not in state.schemas:
        raise InvalidUsage(f"shard {state.name!r} has no schema {part.schema_id}; its current one is {state.schema_id}")
    if part.rows <= 0:
        raise InvalidUsage(f"part {part.id} has no rows; leave it out")
    if part.data is not None and part.size != len(part.data):
        raise InvalidUsage(f"part {part.id} has {len(part.data)} bytes and says that it has {part.size}")
    if not 0 <= part.time_min <= part.time_max <= TIME_MAX:
        raise InvalidUsage(f"part {part.id} has times in [{part.time_min}, {part.time_max}]; times begin at 0")


def _check_name(state: State, part: Part) -> None:
    """That a part has a sound id, and is at one place, of this shard."""
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
            raise InvalidUsage(f"part {part.id} occurs twice in one command: its rows must not count twice")
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
    """Whether a writer has staged the part with this key; maintenance writes its own, which no writer may name."""
    return not is_of_maintenance(key)


# What is checked of the upper before a shard is written to.


def check_upper(state: State, expected: Antichain) -> None:
    if state.upper != expected:
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}, not the expected {expected}; read it and decide anew",
            expected=expected.to_json(),
            actual=state.upper.to_json(),
        )


def check_near(state: State, upper: Antichain) -> None:
    """A slip of the keyboard would take all times from a shard for ever. One that is there already goes on."""
    if upper.element is not None and upper.element > FAR_TIME and state.upper <= Antichain(FAR_TIME):
        raise InvalidUsage(
            f"the upper {upper} of shard {state.name!r} would be beyond {FAR_TIME}, where no clock counts, and it "
            "never moves back; give it in the unit of the other times, or advance the upper with force"
        )


def no_time_left(state: State) -> UpperMismatch:
    return UpperMismatch(
        f"shard {state.name!r} has no time left: its upper is {state.upper}",
        expected=None,
        actual=state.upper.to_json(),
    )
