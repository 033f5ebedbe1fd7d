"""The inputs of a step besides the State and the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist.core.attribute import AttributeKey
from persist.core.audit_log import TokenOutcome
from persist.core.blob_keys import born_ms
from persist.core.clock_index import Mark
from persist.core.errors import InvalidUsage, from_kind
from persist.core.frontier import Antichain
from persist.core.ids import ShardId
from persist.core.record import Record
from persist.core.state import Policy, State

# When an Overloaded command may be retried.
RETRY_SOON_S = 0.1  # a queue is full: a commit or a flush that is under way empties it
RETRY_LATER_S = 0.5  # too many registrations or batches: leases that lapse or merges reduce them


class IndexPage(Record, frozen=True):
    """A page of attributes of the index, ascending. `following`: the key of the next page (None: this is the last)."""

    values: Mapping[AttributeKey, int]
    following: AttributeKey | None


class Indexed(Record, frozen=True):
    """Entries read from the attribute index at the root with this count of flushes.

    `values` by key (None: not there), and pages by the requested range `(lower, upper)`. `marks`: the newest mark at or
    before an instant (None: not there). `spans`: for the first and last of some times, the marks from the first one
    beyond the last on, newest first. `first_ms`: the instant of the oldest mark, if one was searched in vain (None:
    there is none).
    """

    flushes: int
    values: Mapping[AttributeKey, int | None]
    pages: Mapping[tuple[AttributeKey, AttributeKey | None], IndexPage]
    marks: Mapping[int, Mark | None] = {}
    spans: Mapping[tuple[int, int], tuple[Mark, ...]] = {}
    first_ms: int | None = None


NOTHING_INDEXED = Indexed(0, {}, {})


class Verdict(Record, frozen=True):
    """The result of validating the parts or the schema of a command before it is planned.

    `kind` is that of the error with which the command is refused; "" if they are valid. `shard`: the verdict is for
    this life of the name, since another one has other schemas; None: for every one. `schema`: the rows were given by
    column name, by this schema, the newest at that time: a newer one may use the names for other columns; None: by ids.
    `settings`: a schema removes column names, which the settings of this version do not use. `constrains`: a schema
    changes constraints, and no columns.
    """

    kind: str = ""
    message: str = ""
    details: Mapping[str, Any] = {}
    shard: ShardId | None = None
    schema: int | None = None
    settings: int | None = None
    constrains: bool = False

    def check(self) -> None:
        if self.kind:
            raise from_kind(self.kind, self.message, self.details)


SOUND = Verdict()
UNCHECKED = Verdict(InvalidUsage.kind, "the parts or the schema of this command were not validated")


class Renewed(Record, frozen=True):
    """An observed State: a lease that differs from that in `state` was renewed at most `age_ms` ago."""

    state: State
    age_ms: int


class Context(Record, frozen=True):
    """`now_ms` is the committer's clock, `lease_clock_ms` the clock of leases (None: `now_ms`).

    `renewed` are the States that the committer observed, newest first.

    `inserted_at` is the time of the insert just before in the same commit: the next one may join its batch, which no
    reader can have seen yet. `indexed` is what the committer has read from the attribute index for the commands of this
    commit, `remembered` the outcomes of their tokens in files. `verdict` is that on this command. `store_ms` is the
    blob store's time, if a token seems to come from the future (0: not read). `checked_ms` is the committer's clock if
    the blob store agrees with it (None: unknown), `base_upper` the upper of the State on which this commit is made
    (None: that of the State that is stepped).
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
        """Whether the orphan sweep may have deleted a blob that is not named yet."""
        return born_ms(key) < state.swept_before_ms

    def check_indexed(self, state: State) -> None:
        """Raise RuntimeError unless the entries were read in the index of the State."""
        if self.indexed.flushes != state.attribute_root.flushes:
            raise RuntimeError(f"entries of shard {state.name!r} were read in an index that is not the State's")
