"""Transitions of row policies and of the progress of erasures."""

from __future__ import annotations

from contextlib import suppress

from persist.core import commands as c
from persist.core.erasure import Erasure, Wait
from persist.core.erasure_progress import WAITS_SHOWN_MAX, erased_at, is_rewritten, lent_before, states_held, waits
from persist.core.errors import NotReadable, Unavailable
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.named_holds import TAGS_MAX, Tag, check_tag_name
from persist.core.persistent_map import with_changes
from persist.core.readable_times import is_kept
from persist.core.record import replace
from persist.core.retention_plan import facts_of, outlived_rungs, rows_before, rows_there
from persist.core.shard_settings import CUTS_MAX, KeptCut, Rung
from persist.core.state import State
from persist.core.transitions.context import Context
from persist.core.transitions.row_drops import dropped_before
from persist.core.transitions.wall_clocks import checked, upper_at


def read(state: State, command: c.ReadErasures, context: Context) -> tuple[State, c.ErasuresAre]:
    waiting: dict[str, tuple[Wait, ...]] = {}
    for name, erasure in state.erasures.items():
        if erasure.pending is not None:
            waiting[name] = (Wait("writer", "append", erasure.at),)
        elif erasure.proof is None:
            left = states_held(state, erasure.rewritten) if erasure.rewritten else waits(state, erasure.at)
            waiting[name] = (*left, *lent_before(state, erasure))[:WAITS_SHOWN_MAX]
    return state, c.ErasuresAre(dict(state.erasures), waiting, context.checked_ms or context.now_ms)


def note_rewritten(state: State, command: c.NoteRewritten, context: Context) -> tuple[State, c.Done]:
    known = state.erasures.get(command.erasure)
    if known is None or known.rewritten or not is_rewritten(state, known.at):
        return state, c.Done()
    if context.checked_ms is None:  # by a clock that is behind, files would seem younger than they are
        raise Unavailable(
            f"the clocks of this machine and of the blob store do not agree, or cannot be compared, so it is unknown "
            f"which files of shard {state.name!r} are older than its erasure; set the clock, or retry"
        )
    rewritten = SeqNo(state.seqno + 1)
    noted = replace(known, rewritten=rewritten, rewritten_ms=context.checked_ms, doomed=command.doomed)
    return _with(state, command.erasure, noted), c.Done()


def prove(state: State, command: c.ProveErasure, context: Context) -> tuple[State, c.Done]:
    """The State is checked: it names no earlier rollup or long state diff, no loan may keep an earlier blob, and no
    earlier time is held.
    """
    known = state.erasures.get(command.erasure)
    if known is None or known.proof is not None or not known.rewritten:
        return state, c.Done()
    if lent_before(state, known) or state.since < Antichain(known.at):
        return state, c.Done()
    if min([command.proof.horizon, *state.rollups, *state.long_diffs]) < known.rewritten:
        return state, c.Done()
    return _with(state, command.erasure, replace(known, proof=command.proof)), c.Done()


def _with(state: State, name: str, erasure: Erasure) -> State:
    return replace(state, erasures=with_changes(state.erasures, {name: erasure}))


def read_retention(state: State, command: c.ReadRetention, context: Context) -> tuple[State, c.RetentionIs]:
    tried = state
    if command.policy is not None:
        tried = replace(state, settings=replace(state.settings, rows=command.policy))
    for at_ms in command.cuts_ms:
        with suppress(Unavailable):
            tried = _with_cut(tried, at_ms, context)
    return state, c.RetentionIs(facts_of(tried), context.checked_ms, rows_there(state))


def take_cuts(state: State, command: c.TakeCuts, context: Context) -> tuple[State, c.CutsTaken]:
    following, count = state, 0
    for at_ms in command.at_ms:
        cuts = following.cuts
        following = _with_cut(following, at_ms, context)
        count += following.cuts is not cuts
    for rung in command.rungs:
        following = _with_rung(following, rung, context)
    if gone := outlived_rungs(following.settings.rows, following.tags):
        following = replace(following, tags=with_changes(following.tags, {}, gone))
    return following, c.CutsTaken(count)


def _with_cut(state: State, at_ms: int, context: Context) -> State:
    if at_ms in state.cuts:
        return state
    sealed, upper = _readable_at(state, at_ms, context)
    before = max((cut.upper for known_ms, cut in state.cuts.items() if known_ms <= at_ms), default=0)
    if upper is None or upper <= max(state.retention.upper, before, dropped_before(state)):
        return sealed  # rows that were committed by an unchecked clock are visible from the next grid point on
    cuts = with_changes(state.cuts, {at_ms: KeptCut(upper, rows_before(state, upper))})
    if len(cuts) > CUTS_MAX:
        cuts = with_changes(cuts, {}, sorted(cuts)[1::2])
    return replace(sealed, cuts=cuts)


def _with_rung(state: State, rung: Rung, context: Context) -> State:
    sealed, upper = _readable_at(state, rung.at_ms, context)
    if upper is None or check_tag_name(rung.tag) in state.tags or len(state.tags) >= TAGS_MAX:
        return sealed
    return replace(sealed, tags=with_changes(state.tags, {rung.tag: Tag(upper - 1, laddered=True)}))


def _readable_at(state: State, at_ms: int, context: Context) -> tuple[State, int | None]:
    """The State in which the instant is sealed, and the upper by then; None: no cut or tag is possible there.

    Only readable times can be kept: a merge may use any later State, so no time may be added before since.
    """
    if state.settings.rows is None or state.since.is_empty:
        return state, None
    if at_ms > checked(context, state):
        raise Unavailable(f"{at_ms} ms (UTC, since 1970) is in the future of shard {state.name!r}; wait until then")
    try:
        sealed, sealed_upper = upper_at(state, at_ms, context)
    except NotReadable:
        return state, None
    upper = sealed_upper.element
    if not upper or upper <= erased_at(state) or not is_kept(state, upper - 1):
        return sealed, None
    return sealed, upper


def with_passed_cut(state: State, command: c.Rewrite, removed: int | None, context: Context) -> State:
    """The State in which the policy is done with the cut of the command. It removed `removed` rows (None: unknown).

    The same State object if the command has no cut, or the policy has reached it before.
    """
    known, passed, upper = state.retention, command.passes, c.effects(command).point
    if passed is None or upper is None or upper <= known.upper:
        return state
    gone = [at_ms for at_ms, cut in state.cuts.items() if cut.upper <= upper]
    done = replace(
        known,
        cut_ms=max(passed.cut_ms, known.cut_ms),
        upper=upper,
        at_ms=context.checked_ms or known.at_ms,
        removed=removed,
        overran=known.overran + passed.overran,
    )
    return replace(state, cuts=with_changes(state.cuts, {}, gone), retention=done)


def note_looked(state: State, command: c.NoteLooked, context: Context) -> tuple[State, c.Done]:
    looked, known, settings = command.looked, state.retention, state.settings
    if settings.rows is None or looked.version != settings.version or state.upper < Antichain(looked.upper):
        return state, c.Done()
    is_new = known.looked.version != settings.version
    if not is_new and (looked.upper, looked.at_ms) <= (known.looked.upper, known.looked.at_ms):
        return state, c.Done()
    done = replace(known, looked=looked, overran=known.overran + command.overran)
    return replace(state, retention=done), c.Done()
