"""What a step may know besides the State and the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist.core.attribute import AttributeKey
from persist.core.blob_keys import born_ms
from persist.core.clock_index import Mark
from persist.core.dedup import TokenOutcome
from persist.core.errors import InvalidUsage, from_kind
from persist.core.frontier import Antichain
from persist.core.ids import ShardId
from persist.core.record import Record
from persist.core.state import Policy, State

# When an Overloaded command may be tried again.
RETRY_SOON_S = 0.1  # a queue is full: a commit or a flush that is under way empties it
RETRY_LATER_S = 0.5  # registrations or batches are too many: they become fewer by leases that lapse or by merges


class IndexPage(Record, frozen=True):
    """The attributes of the index from some key on, ascending. `following`: the rest begins there (None: no rest)."""

    values: Mapping[AttributeKey, int]
    following: AttributeKey | None


class Indexed(Record, frozen=True):
    """What was read in the index at the root with this count of flushes: `values` by key (None: not there), and pages

    by the range `(lower, upper)` that was asked for. `marks`: the newest mark at or before an instant (None: not
    there). `spans`: for the first and last of some times, the marks from the first one beyond the last on, newest
    first. `first_ms`: where the oldest mark lies, if one was looked for in vain (None: there is none there).
    """

    flushes: int
    values: Mapping[AttributeKey, int | None]
    pages: Mapping[tuple[AttributeKey, AttributeKey | None], IndexPage]
    marks: Mapping[int, Mark | None] = {}
    spans: Mapping[tuple[int, int], tuple[Mark, ...]] = {}
    first_ms: int | None = None


NOTHING_INDEXED = Indexed(0, {}, {})


class Verdict(Record, frozen=True):
    """What the committer found of the parts or the schema of a command, at which it looked before it planned.

    `kind` is that of the error with which the command is refused; "" where they are what they say. `shard`: it holds
    for this life of the name, since another one has other schemas. None: for every one. `schema`: the rows came by the
    names of columns, where this was the newest schema of the shard: a newer one may give them to others. None: by ids.
    `settings`: a schema takes names from columns, and by the settings of this version nothing goes by such a name.
    `constrains`: a schema changes constraints, and no columns.
    """

    kind: str = ""
    message: str = ""
    details: Mapping[str, Any] = {}
    shard: ShardId | None = None
    schema: int | None = None
    settings: int | None = None
    constrains: bool = False

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.kind:
            raise from_kind(self.kind, self.message, self.details)


SOUND = Verdict()
UNCHECKED = Verdict(InvalidUsage.kind, "nobody has looked at the parts or the schema of this command")


class Renewed(Record, frozen=True):
    """What is known of renewals: a lease that differs from that in `state` was renewed at most `age_ms` ago."""

    state: State
    age_ms: int


class Context(Record, frozen=True):
    """`now_ms` is the committer's clock, `lease_clock_ms` the time by which leases are judged (None: `now_ms`).

    `renewed` is what the committer knows of renewals, newest first.

    `inserted_at` is the time that an insert earlier in the same commit took: later inserts of that commit
    may join its batch, because nobody can have seen it yet. `indexed` is what the committer has read in the index of
    attributes for the commands of this commit, `remembered` what it has read in files of outcomes for their tokens.
    `verdict` is what was found of the parts of this command. `store_ms` is the blob store's time, where a token seems
    to come from the future (0: it was not asked). `checked_ms` is the committer's clock where the blob store agrees
    with it (None: unknown), `base_upper` the upper of the State on which this commit is made (None: that of the State
    that is stepped).
    """

    now_ms: int
    policy: Policy
    inserted_at: int | None = None
    indexed: Indexed = NOTHING_INDEXED
    verdict: Verdict = UNCHECKED
    lease_clock_ms: int | None = None
    renewed: tuple[Renewed, ...] = ()
    remembered: Mapping[str, TokenOutcome] = {}
    store_ms: int = 0
    checked_ms: int | None = None
    base_upper: Antichain | None = None

    @property
    def lease_now_ms(self) -> int:
        return self.now_ms if self.lease_clock_ms is None else self.lease_clock_ms

    def may_be_swept(self, state: State, key: str) -> bool:
        """Whether the orphan sweep may have taken a blob that nothing names yet."""
        return born_ms(key) < self.staged_from_ms(state)

    def staged_from_ms(self, state: State) -> int:
        """Only blobs whose key was minted at this time or later may come to be named."""
        return state.swept_before_ms
