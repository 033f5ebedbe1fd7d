"""Restore: one commit after which the contents of a shard are those of an earlier time.

The commit takes back what was written since. That is read and staged key range after key range, and committed on the
condition that the upper is still the one that was compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

from persist.client.changes import Asked, Between, between
from persist.client.planned import Contents, GainedKeys
from persist.client.rewriting import Count, Rewriting, check_complete
from persist.client.snapshot import check_lease
from persist.client.wall_clock import instant_ms, instant_text
from persist.client.write import WriteHandle
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.ids import Token
from persist.core.transitions.naming import DIFF_MAX
from persist.core.view import ShardView, ViewRequest
from persist.parts import current_schema
from persist.parts.constrained import check_rows


@dataclass(frozen=True)
class Restored:
    """What a restore came to.

    `as_of` is the time whose contents the shard has again, and `timestamp` the first wall clock that shows it (None:
    not known). `lower` and `upper` are the interval that the restore took, as for an insert; they are equal where
    nothing differed, so that nothing was committed. `added` and `removed` are how many rows it wrote and took away;
    None where it happened, and what it wrote cannot be read any more: it was forgotten, or the shard was dropped.
    `attributes` are the keys of those that it changed. All others were kept: a restore takes no attribute back.
    """

    as_of: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    added: int | None
    removed: int | None
    attributes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any row differed."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        at = self.timestamp
        return {
            "as_of": self.as_of,
            "timestamp": None if at is None else instant_text(instant_ms("timestamp", at)),
            "lower": self.lower.to_json(),
            "upper": self.upper.to_json(),
            "added": self.added,
            "removed": self.removed,
            "attributes": {"changed": list(self.attributes), "others": "kept"},
        }


@dataclass(frozen=True)
class Restoring(Rewriting):
    """One restore of a shard."""

    what: ClassVar[str] = "restore to"
    done: ClassVar[str] = "restored to"

    attributes: tuple[AttributeUpdate, ...] = ()

    def run(self, token: Token | None, retries: int) -> Restored:
        """Raises what `Shard.restore` says."""
        as_of = self.to.time
        assert as_of is not None
        return self._settled(
            as_of, token, lambda: self._tried(as_of, token, retries), lambda done: self._told(as_of, done)
        )

    def check(self) -> None:
        """Raise what refuses the rows that a restore would write; nothing is written."""
        as_of = self.to.time
        assert as_of is not None
        asked = Asked(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, as_of, None, asked, self.read) as found:
            try:
                schema = current_schema(found.held.view.schemas)[1]
                gained = GainedKeys(schema) if schema.details.unique else None
                back = replace(found, start=found.end, end=as_of).splits(1, None)[0]
                rows = self._writable(as_of, back.read(self.transport))
                for table in rows if gained is None else gained.of(rows):
                    check_rows(schema.conform(table, 0), schema)
                if gained is not None:
                    gained.check(Contents(schema, replace(found.held, as_of=as_of), as_of), are_changed=True)
            finally:
                found.held.lease.close()

    def _tried(self, as_of: int, token: Token | None, retries: int) -> Restored:
        check_complete(self.name, as_of, self.transport.view(self.name, ViewRequest(with_batches=False)))
        asked = Asked(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, as_of, None, asked, self.read) as found:
            try:
                return self._restored(found, token, retries)
            finally:
                found.held.lease.close()

    def _restored(self, found: Between, token: Token | None, retries: int) -> Restored:
        as_of, view, count = found.start, found.held.view, Count()
        schema = current_schema(view.schemas)[1]
        gained = GainedKeys(schema) if schema.details.unique else None
        runs: tuple[Run, ...] = ()
        lead_to = as_of  # what is staged leads there, from the latest time that was looked at
        for left in range(retries, -1, -1):
            latest = found.end
            back = replace(found, start=latest, end=lead_to).splits(1, None)[0]
            rows = self._writable(as_of, back.read(self.transport))
            runs = (*runs, *self._staged(view, count.of(rows if gained is None else gained.of(rows))))
            first_try = lead_to == as_of
            if not runs or not (first_try or self._differs(found)):
                if not self.attributes:
                    return self._unchanged(as_of, view, token)
                runs = ()
            if gained is not None:  # a time of before the constraint may come back
                gained.check(Contents(schema, replace(found.held, as_of=as_of), as_of), are_changed=True)
            done = self._committed(runs, as_of, view, token, left)
            if done is not None:
                if not first_try or done.lower != view.upper:  # other rows landed than those of one comparison
                    return self._told(as_of, done)
                return self._said(as_of, done, count)
            lead_to, view = latest, self.transport.view(self.name, ViewRequest())
            check_complete(self.name, as_of, view)
            check_lease(view, as_of, found.held.lease)
            if not view.since.less_equal(lead_to):  # a lease on a tag holds that time alone: begin anew
                runs, lead_to, count = (), as_of, Count()
            found = replace(found, held=replace(found.held, view=view), end=(view.upper.element or 0) - 1)
        raise AssertionError("the last try returns or raises")

    def _differs(self, found: Between) -> bool:
        """Whether the contents at the two times differ. What was staged in several tries may cancel out."""
        return any(table.num_rows for table in found.splits(1, None)[0].read(self.transport))

    def _unchanged(self, as_of: int, view: ShardView, token: Token | None) -> Restored:
        """What is told where nothing differs: maybe since another try of the token has landed meanwhile."""
        if token is not None and (landed := self._landed(as_of, token)) is not None:
            return self._told(as_of, landed)
        return self._said(as_of, c.Appended(view.upper, view.upper), Count())

    def _told(self, as_of: int, done: c.Appended) -> Restored:
        """What is told of a restore that has happened. Its rows are counted where they were written."""
        return self._said(as_of, done, Count() if done.lower == done.upper else self._counted(done))

    def _said(self, as_of: int, done: c.Appended, count: Count | None) -> Restored:
        added, removed = (None, None) if count is None else (count.added, count.removed)
        keys = tuple(dict.fromkeys(update.key for update in self.attributes))
        return Restored(as_of, self._timestamp(as_of), done.lower, done.upper, added, removed, keys)

    def _commit(
        self, handle: WriteHandle, runs: tuple[Run, ...], as_of: int, expected: Antichain, token: Token | None
    ) -> c.Appended:
        return handle.commit_restore(runs, as_of, expected, token=token, attributes=self.attributes)

    def _too_often(self, as_of: int, most: int) -> str:
        return (
            f"a row of shard {self.name!r} was {most} times more or less there at time {as_of}, and one "
            f"commit can write at most {DIFF_MAX} of it; restore in steps, to times between, or insert the "
            "difference in several inserts"
        )
