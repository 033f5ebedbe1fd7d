"""Transitions of row policies: cuts that the State keeps, and how far the policy has come."""

from __future__ import annotations

from contextlib import suppress

from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.entries import with_changes
from persist.core.erasing import erased_at
from persist.core.errors import Conflict, NotReadable, Unavailable
from persist.core.record import replace
from persist.core.retention_plan import facts_of, rows_before
from persist.core.row_policy import CUTS_MAX, KeptCut, RowPolicy
from persist.core.state import State, is_kept
from persist.core.tags import TAGS_MAX, Tag, check_tag_name
from persist.core.transitions.context import Context
from persist.core.transitions.dropping import dropped_before
from persist.core.transitions.history import checked, upper_at
from persist.core.transitions.writers import restore


def read_retention(state: State, command: c.ReadRetention, context: Context) -> tuple[State, c.RetentionIs]:
    tried = state if command.policy is None else _with_policy(state, command.policy)
    for at_ms in command.cuts_ms:
        with suppress(Unavailable):
            tried, _ = take_cut(tried, c.TakeCut(at_ms), context)
    return state, c.RetentionIs(facts_of(tried), context.checked_ms)


def _with_policy(state: State, policy: RowPolicy) -> State:
    return replace(state, settings=replace(state.settings, rows=policy))


def take_cut(state: State, command: c.TakeCut, context: Context) -> tuple[State, c.CutKept]:
    """Only of what can be read: merges ask any later State what is kept, so no time may be added before since."""
    at_ms = command.at_ms
    if state.settings.rows is None or state.since.is_empty or at_ms in state.cuts:
        return state, c.CutKept(False)
    if at_ms > checked(context, state):
        raise Unavailable(f"{at_ms} ms (UTC, since 1970) is to come for shard {state.name!r}; wait until then")
    try:
        sealed, found = upper_at(state, at_ms, context)
    except NotReadable:
        return state, c.CutKept(False)
    upper = found.element
    if not upper or upper - 1 < erased_at(state) or not is_kept(state, upper - 1):
        return sealed, c.CutKept(False)
    if upper <= max(state.retention.upper, _before(state, at_ms), dropped_before(state)):
        return sealed, c.CutKept(False)  # rows that came by an unchecked clock show from the next point on
    cuts = with_changes(state.cuts, {at_ms: KeptCut(upper, rows_before(state, upper))})
    if len(cuts) > CUTS_MAX:
        cuts = with_changes(cuts, {}, sorted(cuts)[1::2])
    return replace(sealed, cuts=cuts), c.CutKept(True)


def pass_cut(state: State, command: c.PassCut, context: Context) -> tuple[State, c.CutKept]:
    known = state.retention
    if command.upper <= known.upper or state.upper < Antichain(command.upper):
        return state, c.CutKept(False)
    gone = [at_ms for at_ms, cut in state.cuts.items() if cut.upper <= command.upper]
    done = replace(
        known,
        cut_ms=max(command.cut_ms, known.cut_ms),
        upper=command.upper,
        at_ms=context.checked_ms or known.at_ms,
        removed=command.removed,
        overran=known.overran + command.overran,
    )
    return replace(state, cuts=with_changes(state.cuts, {}, gone), retention=done), c.CutKept(True)


def retract_aged(state: State, command: c.RetractAged, context: Context) -> tuple[State, c.Appended]:
    """Rows do not go by a policy that somebody has changed, or taken away, since they were looked for."""
    settings = state.settings
    if command.version != settings.version or settings.rows is None or settings.rows.column is None:
        raise Conflict(
            f"the policy of rows of shard {state.name!r} has changed: its settings have version {settings.version}, "
            f"and rows were looked for by a column of version {command.version}; nothing was taken away",
            expected=command.version,
            actual=settings.version,
        )
    return restore(state, command, context)


def note_looked(state: State, command: c.NoteLooked, context: Context) -> tuple[State, c.CutKept]:
    looked, known, settings = command.looked, state.retention, state.settings
    if settings.rows is None or looked.version != settings.version or state.upper < Antichain(looked.upper):
        return state, c.CutKept(False)
    is_new = known.looked.version != settings.version
    if not is_new and (looked.upper, looked.at_ms) <= (known.looked.upper, known.looked.at_ms):
        return state, c.CutKept(False)
    done = replace(known, looked=looked, overran=known.overran + command.overran)
    return replace(state, retention=done), c.CutKept(True)


def set_rungs(state: State, command: c.SetRungs, context: Context) -> tuple[State, c.TagsAre]:
    tags, following = dict(state.tags), state
    if state.settings.rows is None or state.since.is_empty:
        return state, c.TagsAre({})
    for rung in command.rungs:
        if rung.at_ms > checked(context, state):
            raise Unavailable(f"{rung.at_ms} ms (UTC, since 1970) is to come for shard {state.name!r}; wait until then")
        try:
            following, upper = upper_at(following, rung.at_ms, context)
        except NotReadable:
            continue
        known = check_tag_name(rung.tag) in tags or len(tags) >= TAGS_MAX
        if not known and upper.element and upper.element > erased_at(state) and is_kept(state, upper.element - 1):
            tags[rung.tag] = Tag(upper.element - 1, laddered=True)
    for name in command.gone:
        if name in tags and tags[name].laddered:
            del tags[name]
    if tags != dict(state.tags):
        gone = [name for name in state.tags if name not in tags]
        added = {name: tag for name, tag in tags.items() if name not in state.tags}
        following = replace(following, tags=with_changes(state.tags, added, gone))
    return following, c.TagsAre({name: tag for name, tag in following.tags.items() if tag.laddered})


def _before(state: State, at_ms: int) -> int:
    """The upper of the last cut before the instant."""
    return max((cut.upper for known_ms, cut in state.cuts.items() if known_ms <= at_ms), default=0)
