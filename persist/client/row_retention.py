"""Row retention policies: how callers set them, what they do, the tag ladder, and the loop that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from persist.client import column_retention
from persist.client.arguments import checked, names
from persist.client.column_retention import COLUMN, TRIES, ColumnRetention, ColumnRun, run_by_column
from persist.client.commit_info import info_bytes
from persist.client.contents_diff import NamedTime
from persist.client.embedded import EmbeddedTransport, Maintain
from persist.client.history_api import HistoryMethods
from persist.client.idempotency import after_commit, send_for
from persist.client.lease_pool import LeasePool
from persist.client.optimistic_loop import read_facts
from persist.client.read_leases import HandleSettings
from persist.client.restore_and_truncate import Truncated, TruncateOperation
from persist.client.timestamps import instant_ms, period_ms, record_json, to_datetime
from persist.client.transport import OneShard, Transport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core import record, retention_plan
from persist.core.clock_index import point_at
from persist.core.errors import Conflict, InvalidUsage, NotReadable, Unavailable, shown
from persist.core.retention_plan import Facts, has_to_look, outlived_rungs, plan, step_ms, wanted_cuts
from persist.core.shard_settings import DROP, RETRACT, Ladder, RowPolicy, Rung, bytes_of, cut_every_of, history_text

# The tag ladder: tags for the last so many hours, days and months, in UTC. Pure.
#
# `hourly-2026-11-23T04Z` is the state at 04:00. An hour in which nothing was written has no tag of its own.


# Of each rung: the format of its tags, and the start of the period that contains an instant.
_RUNGS: Mapping[str, tuple[str, Callable[[datetime], datetime]]] = {
    "hourly": ("%Y-%m-%dT%HZ", lambda at: at.replace(minute=0, second=0, microsecond=0)),
    "daily": ("%Y-%m-%d", lambda at: at.replace(hour=0, minute=0, second=0, microsecond=0)),
    "monthly": ("%Y-%m", lambda at: at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)),
}


def due_rungs(facts: Facts, now_ms: int) -> tuple[Rung, ...]:
    """The tags to set at this instant: of each rung, if something was written since its newest tag."""
    return tuple(rung for rung in _current_rungs(facts, now_ms) if rung.tag not in facts.tags)


def _current_rungs(facts: Facts, now_ms: int) -> Iterator[Rung]:
    ladder = Ladder() if facts.policy is None else facts.policy.tags
    latest = (facts.upper.element or 0) - 1
    for rung, (form, period_start) in _RUNGS.items():
        own = retention_plan.own_rungs(facts.tags, rung)
        if not getattr(ladder, rung) or latest < 0 or facts.since.is_empty:
            continue
        if own and facts.tags[own[-1]].time == latest:  # nothing was written since its newest tag
            continue
        at = period_start(to_datetime(now_ms))
        yield Rung(f"{rung}-{at.strftime(form)}", instant_ms("now", at))


FIELDS = ("age", "bytes", "rows", "cut_every", "consumers", "consumers_max_age", "tags", "mode")
OF_COLUMN = ("column", "column_age", "column_unit")
RUNGS = ("hourly", "daily", "monthly")
NO_CLOCK = "the clocks of the server and of the blob store do not agree, or cannot be compared"


@dataclass(frozen=True)
class RowRetention:
    """The row policy of a shard (None: it keeps all rows) and its progress. `Shard.retention` returns it.

    `policy` is a dict as `Shard.retain` takes it. `version` is that of the settings. `cuts` is the number of instants
    at which the policy can cut. `done_before` is the time before which it has done all that it asks for, `done_at` when
    that was, `removed` how many rows were removed then (None: not known). `overran` counts truncations that passed a
    consumer. `due` is the time before which it truncates next, now (None: nothing is due), `next` when there may be
    something to do (None: not before the shard moves). `held_by` has a sentence for everything that holds it back.
    `rows` exist now (None: not known), `bytes` are stored, with all history. The policy last checked its column at
    `column_at`, and removed `column_removed` rows then; `column_due`: it checks again at the next turn.
    """

    policy: dict[str, Any] | None
    version: int
    cuts: int
    done_before: int
    done_at: datetime | None
    removed: int | None
    overran: int
    due: int | None
    next: datetime | None
    held_by: tuple[str, ...]
    rows: int | None
    bytes: int
    column_at: datetime | None
    column_removed: int | None
    column_due: bool

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; wall clocks in RFC 3339."""
        return record_json(self)


@dataclass(frozen=True)
class RetentionRun:
    """The result of one run of a policy. `Shard.run_retention` returns it.

    `truncated` is what was removed, or would be (None: nothing was due); `why` the limits that asked for it; `passed`
    the consumers that it has passed, as they were behind for too long; `held_by` what holds back the rest. `cuts` is
    how many were taken. `at` is the clock that decided (None: the shard has no policy). `by_column` is what was removed
    by the policy's column, in a commit of its own (None: that was not due).
    """

    truncated: Truncated | None
    why: tuple[str, ...]
    passed: tuple[str, ...]
    held_by: tuple[str, ...]
    cuts: int
    at: datetime | None
    by_column: ColumnRun | None = None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the clock in RFC 3339."""
        return record_json(self)


def read_policy(wanted: Mapping[str, Any]) -> RowPolicy:
    """Parse a policy, such as `{"age": "90d", "consumers": ["billing"]}`. Raises InvalidUsage."""
    if unknown := sorted(map(shown, wanted.keys() - {*FIELDS, *OF_COLUMN})):
        raise InvalidUsage(f"a policy of rows has no {unknown[0]}; it has {', '.join((*FIELDS, *OF_COLUMN))}")
    limits = {name: value for name, value in wanted.items() if value is not None}
    age_ms, rows = _age("age", limits.get("age")), limits.get("rows")
    column, column_age_ms = limits.get("column"), _age("column_age", limits.get("column_age"))
    checked("rows", rows, int, type(None))
    checked("column", column, str, type(None))
    checked("mode", mode := limits.get("mode", RETRACT), str)
    checked("column_unit", unit := limits.get("column_unit", ""), str)
    consumers_max_age_ms = _age("consumers_max_age", limits.get("consumers_max_age"))
    policy = RowPolicy(
        age_ms,
        None if "bytes" not in limits else bytes_of(limits["bytes"]),
        rows,
        _age("cut_every", limits.get("cut_every")) or cut_every_of(age_ms or column_age_ms, consumers_max_age_ms),
        names("consumers", limits.get("consumers", ())),
        consumers_max_age_ms,
        _ladder(limits.get("tags", {})),
        column,
        column_age_ms,
        unit,
        mode,
    )
    policy.check()
    return policy


def policy_json(policy: RowPolicy) -> dict[str, Any]:
    """The policy as `read_policy` reads it; limits that it does not have are left out."""
    limits = {
        "age": None if policy.age_ms is None else history_text(policy.age_ms),
        "bytes": policy.bytes_max,
        "rows": policy.rows_max,
        "cut_every": history_text(policy.cut_every_ms) if policy.takes_rows else None,
        "consumers": list(policy.consumers) or None,
        "tags": {rung: count for rung in RUNGS if (count := getattr(policy.tags, rung))} or None,
        "consumers_max_age": None if policy.consumers_max_age_ms is None else history_text(policy.consumers_max_age_ms),
        "column": policy.column,
        "column_age": None if policy.column_age_ms is None else history_text(policy.column_age_ms),
        "column_unit": policy.column_unit or None,
        "mode": policy.mode if policy.mode == DROP else None,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _ladder(tags: object) -> Ladder:
    if not isinstance(tags, Mapping) or set(tags) - set(RUNGS):
        raise InvalidUsage(f"tags is {shown(tags)}; it must be a dict such as {{'hourly': 24}}, of {', '.join(RUNGS)}")
    for rung in tags:
        checked(rung, tags[rung], int)
    return Ladder(**tags)


def _age(what: str, age: object) -> int | None:
    return None if age is None else period_ms(age, what)


def next_turn_ms(facts: Facts, now_ms: int) -> int | None:
    """When there may be something to do for a policy, if nothing moves the shard; None: not before it moves."""
    next_hour_ms = (now_ms // HOUR_MS + 1) * HOUR_MS if any(_current_rungs(facts, now_ms)) else None  # for tags
    instants = (retention_plan.next_ms(facts, now_ms), next_hour_ms, retention_plan.next_look_ms(facts, now_ms))
    return min((at_ms for at_ms in instants if at_ms is not None), default=None)


def _waits(facts: Facts, now_ms: int) -> tuple[str, ...]:
    """The notes on a policy of a shard that is fed by `append`, from the moment when it is set."""
    if facts.erasing_ms:
        minutes = max(0, now_ms - facts.erasing_ms) // 60_000
        return (f"an erasure, asked for {minutes} minutes ago, waits for the next commit of the appending writer",)
    if facts.pending:
        return (f"rows from before {facts.pending} go with the next commit of the appending writer",)
    if facts.policy is not None and facts.policy.cuts and facts.done.appended:
        return ("the shard is fed by append: rows go by drops, each with the next commit of the writer",)
    return ()


def run_retention(
    transport: OneShard, name: str, settings: HandleSettings, *, dry_run: bool = False, by_hand: bool = True
) -> RetentionRun:
    """Take the cuts that are due, and remove the rows that the policy selects now. Repeating it is safe.

    It uses the clock of the committer if the blob store agrees with it: a single clock never removes rows. `by_hand`:
    the column is checked even if that was done less than `cut_every` ago. Raises UpperMismatch (others wrote meanwhile
    each time), Conflict (the policy was changed meanwhile), Unavailable (also: no clock can be trusted), and what every
    call may.
    """
    retry_s, cuts = settings.write.retry_s, 0
    answer = read_facts(transport, name, retry_s)
    if answer.facts.policy is None:
        return RetentionRun(None, (), (), (), 0, None)
    now_ms = _checked_ms(name, answer)
    if dry_run:
        answer = _first_run(transport, name, answer.facts, now_ms, retry_s)
    else:
        wanted, rungs = tuple(wanted_cuts(answer.facts, now_ms)), due_rungs(answer.facts, now_ms)
        if wanted or rungs or outlived_rungs(answer.facts.policy, answer.facts.tags):
            cuts = send_for(c.CutsTaken, transport, name, c.TakeCuts(wanted, rungs), retry_s).count
    if cuts:
        answer = read_facts(transport, name, retry_s)
        now_ms = _checked_ms(name, answer)
    planned, done = plan(answer.facts, now_ms), None
    due = planned.due
    if due is not None:
        info, passes = info_bytes("info", {"retention": list(due.why)}), c.PassedCut(due.cut_ms, bool(due.passes))
        truncation = TruncateOperation.of(transport, name, settings, NamedTime(due.cut.upper), info=info, passes=passes)
        result: Truncated | tuple[str, ...]
        try:
            if answer.facts.drops:
                result = column_retention.dropped(truncation.as_drop(), dry_run=dry_run)
            else:
                result = truncation.run(None, TRIES, dry_run=dry_run)
        except (InvalidUsage, NotReadable):  # the shard is fed by append by now, or another run has come that far
            later = plan(read_facts(transport, name, retry_s).facts, now_ms)
            if later.due == due:
                raise
            result = later.held_by
        if isinstance(result, tuple):
            held_by = tuple(dict.fromkeys((*planned.held_by, *result)))
            return RetentionRun(None, (), (), held_by, cuts, to_datetime(now_ms))
        done = result
        if done.changed:
            answer = read_facts(transport, name, retry_s)
            _checked_ms(name, answer)
    by_column = run_by_column(transport, name, settings, answer, dry_run=dry_run, by_hand=by_hand)
    why, passed = ((), ()) if due is None else (due.why, due.passes)
    if by_column.done is not None and by_column.done.removed:
        why = (*why, COLUMN)
    passed = tuple(dict.fromkeys((*passed, *by_column.passes)))
    held_by = tuple(dict.fromkeys((*planned.held_by, *by_column.held_by)))
    return RetentionRun(done, why, passed, held_by, cuts, to_datetime(now_ms), by_column.done)


def _guard(transport: OneShard, name: str, policy: RowPolicy, settings: HandleSettings) -> None:
    """Raises InvalidUsage if the policy would remove more than half of the rows as soon as it is set.

    A row that is removed both by a cut and by the column counts twice.
    """
    answer = read_facts(transport, name, settings.write.retry_s)
    now_ms, facts = _checked_ms(name, answer), answer.facts
    alone = record.replace(facts, policy=record.replace(policy, consumers=(), consumers_max_age_ms=None))
    removed = _cut_at_once(transport, name, alone, now_ms, settings)
    if policy.column is not None and facts.upper.element and retention_plan.blocked_by_column(facts) is None:
        outcome = ColumnRetention.by(transport, name, settings, alone, now_ms).run(dry_run=True)
        removed += 0 if outcome.done is None else outcome.done.removed
    rows = answer.rows
    if removed and (rows is None or 2 * removed > rows):
        raise InvalidUsage(
            f"this policy would remove {removed} of the {'' if rows is None else f'{rows} '}rows of "
            f"shard {name!r} at once; give confirm if that is intended",
            removed=removed,
            rows=rows,
        )


def _cut_at_once(transport: OneShard, name: str, facts: Facts, now_ms: int, settings: HandleSettings) -> int:
    """How many rows the first run would remove by a cut."""
    due = plan(_first_run(transport, name, facts, now_ms, settings.write.retry_s).facts, now_ms).due
    if due is None or facts.rows == 0:
        return 0
    truncation = TruncateOperation.of(transport, name, settings, NamedTime(due.cut.upper))
    try:
        if facts.drops:
            return truncation.as_drop().run(None, dry_run=True).removed or 0
        return truncation.run(None, 0, dry_run=True).removed or 0
    except NotReadable:  # what was forgotten cannot be cut
        return 0
    except InvalidUsage:
        if not facts.drops:
            raise
        return 0  # a drop is refused


def _first_run(transport: OneShard, name: str, facts: Facts, now_ms: int, retry_s: float) -> c.RetentionIs:
    """The facts for a run that has taken the cuts that are due now. Takes none."""
    return read_facts(transport, name, retry_s, c.ReadRetention(facts.policy, tuple(wanted_cuts(facts, now_ms))))


def _checked_ms(name: str, answer: c.RetentionIs) -> int:
    if answer.checked_ms is None:
        raise Unavailable(f"{NO_CLOCK}, so no rows of shard {name!r} are removed by age; set the clock, or retry")
    return answer.checked_ms


class RetentionMethods(HistoryMethods):
    """The methods of `Shard` for its row policy."""

    def retention(self) -> RowRetention:
        """The row policy of the shard, and what holds it back. Raises what every call may."""
        transport, name = self._transport, self.name
        answer = read_facts(transport, name, self._settings.write.retry_s)
        facts, done = answer.facts, answer.facts.done
        now_ms = transport.clock.now_ms() if answer.checked_ms is None else answer.checked_ms
        planned, looked, following = plan(facts, now_ms), done.looked, next_turn_ms(facts, now_ms)
        clock_notes = () if answer.checked_ms is not None or facts.policy is None else (NO_CLOCK,)
        held_by = (
            *clock_notes,
            *planned.held_by,
            *column_retention.held_by_column(transport, name, facts),
            *_waits(facts, now_ms),
        )
        due = planned.due
        if (
            due is not None
            and facts.drops
            and (reason := column_retention.refused_drop(transport, name, due.cut.upper)) is not None
        ):
            due, held_by = None, (*held_by, reason)
        return RowRetention(
            None if facts.policy is None else policy_json(facts.policy),
            facts.version,
            len(facts.cuts),
            done.upper,
            to_datetime(done.at_ms) if done.at_ms else None,
            done.removed,
            done.overran,
            None if due is None else due.cut.upper,
            None if following is None else to_datetime(following),
            tuple(dict.fromkeys(held_by)),
            answer.rows,
            facts.stored_bytes,
            to_datetime(looked.at_ms) if looked.at_ms else None,
            looked.removed if looked.at_ms else None,
            has_to_look(facts, now_ms),
        )

    def retain(
        self, policy: Mapping[str, Any] | None, *, confirm: bool = False, expected_version: int | None = None
    ) -> RowRetention:
        """Set which rows the shard keeps. Maintenance removes the others, by truncations. Needs the scope `manage`.

        Args:
            policy: a dict with at least one of `age` (older rows are removed, as `90d`), `bytes` (about so many are
                kept, as `500GiB` or a number), `rows` (at least so many are kept), `column` and `tags` (a ladder: the
                number of tags of each kind to keep, as `{"hourly": 24, "daily": 31, "monthly": 24}`). `cut_every` is
                the granularity (a hundredth of the age, or an hour). With `consumers`, names of critical readers,
                nothing is removed that one of them has not passed, except what is older than `consumers_max_age`.
                `column` comes with `column_age`: rows whose wall clock in that column is older are removed, whenever
                they were written. For a column of integers, `column_unit` is their unit: s, ms, us or ns. `mode` "drop"
                truncates without reading the rows, as `truncate` does, and waits if a drop is refused. None: all rows
                are kept.
            confirm: also if the policy removes more than half of the rows as soon as it is set.
            expected_version: the version that the settings must have now; None: any.
        Returns: the policy afterwards.
        Raises: InvalidUsage (no such policy; or it would remove more than half at once), Conflict (others changed the
            settings), Unavailable (no clock can be trusted, to see what would be removed).
        """
        checked("confirm", confirm, bool)
        checked("expected_version", expected_version, int, type(None))
        if policy is not None and not isinstance(policy, Mapping):
            raise InvalidUsage(f"policy is {shown(policy)}; it must be a dict such as {{'age': '90d'}}, or None")
        return self._set_policy(None if policy is None else read_policy(policy), confirm, expected_version)

    def _set_policy(self, policy: RowPolicy | None, confirm: bool, expected_version: int | None) -> RowRetention:
        transport, name, settings = self._transport, self.name, self._settings
        now = self._details().settings
        if not now.version:
            raise InvalidUsage(f"shard {name!r} has no settings yet: say how much history it is to keep first")
        version = now.version if expected_version is None else expected_version
        if (now.version, now.rows) == (version + 1, policy):  # a repetition that has landed, as for settings
            return self.retention()
        if version != now.version:
            raise Conflict(
                f"the settings of shard {name!r} have version {now.version}, not the expected {version}; read them "
                "anew",
                expected=version,
                actual=now.version,
            )
        if policy is not None and policy.column is not None:
            column_retention.check_column(transport, name, policy.column, policy.column_unit, self._current_schema()[0])
        if policy is not None and not confirm:
            _guard(transport, name, policy, settings)
        self._send(c.SetSettings(version, now.history_ms, now.mark_every_ms, policy))
        with after_commit(f"the policy of shard {name!r}"):
            return self.retention()

    def run_retention(self, *, dry_run: bool = False) -> RetentionRun:
        """Run the policy now. Maintenance runs it anyway. Repeating it is safe. Scope `manage` or `maintain`.

        `dry_run`: only report what would be removed, by the cuts that were taken.

        Raises: UpperMismatch (others wrote meanwhile; repeat it), Conflict (the policy was changed meanwhile; repeat
            it), Unavailable (no clock can be trusted).
        """
        checked("dry_run", dry_run, bool)
        return run_retention(self._transport, self.name, self._settings, dry_run=dry_run)


AGAIN_S = 1.0  # the shortest pause between two checks of a shard
HOUR_MS = 3_600_000
KNOWN_MAX = 100_000  # shards whose last run is remembered


class RetentionKeeper:
    """Runs row policies, and reports when there may be something to do again.

    Whether anything is due is decided by the cached State, without a request. A wrong clock of this process only makes
    it ask too often: a checked clock decides what is removed.
    """

    def __init__(self, location: Location, transport: Transport) -> None:
        self._location = location
        self._transport = transport
        self._settings = HandleSettings()
        self._due: dict[str, float] = {}
        self._cut: dict[str, int] = {}  # the last instant that was requested: requesting it again has no effect

    def run(self, name: str) -> tuple[RetentionRun | None, float | None]:
        """The result of a run (None: nothing was due), and the seconds until the next check if nothing moves.

        None: not before the shard moves. Raises what `run_retention` does.
        """
        state, now_s = self._location.machine(name).state(), self._location.clock.monotonic()
        policy, now_ms = state.settings.rows, self._location.clock.now_ms()
        if policy is None or state.is_closed:
            return None, None
        facts = retention_plan.facts_of(state)
        if not self._may_be_due(name, facts, now_ms):
            at_ms = next_turn_ms(facts, now_ms)
            return None, None if at_ms is None else max(AGAIN_S, (at_ms - now_ms) / 1000)
        if (wait_s := self._due.get(name, now_s) - now_s) > 0:
            return None, wait_s
        if len(self._due) >= KNOWN_MAX:
            self._due.clear()
            self._cut.clear()
        self._due[name] = now_s + step_ms(policy) / 1000
        run = run_retention(OneShard(self._transport, state.shard_id), name, self._settings, by_hand=False)
        if run.at is not None:  # by the checked clock, which this process's own clock may be ahead of
            self._cut[name] = point_at(instant_ms("at", run.at), min(policy.cut_every_ms, HOUR_MS))
        return run, step_ms(policy) / 1000

    def _may_be_due(self, name: str, facts: Facts, now_ms: int) -> bool:
        instants = [*wanted_cuts(facts, now_ms), *(rung.at_ms for rung in due_rungs(facts, now_ms))]
        if max(instants, default=0) > self._cut.get(name, 0):
            return True
        due = plan(facts, now_ms).due
        if due is not None and not (
            facts.drops and column_retention.is_refused(self._location.machine(name).state(), due.cut.upper)
        ):
            return True
        return bool(outlived_rungs(facts.policy, facts.tags)) or has_to_look(facts, now_ms)


def maintained_transport(location: Location, maintain: Maintain) -> EmbeddedTransport:
    """A transport of an embedded program whose small reads share leases.

    Its background work runs the policies of the shards to which it commits, if its location collects: then there may
    be no other process to do it.
    """
    if location.settings.collects:  # by a separate transport: only its users may keep the returned one alive
        location.retain_with(RetentionKeeper(location, EmbeddedTransport(location)).run)
    transport = EmbeddedTransport(location, maintain)
    transport.leases = LeasePool(location.clock)
    return transport
