"""Transitions of outcomes: what a token that came alone is answered, and moving what is remembered into files."""

from __future__ import annotations

from collections.abc import Iterable

from persist.core import commands as c
from persist.core.antichain import EMPTY
from persist.core.entries import with_changes
from persist.core.errors import InvalidUsage, OutcomeForgotten, Overloaded, TokenReused
from persist.core.ids import Token, WriterId, writer_of
from persist.core.keys import belongs_to
from persist.core.outcomes import (
    ENDED,
    ENDED_MAX,
    FUTURE_MS_MAX,
    RETIRED,
    RETIRED_PER_COMMIT_MAX,
    Outcome,
    OutcomeFile,
    born_ms,
    key_of,
)
from persist.core.record import replace
from persist.core.state import Policy, State, WriterState
from persist.core.transitions.context import RETRY_SOON_S, Context

OUTCOMES_MAX = 20_000_000  # of a shard; more than this slow writers down (Overloaded)

Written = c.CompareAndAppend | c.Append | c.Insert | c.Rewrite | c.UpdateAttributes  # what comes with a token


def is_alone(command: Written) -> bool:
    """Whether the command's token is remembered by itself, and not with a registered writer."""
    return command.writer == writer_of(command.token)


def is_of_the_future(command: c.Command, now_ms: int) -> bool:
    """Whether the command's token was minted so long after `now_ms` that one of the two clocks is wrong."""
    if not isinstance(command, Written) or not is_alone(command):
        return False
    born = born_ms(key_of(command.token))
    return born is not None and born > now_ms + FUTURE_MS_MAX


def outcome_of(state: State, key: str, context: Context) -> Outcome | None:
    """What is remembered under this id, in the State or in its files."""
    return state.outcomes.get(key) or context.remembered.get(key)


def answered(state: State, command: Written, context: Context) -> c.Appended | None:
    """What the command was answered the first time; None: it is new. Raises TokenReused, OutcomeForgotten."""
    known = outcome_of(state, key_of(command.token), context)
    if known is None:
        _check_known(state, command.token, context)
        return None
    if known.digest == ENDED:
        raise _forgotten(state, command.token, context)
    if known.digest and command.digest and known.digest != command.digest:
        raise _reused(state, command.token)
    return c.Appended(known.lower, known.upper)


def with_outcome(state: State, command: Written, result: c.Appended, context: Context) -> State:
    """The State that remembers what the command was answered. Raises Overloaded when there is no room."""
    policy = context.policy
    kept = len(state.outcomes) + sum(file.count for file in state.outcome_files)
    if len(state.outcomes) >= policy.outcomes_overlay_max or kept >= OUTCOMES_MAX:
        raise Overloaded(
            f"shard {state.name!r} remembers {kept} tokens, {len(state.outcomes)} of which wait to be written to a "
            "blob; use fewer, or leave them away where a write is not repeated",
            retry_after_s=RETRY_SOON_S,
        )
    outcome = Outcome(result.lower, result.upper, command.digest, context.lease_now_ms)
    return replace(state, outcomes=with_changes(state.outcomes, {key_of(command.token): outcome}))


def is_retired(state: State, writer: WriterId, context: Context) -> bool:
    """Whether the writer was registered before, and may have written: then its id is never registered again."""
    born = born_ms(key_of(writer))
    return outcome_of(state, key_of(writer), context) is not None or (born is not None and born <= state.forgotten_ms)


def of_ended_life(state: State, store_ms: int, context: Context) -> dict[str, Outcome]:
    """What the next life of the name must know of minted tokens that were born later than the store's time.

    Their makers' clocks are ahead, by seconds mostly. At most `ENDED_MAX`, those that are the least ahead. They stay in
    the State, so they are fewer than a flush waits for.
    """
    kept_max = min(ENDED_MAX, context.policy.outcomes_flush_at // 2)
    ahead = ((born, key) for key in state.outcomes if (born := born_ms(key)) is not None and born > store_ms)
    return {key: Outcome(EMPTY, EMPTY, ENDED, context.lease_now_ms) for _, key in sorted(ahead)[:kept_max]}


def retired(state: State, writers: Iterable[WriterId], now_ms: int) -> State:
    """The State without these registered writers, of which those that have written are remembered."""
    gone = list(writers)[:RETIRED_PER_COMMIT_MAX]
    kept = {key_of(writer): _last(state.writers[writer], now_ms) for writer in gone if state.writers[writer].token}
    outcomes = with_changes(state.outcomes, kept) if kept else state.outcomes
    return replace(state, writers=with_changes(state.writers, {}, gone), outcomes=outcomes)


def flush(state: State, command: c.FlushOutcomes, context: Context) -> tuple[State, c.Flushed]:
    """Move outcomes from the State to a file, iff all that it holds is still where it was."""
    file, files = command.file, list(state.outcome_files)
    if file is not None and file in files:  # a retry
        return state, c.Flushed(True)
    keys = [known.key for known in files]
    first = keys.index(command.merged[0]) if command.merged and command.merged[0] in keys else len(files)
    if tuple(keys[first : first + len(command.merged)]) != command.merged or not all(
        key in state.outcomes for key in command.flushed
    ):
        return state, c.Flushed(False)
    if file is not None:
        if not belongs_to(file.key, state.shard_id):
            raise InvalidUsage(f"outcome file {file.key!r} does not belong to shard {state.name!r}")
        if context.may_be_swept(state, file.key):
            return state, c.Flushed(False)  # the outcomes stay where they are; the next flush writes them anew
        files[first : first + len(command.merged)] = [file]
    store_ms, now_ms = command.store_ms, context.lease_now_ms
    kept = [known for known in files if store_ms is None or not is_outlived(known, now_ms, context.policy)]
    # A birth in the future would hold up everybody's tokens until that time. Whoever minted such a token has a wrong
    # clock: it is forgotten as a free-form key is.
    forgotten = [min(known.born_last, store_ms or 0) for known in files if known not in kept]
    following = replace(
        state,
        outcomes=with_changes(state.outcomes, {}, command.flushed),
        outcome_files=tuple(kept),
        forgotten_ms=max([state.forgotten_ms, *forgotten]),
    )
    return following, c.Flushed(True)


def is_outlived(file: OutcomeFile, now_ms: int, policy: Policy) -> bool:
    """Whether all outcomes of the file have been kept for their time. `now_ms` is of the lease clock."""
    return now_ms - file.last_ms > policy.outcome_kept_ms


def to_flush(state: State) -> dict[str, Outcome]:
    """The outcomes that may go to a file. What an ended life has left stays: the next drop carries it on."""
    return {key: outcome for key, outcome in state.outcomes.items() if outcome.digest != ENDED}


def flush_is_due(state: State, policy: Policy) -> bool:
    """Whether outcomes of the State should be moved to a file, or a file has been kept long enough."""
    if any(is_outlived(file, state.lease_now_ms, policy) for file in state.outcome_files):
        return True
    return len(state.outcomes) >= policy.outcomes_flush_at and len(to_flush(state)) >= policy.outcomes_flush_at


def _last(writer: WriterState, now_ms: int) -> Outcome:
    return Outcome(writer.lower, writer.upper, RETIRED, now_ms)


def _check_known(state: State, token: Token, context: Context) -> None:
    """Refuse a minted token of which it cannot be known whether it has landed, or will not be known later."""
    born = born_ms(key_of(token))
    if born is None:
        return
    if born <= state.forgotten_ms:
        raise _forgotten(state, token, context)
    if born > max(context.now_ms, state.walltime_ms, context.lease_now_ms, context.store_ms) + FUTURE_MS_MAX:
        raise OutcomeForgotten(
            f"token {token} was minted in the future of shard {state.name!r}, so its outcome could not be known for "
            "long; set the clock of the machine that mints it, or of this server, then write with a new token",
            born_ms=born,
        )


def _reused(state: State, token: Token) -> TokenReused:
    """A digest is of rows by the columns of then: by other ones the same rows have another, and landed all the same."""
    landed = f"a write with token {token} has landed on shard {state.name!r} already: another command or other rows"
    if len(state.schemas) > 1:
        return TokenReused(
            f"{landed}, or the same rows before the columns changed: look at the shard's history before you write "
            "them again, and use a new token for another write"
        )
    return TokenReused(f"{landed}; use a new token for each write")


def _forgotten(state: State, token: Token, context: Context) -> OutcomeForgotten:
    return OutcomeForgotten(
        f"what became of token {token} on shard {state.name!r} is no longer known: it is older than "
        f"{context.policy.outcome_kept_ms // 3_600_000} hours, or than a drop of the shard; look at the shard, "
        "then write with a new token",
        born_ms=born_ms(key_of(token)),
    )
