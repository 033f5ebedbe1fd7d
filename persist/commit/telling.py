"""What callers are told of a commit: its outcomes, unless another home has taken over, or the store is a copy."""

from __future__ import annotations

from collections.abc import Sequence

from persist.commit.command_queue import Pending
from persist.commit.commit_plan import Commit, Outcome
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.errors import PersistError, ReadOnly


def told(versions: Versions, commit: Commit, group: Sequence[Pending]) -> list[Outcome]:
    """The outcomes as callers are told them: a refusal names the home that has taken over.

    A write that landed before, or changes nothing, is no more than tried: another home may not have it.
    """
    outcomes = [
        versions.named(one) if isinstance(one, ReadOnly) else one for one in _unless_copied(versions, commit, group)
    ]
    if commit.diff is not None:
        return outcomes
    writes = [
        index
        for index, (outcome, pending) in enumerate(zip(outcomes, group, strict=False))
        if isinstance(pending.command, c.WriteCommand) and not isinstance(outcome, Exception)
    ]
    if writes:
        try:
            versions.check_writable()
        except PersistError as error:
            for index in writes:
                outcomes[index] = error
    return outcomes


def _unless_copied(versions: Versions, commit: Commit, group: Sequence[Pending]) -> Sequence[Outcome]:
    """What became of the group. Reads of a shard that goes on elsewhere: unless the store has become a copy."""
    reads = [not isinstance(pending.command, c.WriteCommand) for pending in group[: len(commit.outcomes)]]
    if not commit.following.handed_over or not any(reads):
        return commit.outcomes
    try:
        versions.check_no_copy(if_due=True)
    except PersistError as copied:
        return [copied if is_read else one for one, is_read in zip(commit.outcomes, reads, strict=True)]
    return commit.outcomes
