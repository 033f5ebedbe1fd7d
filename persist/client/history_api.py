"""History of a shard as its users see it: differences, restore, truncation, erasure and tags."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, overload

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client.arguments import check_splits, checked, checked_wait, names
from persist.client.commit_info import Info, info_bytes
from persist.client.contents_diff import Changes, DiffRequest, Named, changes_between, changes_of
from persist.client.deadlines import Timeable
from persist.client.erasure_api import (
    Erasing,
    ErasureStatus,
    Question,
    checked_deadline,
    checked_reason,
    read_erasures,
    status_of,
)
from persist.client.idempotency import read_details, send
from persist.client.maintaining import Optimized, Vacuumed, optimize, vacuum
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.rewrites import (
    DROP,
    Dropping,
    Restored,
    Restoring,
    Truncated,
    Truncating,
    cut_of,
    mode_of,
)
from persist.client.snapshot import LATEST_TRIES_MAX, ReadSettings, latest
from persist.client.timestamps import as_of_at, datetime_text, kept_ms, resolved, shown_instant
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteSettings
from persist.core import commands as c
from persist.core.attribute import as_updates as as_attribute_updates
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.frontier import frontier
from persist.core.ids import Token, parse
from persist.core.named_holds import Tag, check_tag_name
from persist.core.shard_settings import ShardSettings, history_text
from persist.core.shard_view import ViewRequest
from persist.parts import ShardSchema

# Tags as callers set them: at a time, a wall clock, or the latest time, and for how long.


@dataclass(frozen=True, slots=True)
class ShardTag:
    """A time of a shard that stays readable, at least up to the instant `until`, in UTC; None: until it is taken away.

    `Shard.tag` and `Shard.tags` give it.
    """

    name: str
    time: int
    until: datetime | None

    @classmethod
    def of(cls, name: str, tag: Tag) -> ShardTag:
        """The tag of this name as callers see it."""
        return cls(name, tag.time, None if tag.until_ms is None else shown_instant(tag.until_ms))


def tag_json(tag: ShardTag) -> dict[str, Any]:
    """The tag for JSON."""
    return {"tag": tag.name, "time": tag.time, "until": datetime_text(tag.until)}


def settings_json(settings: ShardSettings) -> dict[str, Any]:
    """The settings for JSON, without the policy of rows; `history` is null where there are none yet."""
    history = history_text(settings.history_ms) if settings.version else None
    return {"history": history, "mark_every_ms": settings.mark_every_ms, "version": settings.version}


def keep_ms(keep: timedelta | str | None) -> int | None:
    """For how long a tag is meant to be kept, in milliseconds; None: until it is taken away. Raises InvalidUsage."""
    return None if keep is None else kept_ms(keep, "keep", takes_none=False)


def set_tag(transport: Transport, name: str, tag: str, at: int | None, kept: int | None, retry_s: float) -> ShardTag:
    """Set the tag at a time; None: the latest complete one. Since may pass that one at once; then there is a later one.

    Raises InvalidUsage, NotReadable, Conflict, Unavailable.
    """
    check_tag_name(tag)
    tries = 0
    while True:
        time = latest(transport.view(name, ViewRequest(with_batches=False))) if at is None else at
        try:
            found = send(transport, name, c.SetTag(tag, frontier(time).element or 0, kept), retry_s)
        except NotReadable:
            tries += 1
            if at is not None or tries == LATEST_TRIES_MAX:
                raise
            continue
        assert isinstance(found, c.TagsAre)
        return ShardTag.of(tag, found.tags[tag])


def read_tags(transport: OneShard, name: str, retry_s: float) -> dict[str, ShardTag]:
    """The tags of a shard, by name. Raises what every call may."""
    tags = read_details(transport, name, retry_s).tags
    return {tag: ShardTag.of(tag, tags[tag]) for tag in sorted(tags)}


def remove_tag(transport: Transport, name: str, tag: str, retry_s: float) -> bool:
    """Take a tag away; whether there was one. Raises InvalidUsage (no tag can have this name)."""
    found = send(transport, name, c.RemoveTag(check_tag_name(tag)), retry_s)
    assert isinstance(found, c.TagRemoved)
    return found.tag is not None


# What a shard was: the changes between two of its times, how to make it again what it was, and tags.


@dataclass(frozen=True, slots=True)
class HandleSettings:
    """Settings of the writers and readers of a connection."""

    write: WriteSettings = field(default_factory=WriteSettings)
    read: ReadSettings = field(default_factory=ReadSettings)


class Past(Timeable):
    """The base of `Shard`, which says more."""

    name: str
    _transport: OneShard
    _settings: HandleSettings

    @abstractmethod
    def _current_schema(self) -> tuple[int, ShardSchema]:
        """The id of the schema that the handle knows, and the schema."""

    def changes(
        self,
        start: int | datetime,
        end: int | datetime | None = None,
        *,
        other: Past | None = None,
        num_splits: int = 1,
        columns: Sequence[str] | None = None,
        wait_s: float = 60.0,
    ) -> Changes:
        """What was added and removed between two times: how often each row is there at `end` more than at `start`.

        Args:
            start: the time that is compared with, or a wall clock with its zone; -1 is before the first write.
            end: the same; None is the latest complete time. An `end` before `start` tells what leads back.
            other: the shard whose contents at `end` are compared, of equal schema and opened by the same client; None
                is this one.
            num_splits: as `snapshot` says.
            columns: those to give. Rows that differ only in others are told apart all the same.
            wait_s: seconds to wait until the times are complete.
        Raises: InvalidUsage (no such time or column, or another schema), and what `snapshot` raises.
        """
        check_splits(num_splits)
        checked_wait("wait_s", wait_s)
        if start is None:
            raise InvalidUsage("start is None; it must be a time, or a wall clock with its zone")
        if other is not None and not isinstance(other, Past):
            raise InvalidUsage(f"other is {other!r:.100}; it must be a Shard")
        known = self._current_schema()[0]
        asked = DiffRequest(num_splits, None if columns is None else names("columns", columns), wait_s, known=known)
        later, read = other or self, self._settings.read
        if later._transport.inner is not self._transport.inner:
            raise InvalidUsage(f"shards {self.name!r} and {later.name!r} were opened by two clients; open both by one")
        limits = (wait_s, read.retry_s)
        first = Named.of_read("start", start, self._transport, self.name, limits)
        last = Named.of_read("end", end, later._transport, later.name, limits)
        if later._transport.shard == self._transport.shard:
            found = changes_of(self._transport, self.name, first, last, asked, read)
        else:
            one, two = (self._transport, self.name, first), (later._transport, later.name, last)
            found = changes_between(one, two, asked, read)
        return replace(found, start_timestamp=first.timestamp, end_timestamp=last.timestamp)

    def restore(
        self,
        as_of: int | datetime,
        *,
        token: Token | None = None,
        retries: int = 0,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Restored:
        """Make the contents again what they were: by one commit at the next time, which readers see as any other.

        What is between the two times stays readable, so another restore undoes it. Memory stays bounded, whatever the
        size of what differs. Columns that were added since are null in rows that come back from before. Attributes have
        no history, so they keep their values: positions and numbers of batches that are kept with the rows go back
        only if you set them by `attributes`, in the same commit.

        Args:
            as_of: the time, or a wall clock with its zone.
            token: as `insert` says; it stands for this restore to this time, with these attributes.
            retries: how often to go on if others write meanwhile, up to 1,000. What they wrote is taken back too.
            attributes: as `insert` says. They change also where no row differs.
            info: as `insert` says.
        Returns: what was restored: see `Restored`. Where nothing differs no row is written.
        Raises: UpperMismatch (somebody else wrote meanwhile, or the shard is closed, or no time is left: nothing was
            changed), InvalidUsage (no such time, or it is not complete, or a row was there over 2**32 times more or
            less), NotReadable (it was forgotten), AttributeMismatch (the condition of an attribute failed: nothing was
            changed), TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not happen), Indeterminate (it
            may have happened: repeat it with the token).
        """
        if as_of is None:
            raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
        settings, said, changes = self._settings, _checked(token, retries, info), as_attribute_updates(attributes)
        to = Named.of("as_of", as_of, self._transport, self.name, (0.0, settings.read.retry_s))
        restoring = Restoring.of(self._transport, self.name, to, settings.write, settings.read)
        return replace(restoring, info=said, attributes=changes).run(token, retries)

    def truncate(  # noqa: PLR0913 - each argument by its name
        self,
        before: int | datetime,
        *,
        mode: Literal["retract", "drop"] = "retract",
        dry_run: bool = False,
        token: Token | None = None,
        retries: int = 0,
        info: Info | None = None,
        force: bool = False,
    ) -> Truncated:
        """Take away the rows that were there before a time and still are: by one commit at the next time.

        Readers see ordinary retractions. Each row goes as often as it was there before the cut and is there still, so
        none is there less than no times. What was there at earlier times stays readable as long as the shard's history
        says, so `restore` undoes it. Memory stays bounded. A truncation to the same time or an earlier one changes
        nothing when it comes again.

        The times of a shard that is fed by `append` are its writer's. A truncation there is a drop, which takes effect
        at the next time that the writer completes; until then the result is `pending`. It is withdrawn if the writer
        takes rows away at that time, or rows are erased.

        Args:
            before: the cut: a time in `(since, upper]`, or a wall clock with its zone. Times before it are meant.
            mode: "retract" reads what goes, and writes its retractions. "drop" takes away the rows that were written at
                times before the cut, by metadata alone: it reads and writes no row, and who else writes is no matter.
            dry_run: tell how many rows would go, and change nothing. It reads them, in either mode.
            token: as `insert` says; it stands for the truncation before this time, in this mode.
            retries: how often to go on if others take rows away meanwhile, up to 1,000. Each works everything out anew.
                Rows that they add do not matter.
            info: as `insert` says.
            force: in a shard that is fed by `append`, take the next time at once. What is appended there is refused.
        Returns: what was taken away: see `Truncated`.
        Raises: UpperMismatch (somebody else took rows away meanwhile, or the shard is closed, or no time is left:
            nothing was changed), InvalidUsage (no such time, or it lies beyond the upper, or a row was there over 2**32
            times; of a drop: a retraction was written at the cut or later, an erasure of rows is pending, or too many
            drops wait), Conflict (the drop of this token was withdrawn before it became effective), NotReadable (the
            time before the cut was forgotten), TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not
            happen), Indeterminate (it may have happened: repeat it).
        """
        if before is None:
            raise InvalidUsage("before is None; it must be a time, or a wall clock with its zone")
        checked("dry_run", dry_run, bool)
        checked("force", force, bool)
        mode_of(mode)
        settings, said = self._settings, _checked(token, retries, info)
        cut = cut_of(self._transport, self.name, before, settings.read.retry_s)
        if mode == DROP:
            dropping = Dropping.of(self._transport, self.name, cut, settings.write, settings.read)
            return replace(dropping, info=said).run(token, dry_run=dry_run, force=force)
        truncating = Truncating.of(self._transport, self.name, cut, settings.write, settings.read)
        return replace(truncating, info=said).run(token, retries, dry_run=dry_run, force=force)

    def erase(  # noqa: PLR0913 - each argument by its name
        self,
        *,
        keys: Sequence[Any] | None = None,
        where: str | None = None,
        deadline: timedelta | str | None = None,
        reason: str = "",
        tags: bool = False,
        token: Token | None = None,
        force: bool = False,
    ) -> ErasureStatus:
        """Take rows away for good: by one commit at the next time, and then from every byte of both stores.

        The latest contents are without them at once. The shard lets the history before that commit go, and its commit
        history too; what readers hold, and tags, it waits for. Maintenance (`persist maintain run`) rewrites and
        deletes what showed the rows, and proves it: `erased` tells how far it is, and gives the receipt. With neither
        `keys` nor `where` no row is taken away: what was retracted or truncated before goes for good. Scope `admin`.
        A shard that is fed by `append` has no time for that commit: there the erasure is `pending` until the next
        commit of the writer, which retracts the rows too. `erased` tells for how long it has been.

        Args:
            keys: up to 1,000 keys: tuples in key order, or the values themselves where there is one key column.
            where: a predicate, as the Spark option `where` says.
            deadline: by when it should have ended, such as `30d`; it is only told.
            reason: what the receipt tells, up to 256 characters. It must not name the rows.
            tags: take away all tags of earlier times too; else it waits for them.
            token: as `insert` says; it stands for this erasure, and gives it its id.
            force: take a time at once, also where the shard is fed by `append`. What its writer appends there is
                refused, and it has to continue after that time.
        Returns: how far it is: see `ErasureStatus`.
        Raises: UpperMismatch (others wrote all the time, or the shard is closed, or no time is left: nothing was
            changed), InvalidUsage (no such key or column, nothing was written yet, or a row is there over 2**32 times),
            TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not happen), Indeterminate (it may have
            happened: repeat it with the token).
        """
        checked("tags", tags, bool)
        checked("force", force, bool)
        question, settings, _ = Question.of(keys, where), self._settings, _checked(token, 0, None)
        erasing = Erasing.of(self._transport, self.name, Named(None), settings.write, settings.read)
        return replace(
            erasing,
            question=question,
            known=self._current_schema()[0],
            deadline_ms=checked_deadline(deadline),
            reason=checked_reason(reason),
            tags=tags,
            force=force,
        ).run(token)

    @overload
    def erased(self, erasure: str) -> ErasureStatus: ...

    @overload
    def erased(self, *, before: int) -> dict[str, Any]: ...

    def erased(self, erasure: str | None = None, *, before: int | None = None) -> ErasureStatus | dict[str, Any]:
        """How far an erasure is, for what it waits, and, once nothing is left, the receipt. Scope `admin`.

        With `before`: what still shows rows that were retracted before that time, or by a truncation before it, by a
        scan of both stores that changes nothing. Either call may be repeated.

        Args:
            erasure: the id of an erasure.
            before: a time in `[0, upper]`.
        Returns: with `before` what `GET .../erasures?before=` answers: its `phase` is "erased" once nothing is left.
        Raises: InvalidUsage (the shard has no erasure of this id, or has forgotten it: it keeps the last 100; or
            `before` is no such time), Unavailable (a store gives no answer).
        """
        if (erasure is None) == (before is None):
            raise InvalidUsage("give the id of an erasure, or before, and not both")
        if erasure is None:
            checked("before", before, int)
            return self._transport.erased_before(self.name, before or 0)
        return status_of(self._transport, self.name, erasure, self._settings.read.retry_s)

    def erasures(self) -> dict[str, ErasureStatus]:
        """The shard's erasures by id, the oldest first. Scope `admin`. Raises what every call may."""
        return read_erasures(self._transport, self.name, self._settings.read.retry_s)

    def optimize(self) -> Optimized:
        """Merge now what is worth merging, as maintenance does for an idle shard. Scope `maintain`.

        No row is changed, and no reader or writer fails by it. It takes as long as the merges do. Repeating it is safe.

        Returns: how many merges there were, and how much the shard holds before and after.
        Raises: UnknownShard, Unavailable, and what every call may. What was merged by then stays merged.
        """
        return optimize(self._transport, self.name)

    def vacuum(self) -> Vacuumed:
        """Delete now what no reader can need any more, as maintenance does. Scope `maintain`.

        It takes nothing that history keeps (`configure`, `forget`), nor what a reader holds. Repeating it is safe.

        Returns: how many blobs and entries of the log were deleted.
        Raises: UnknownShard, Unavailable, and what every call may. What was deleted by then stays deleted.
        """
        return vacuum(self._transport, self.name)

    def tag(self, name: str, at: int | datetime | None = None, *, keep: timedelta | str | None = None) -> ShardTag:
        """Keep one time readable under a name, also when since passes it. Repeating it is safe. Scope `manage`.

        Args:
            name: up to 128 of `A-Z a-z 0-9 . _ -`, not `-` first. A tag that is there keeps its time.
            at: a time that can be read; None is the latest complete one. A datetime with its zone is a wall clock.
            keep: for how long from now on, such as `400d`; None, or `forever`, is until it is taken away.
        Returns: the tag: its `time`, and `until` when it is kept at least (None: for ever).
        Raises: InvalidUsage (no such name, time or age, or the shard has 1,000 tags), NotReadable (the time was
            forgotten), Conflict (the tag is at another time), Unavailable (no clock can be trusted for `keep`).
        """
        if isinstance(at, datetime):
            at = as_of_at(self.name, resolved(self._transport, self.name, at, 0.0, self._settings.read.retry_s))
        checked("at", at, int, type(None))
        return set_tag(self._transport, self.name, name, at, keep_ms(keep), self._settings.write.retry_s)

    def tags(self) -> dict[str, ShardTag]:
        """The shard's tags by name, as of now. Raises what every call may."""
        return read_tags(self._transport, self.name, self._settings.write.retry_s)

    def untag(self, name: str) -> bool:
        """Remove a tag: its time may be forgotten. Repeating it is safe. Scope `manage`.

        Returns: whether there was such a tag.
        Raises: InvalidUsage (no tag can have this name).
        """
        return remove_tag(self._transport, self.name, name, self._settings.write.retry_s)


def _checked(token: Token | None, retries: int, info: Info | None) -> bytes:
    """The bytes of `info`. Raises InvalidUsage where one of them is not what it must be."""
    checked("retries", retries, int)
    if not 0 <= retries <= RETRIES_MAX:
        raise InvalidUsage(f"retries is {retries}; it must be in [0, {RETRIES_MAX}]")
    if token is not None:
        parse(Token, token)
    return info_bytes("info", info)
