"""The methods of `Shard` for its history: commits, wall clocks, differences, restore, truncation and tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client import restore_and_truncate
from persist.client.arguments import SPLITS_MAX, check_int, checked, checked_wait, names
from persist.client.commit_info import HistoryEntry, Info, info_bytes, read_entries, read_place, to_history_entry
from persist.client.contents_diff import Changes, DiffRequest, NamedTime, changes_between, changes_of
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.restore_and_truncate import Restored, RestoreOperation, Truncated, TruncateOperation, mode_of
from persist.client.shard_base import ShardBase
from persist.client.snapshot import at_latest
from persist.client.timestamps import BEFORE_ALL, datetime_text, instant_of, resolve_time, retention_ms, to_datetime
from persist.core import commands as c
from persist.core.attribute import as_updates as as_attribute_updates
from persist.core.audit_log import PAGE_MAX
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import Antichain, frontier
from persist.core.ids import given_token
from persist.core.named_holds import Tag, check_tag_name
from persist.core.shard_settings import ShardSettings, history_text


@dataclass(frozen=True, slots=True)
class ShardTag:
    """A time that stays readable, at least until the instant `until`, in UTC; None: until the tag is removed.

    `Shard.tag` and `Shard.tags` return it.
    """

    name: str
    time: int
    until: datetime | None

    @classmethod
    def of(cls, name: str, tag: Tag) -> ShardTag:
        """The tag of this name as callers see it."""
        return cls(name, tag.time, None if tag.until_ms is None else to_datetime(tag.until_ms))


def tag_json(tag: ShardTag) -> dict[str, Any]:
    """The tag for JSON."""
    return {"tag": tag.name, "time": tag.time, "until": datetime_text(tag.until)}


def settings_json(settings: ShardSettings) -> dict[str, Any]:
    """The settings for JSON, without the row policy; `history` is null if none was set yet."""
    history = history_text(settings.history_ms) if settings.version else None
    return {"history": history, "mark_every": history_text(settings.mark_every_ms), "version": settings.version}


class HistoryMethods(ShardBase):
    """The methods of `Shard` for its history."""

    def forget(self, before: int) -> Antichain:
        """Forget history before a time now, as far as readers allow. Repeating it is safe. Scope `manage`.

        `before` is the earliest time to keep; it is not beyond the latest complete one. Returns the shard's since
        afterwards. Raises InvalidUsage (no such time).
        """
        return self._send_for(c.HistoryMoved, c.ForgetHistory(frontier(before))).since

    def history(
        self, limit: int = 100, *, maintenance: bool = False, before: HistoryEntry | str | None = None
    ) -> list[HistoryEntry]:
        """The commit history: an entry for each command that changed the shard, newest first. Scope `read`.

        At most `limit` entries, in [1, 1000], before the entry or the place `before` (None: the newest one); fewer only
        if there are no more. With `maintenance` also merges, collections, and forgetting by age. Entries are kept as
        long as the shard's history (`configure`), and without history as long as its log. Retries that were answered as
        before share one entry. Readers that move since leave none.

        Raises: InvalidUsage (no such limit or place), Corruption (a blob of the history is damaged or missing: give a
            place before or after it, or fewer entries).
        """
        place = read_place("before", before.place if isinstance(before, HistoryEntry) else before)
        checked("maintenance", maintenance, bool)
        check_int("limit", limit, 1, PAGE_MAX)
        entries = read_entries(self._transport, self.name, place, limit, maintenance)
        return [to_history_entry(entry) for entry in entries]

    def time_at(self, when: datetime, *, wait_s: float = 0.0) -> Antichain:
        """The upper that the shard had at a wall clock: every time before it was complete. Repeating it is safe.

        `[0]`: nothing was written by then; `[]`: the shard was closed. The answer never changes, and is as exact as the
        committers' clocks (11 s, or they are ignored). `when` has a zone, and is rounded down to the shard's grid (a
        second, unless `configure` says otherwise); if it is in the future, the call waits for up to `wait_s` seconds.

        Raises: InvalidUsage (no zone), NotReadable (it is not known, or was forgotten), Unavailable (it is in the
            future, or the clocks of this process and of the blob store do not agree).
        """
        checked("when", when, datetime)
        checked_wait("wait_s", wait_s)
        return resolve_time(self._transport, self.name, when, wait_s, self._settings.read.retry_s).upper

    def timestamp_of(self, time: int) -> datetime | None:
        """The first wall clock that names this time or a later one, in UTC: a snapshot as of it shows the time.

        Returns: None if it is not known: no clock could be trusted then.
        Raises: InvalidUsage (the time is not complete), NotReadable (it was forgotten).
        """
        checked("time", time, int)
        return instant_of(self._transport, self.name, time, self._settings.write.retry_s)

    def changes(
        self,
        start: int | datetime,
        end: int | datetime | None = None,
        *,
        other: HistoryMethods | None = None,
        num_splits: int = 1,
        columns: Sequence[str] | None = None,
        wait_s: float = 60.0,
    ) -> Changes:
        """The difference between two times: the multiplicity of each row at `end` minus that at `start`.

        Args:
            start: the time to compare with, or a wall clock with its zone; -1 is before the first write.
            end: the same; None is the latest complete time. An `end` before `start` gives the reverse difference.
            other: the shard whose contents at `end` are compared, of equal columns and opened by the same client; None
                is this one.
            num_splits: as `snapshot` says.
            columns: those to return. Rows that differ only in other columns are still different rows.
            wait_s: seconds to wait until the times are complete.
        Raises: InvalidUsage (no such time or column, or another schema), and what `snapshot` raises.
        """
        check_int("num_splits", num_splits, 1, SPLITS_MAX)
        checked_wait("wait_s", wait_s)
        if start is None:
            raise InvalidUsage("start is None; it must be a time, or a wall clock with its zone")
        if other is not None and not isinstance(other, HistoryMethods):
            raise InvalidUsage(f"other is {shown(other)}; it must be a Shard")
        known = self._current_schema()[0]
        request = DiffRequest(num_splits, None if columns is None else names("columns", columns), wait_s, known=known)
        later, read = other or self, self._settings.read
        if later._transport.inner is not self._transport.inner:
            raise InvalidUsage(f"shards {self.name!r} and {later.name!r} were opened by two clients; open both by one")
        limits = (wait_s, read.retry_s)
        first = NamedTime.of("start", start, self._transport, self.name, limits, BEFORE_ALL)
        last = NamedTime.of("end", end, later._transport, later.name, limits, BEFORE_ALL)
        if later._transport.shard == self._transport.shard:
            changes = changes_of(self._transport, self.name, first, last, request, read)
        else:
            one, two = (self._transport, self.name, first), (later._transport, later.name, last)
            changes = changes_between(one, two, request, read)
        return replace(changes, start_timestamp=first.timestamp, end_timestamp=last.timestamp)

    def restore(
        self,
        as_of: int | datetime,
        *,
        token: str | None = None,
        retries: int = 0,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Restored:
        """Restore the contents of an earlier time by one commit at the next time, which readers see as any other.

        The history between the two times stays readable, so another restore undoes it. Memory is bounded, whatever the
        size of the difference. Columns that were added since have their default, or null, in restored rows. Attributes
        have no history, so they keep their values: positions and batch numbers that are kept with the rows go back only
        if you set them by `attributes`, in the same commit.

        Args:
            as_of: the time, or a wall clock with its zone.
            token: as `insert` says; it stands for this restore to this time, with these attributes.
            retries: how often to continue if others write meanwhile, up to 1,000. Their writes are reverted, too.
            attributes: as `insert` says. They change even if no row differs.
            info: as `insert` says.
        Returns: the result: see `Restored`. If nothing differs, no row is written.
        Raises: UpperMismatch (others wrote meanwhile, or the shard is closed, or no time is left: nothing was
            changed), InvalidUsage (no such time, or it is not complete, or the multiplicity of a row differs by more
            than 2**32), NotReadable (it was forgotten), AttributeMismatch (the condition of an attribute failed:
            nothing was changed), TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not happen),
            Indeterminate (it may have happened: repeat it with the token).
        """
        if as_of is None:
            raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
        own, info_json = given_token(token), _checked(retries, info)
        settings, changes = self._settings, as_attribute_updates(attributes)
        to = NamedTime.of("as_of", as_of, self._transport, self.name, (0.0, settings.read.retry_s))
        restore = RestoreOperation.of(self._transport, self.name, settings, to, info=info_json, attributes=changes)
        return restore.run(own, retries)

    def truncate(  # noqa: PLR0913 - each argument by its name
        self,
        before: int | datetime,
        *,
        mode: Literal["retract", "drop"] = "retract",
        dry_run: bool = False,
        token: str | None = None,
        retries: int = 0,
        info: Info | None = None,
        force: bool = False,
    ) -> Truncated:
        """Remove the rows that were there before a time and still are, by one commit at the next time.

        Readers see ordinary retractions. Each row is removed min(multiplicity before the cut, multiplicity now) times,
        so none becomes negative. Earlier times stay readable as long as the shard's history says, so `restore` undoes
        it. Memory is bounded. A repeated truncation to the same time or an earlier one changes nothing.

        In a shard that is fed by `append`, only its writer chooses times. A truncation there is a drop, which takes
        effect at the next time that the writer completes; until then the result is `pending`. It is withdrawn if the
        writer retracts rows at that time, or rows are erased.

        Args:
            before: the cut: a time in `(since, upper]`, or a wall clock with its zone. Rows of earlier times are
                removed.
            mode: "retract" reads the rows, and writes their retractions. "drop" removes the rows that were written at
                times before the cut, by metadata alone: it reads and writes no row, and concurrent writers do not
                matter.
            dry_run: report how many rows would be removed, and change nothing. It reads them, in either mode.
            token: as `insert` says; it stands for the truncation before this time, in this mode.
            retries: how often to continue if others retract rows meanwhile, up to 1,000. Each computes everything anew.
                Rows that they add do not matter.
            info: as `insert` says.
            force: in a shard that is fed by `append`, take the next time at once. What is appended there is refused.
        Returns: what was removed: see `Truncated`.
        Raises: UpperMismatch (others retracted rows meanwhile, or the shard is closed, or no time is left: nothing was
            changed), InvalidUsage (no such time, or it is beyond the upper, or a row has a multiplicity beyond 2**32;
            for a drop: a retraction was written at the cut or later, an erasure of rows is pending, or too many drops
            are pending), Conflict (the drop of this token was withdrawn before it became effective), NotReadable (the
            time before the cut was forgotten), TokenReused, OutcomeForgotten, Unavailable or Overloaded (it did not
            happen), Indeterminate (it may have happened: repeat it).
        """
        if before is None:
            raise InvalidUsage("before is None; it must be a time, or a wall clock with its zone")
        checked("dry_run", dry_run, bool)
        checked("force", force, bool)
        is_drop = mode_of(mode) == "drop"
        own, settings, info_json = given_token(token), self._settings, _checked(retries, info)
        cut = restore_and_truncate.cut_of(self._transport, self.name, before, settings.read.retry_s)
        truncation = TruncateOperation.of(self._transport, self.name, settings, cut, info=info_json)
        if is_drop:
            return truncation.as_drop().run(own, dry_run=dry_run, force=force)
        return truncation.run(own, retries, dry_run=dry_run, force=force)

    def tag(self, name: str, at: int | datetime | None = None, *, keep: timedelta | str | None = None) -> ShardTag:
        """Keep one time readable under a name, even when since passes it. Repeating it is safe. Scope `manage`.

        Args:
            name: up to 128 of `A-Z a-z 0-9 . _ -`, not `-` first, nor `.` or `..` alone. An existing tag keeps its
                time.
            at: a time that can be read; None is the latest complete one. A datetime with its zone is a wall clock.
            keep: for how long from now on, such as `400d`; None, or `forever`, is until it is removed.
        Returns: the tag: its `time`, and `until` when it is kept at least (None: for ever).
        Raises: InvalidUsage (no such name, time or age, or the shard has 1,000 tags), NotReadable (the time was
            forgotten), Conflict (the tag is at another time), Unavailable (no clock can be trusted for `keep`).
        """
        limits = (0.0, self._settings.read.retry_s)
        chosen = NamedTime.of("at", at, self._transport, self.name, limits).time
        keep_ms = None if keep is None else retention_ms(keep, "keep", takes_none=False)
        check_tag_name(name)

        def set_at(time: int) -> ShardTag:
            command = c.SetTag(name, frontier(time).element or 0, keep_ms)
            return ShardTag.of(name, self._send_for(c.TagsAre, command).tags[name])

        return at_latest(self._transport, self.name, set_at) if chosen is None else set_at(chosen)

    def tags(self) -> dict[str, ShardTag]:
        """The tags of the shard by name, as of now. Raises what every call may."""
        tags = self._details().tags
        return {name: ShardTag.of(name, tags[name]) for name in sorted(tags)}

    def untag(self, name: str) -> bool:
        """Remove a tag: its time may be forgotten. Repeating it is safe. Scope `manage`.

        Returns: whether there was such a tag.
        Raises: InvalidUsage (no tag can have this name).
        """
        return self._send_for(c.TagRemoved, c.RemoveTag(check_tag_name(name))).tag is not None


def _checked(retries: int, info: Info | None) -> bytes:
    """The encoded `info`. Raises InvalidUsage if an argument is invalid."""
    check_int("retries", retries, 0, RETRIES_MAX)
    return info_bytes("info", info)
