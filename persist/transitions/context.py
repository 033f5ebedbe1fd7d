"""What a step may know besides the State and the command."""

from __future__ import annotations

from dataclasses import dataclass

from persist.state import Policy


@dataclass(frozen=True, slots=True)
class Context:
    """`now_ms` is the committer's clock, never before the State's walltime.

    `inserted_at` is the time that an insert earlier in the same commit took: later inserts of that commit
    may join its batch, because nobody can have seen it yet.
    """

    now_ms: int
    policy: Policy
    inserted_at: int | None = None
