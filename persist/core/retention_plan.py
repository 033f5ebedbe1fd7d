"""The next step of a row policy: the due cut, the next look by a column, and what holds them back. Pure.

The due cut is the latest of the cuts after which the limit is still satisfied (the least upper bound of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from persist.core.batch import diff_sum_of
from persist.core.clock_index import point_after, point_at
from persist.core.erasure_progress import pending_erasures
from persist.core.frontier import Antichain
from persist.core.ids import critical_reader_id_of
from persist.core.named_holds import Tag
from persist.core.record import Record, asdict
from persist.core.shard_settings import DROP, KeptCut, Retention, RowPolicy
from persist.core.state import State
from persist.core.truncations_and_drops import Truncation

STEP_MS_MIN = 1_000
STEP_MS_MAX = 600_000


class Facts(Record, frozen=True):
    """The inputs of a plan. `rows` is the present number (None: unknown); `stored_rows`, `stored_bytes` with history.

    `holds` are the positions of the policy's consumers; those that are not registered are left out. `tags` are those
    that its ladder has set. `erasing_ms` is when the oldest pending erasure was requested (0: there is none).
    """

    policy: RowPolicy | None
    version: int
    since: Antichain
    upper: Antichain
    cuts: Mapping[int, KeptCut]
    done: Retention
    truncated: Truncation
    rows: int | None
    stored_rows: int
    stored_bytes: int
    holds: Mapping[str, Antichain]
    tags: Mapping[str, Tag] = {}
    erasing_ms: int = 0

    @property
    def drops(self) -> bool:
        """Whether the policy truncates by drops: always in a shard fed by `append`, where it must not take a time."""
        return self.policy is not None and (self.policy.mode == DROP or self.done.appended)

    @property
    def pending(self) -> int:
        """The cut of a pending drop, which becomes effective with the writer's next commit; 0: there is none."""
        last = self.truncated
        return last.before if last.before and not last.wrote and not last.seen and self.upper.less_equal(last.at) else 0

    @property
    def came(self) -> int | None:
        """The present rows plus those that truncations removed."""
        return None if self.rows is None else self.rows + self.truncated.removed

    @property
    def ahead(self) -> list[tuple[int, KeptCut]]:
        """The cuts that the policy has not reached yet, oldest first, without those up to the last truncation."""
        done = max(self.done.upper, self.truncated.before)
        return [(at_ms, cut) for at_ms, cut in sorted(self.cuts.items()) if cut.upper > done]

    @property
    def newest(self) -> tuple[int, int]:
        """Instant and upper of the newest cut, also if the policy is done with it."""
        known = [(self.done.cut_ms, self.done.upper), *((at_ms, cut.upper) for at_ms, cut in self.cuts.items())]
        return max(known)


class Due(Record, frozen=True):
    """The cut by which to truncate now, the reasons, and the consumers that it passes."""

    cut_ms: int
    cut: KeptCut
    why: tuple[str, ...]
    passes: tuple[str, ...] = ()


class RetentionPlan(Record, frozen=True):
    """The due cut, and sentences that say what holds back a later one."""

    due: Due | None
    held_by: tuple[str, ...] = ()


def facts_of(state: State) -> Facts:
    policy, trace = state.settings.rows, state.trace
    known = {
        name: state.critical_readers.get(critical_reader_id_of(name)) for name in (policy.consumers if policy else ())
    }
    return Facts(
        policy,
        state.settings.version,
        state.since,
        state.upper,
        state.cuts,
        state.retention,
        state.truncated,
        diff_sum_of(trace.parts()),
        trace.rows,
        sum(batch.size for batch in trace.batches),
        {name: reader.since for name, reader in known.items() if reader is not None},
        {name: tag for name, tag in state.tags.items() if tag.laddered},
        min((one.requested_ms for one in pending_erasures(state).values()), default=0),
    )


def rows_there(state: State) -> int | None:
    """The number of rows at the latest time. None: unknown.

    Dropped rows are still counted in the State until their parts are removed.
    """
    last = state.truncated
    may_count_more = last.before > 0 and not last.wrote  # the last truncation was a drop, or found nothing
    if state.drops or (may_count_more and any(part.time_min < last.before for part in state.trace.parts())):
        return None
    return diff_sum_of(state.trace.parts())


def rows_before(state: State, upper: int) -> int | None:
    """The rows written before a time, as in `KeptCut.rows`. A batch across it counts as before."""
    batches = (batch for batch in state.trace.batches if batch.desc.lower >= Antichain(upper))
    later = diff_sum_of(part for batch in batches for part in batch.parts())
    total = facts_of(state).came
    return None if later is None or total is None else total - later


def plan(facts: Facts, now_ms: int) -> RetentionPlan:
    """What the policy does at this instant. Act on it only if `now_ms` is from a checked clock."""
    policy = facts.policy
    if policy is None:
        return RetentionPlan(None)
    wanted, why = _wanted(facts, policy, now_ms)
    if wanted is None:
        return RetentionPlan(None)
    if (reason := blocked(facts)) is not None:
        return RetentionPlan(None, (reason,))
    last_ms, last = wanted
    held_by = tuple(_told(facts, name, last.upper) for name in behind(facts, last.upper))
    for at_ms, cut in reversed([mark for mark in facts.ahead if mark[0] <= last_ms]):
        passes = behind(facts, cut.upper)
        max_age_ms = policy.consumers_max_age_ms
        if not passes or (max_age_ms is not None and at_ms <= now_ms - max_age_ms):
            return RetentionPlan(Due(at_ms, cut, why, passes), held_by)
    return RetentionPlan(None, held_by)


def blocked(facts: Facts) -> str | None:
    """Why no row can be removed now, whatever the policy; None: rows can be removed."""
    if facts.upper.element is None or facts.since.is_empty:
        return "the shard is closed"
    if facts.upper <= facts.since:
        return f"nothing can be read before the next write: since and upper are {facts.since}"
    return None


def blocked_by_column(facts: Facts) -> str | None:
    """As `blocked`, for a policy by a column, whose retractions take a time."""
    if facts.done.appended:
        return "the shard is fed by append, whose writer owns the times: to retract rows by a column would take one"
    return blocked(facts)


def behind(facts: Facts, time: int) -> tuple[str, ...]:
    """The consumers that have not read everything before the time."""
    names = () if facts.policy is None else facts.policy.consumers
    holds = {name: facts.holds.get(name) for name in names}
    return tuple(
        name for name, hold in holds.items() if hold is None or (hold.element is not None and hold.element < time)
    )


def wanted_cuts(facts: Facts, now_ms: int) -> Iterator[int]:
    """The instants for which cuts should be taken now, oldest first: an old one, and the current grid point.

    Empty if nothing was written since the newest cut. The old one is included if none was taken in time: for a new
    policy, or after a pause of maintenance.
    """
    policy = facts.policy
    if policy is None or not policy.cuts or facts.upper.element is None or facts.since.is_empty:
        return
    every_ms, (newest_ms, newest_upper) = policy.cut_every_ms, facts.newest
    now_point = point_at(now_ms, every_ms)
    if now_point <= newest_ms or facts.upper.element in (0, newest_upper):
        return
    if policy.age_ms is not None and (old_ms := point_at(now_ms - policy.age_ms, every_ms)) > 0:
        known = max((at_ms for at_ms in (facts.done.cut_ms, *facts.cuts) if at_ms <= old_ms), default=0)
        if known <= old_ms - every_ms:
            yield old_ms
    yield now_point


def next_ms(facts: Facts, now_ms: int) -> int | None:
    """The next instant at which there may be something to do, if the shard does not change; None: there is none."""
    policy = facts.policy
    if policy is None or not policy.cuts or facts.upper.element is None or facts.since.is_empty:
        return None
    instants = []
    newest_ms, newest_upper = facts.newest
    if facts.upper.element not in (0, newest_upper):
        instants.append(point_after(max(newest_ms, now_ms), policy.cut_every_ms))
    ages = [age for age in (policy.age_ms, policy.consumers_max_age_ms) if age is not None]
    instants += [at_ms + age for at_ms, _ in facts.ahead for age in ages if at_ms + age > now_ms]
    return min(instants, default=None)


def step_ms(policy: RowPolicy) -> int:
    """The minimum time between two runs of the policy of a shard, in ms."""
    return max(STEP_MS_MIN, min(STEP_MS_MAX, policy.cut_every_ms // 10))


def _wanted(facts: Facts, policy: RowPolicy, now_ms: int) -> tuple[tuple[int, KeptCut] | None, tuple[str, ...]]:
    """The latest cut that a limit requires, and the limits that require one."""
    cuts: dict[str, tuple[int, KeptCut]] = {}
    ahead = facts.ahead
    if policy.age_ms is not None:
        old = [known for known in ahead if known[0] <= now_ms - policy.age_ms]
        cuts |= {"age": old[-1]} if old else {}
    if policy.rows_max is not None and facts.rows is not None and facts.rows > policy.rows_max:
        left = _leaving(facts, ahead, policy.rows_max)
        cuts |= {"rows": left} if left else {}
    if policy.bytes_max is not None and facts.stored_bytes > policy.bytes_max:
        left = _leaving(facts, ahead, -(-policy.bytes_max * facts.stored_rows // facts.stored_bytes))
        cuts |= {"bytes": left} if left else {}
    latest = max(cuts.values(), default=None, key=lambda known: known[0])
    return latest, tuple(cuts)


def _leaving(facts: Facts, ahead: list[tuple[int, KeptCut]], rows: int) -> tuple[int, KeptCut] | None:
    """The latest cut after which at least `rows` rows were written."""
    came = facts.came
    if came is None:
        return None
    return next(
        (known for known in reversed(ahead) if known[1].rows is not None and came - known[1].rows >= rows), None
    )


def _told(facts: Facts, name: str, upper: int) -> str:
    hold = facts.holds.get(name)
    if hold is None:
        return f"consumer {name!r} has no critical reader yet, so its position is unknown"
    return f"consumer {name!r} is at {hold}, and the policy would truncate before {upper}"


def own_rungs(tags: Mapping[str, Tag], rung: str) -> list[str]:
    """The tags of a rung, oldest first, which is the order of their names."""
    return sorted(name for name, tag in tags.items() if tag.laddered and name.startswith(f"{rung}-"))


def outlived_rungs(policy: RowPolicy | None, tags: Mapping[str, Tag]) -> list[str]:
    """The tags of the policy's ladder in excess of its numbers, oldest first."""
    gone: list[str] = []
    for rung, count in ({} if policy is None else asdict(policy.tags)).items():
        own = own_rungs(tags, rung)
        gone += own[: max(0, len(own) - count)]
    return gone


# When a row policy has to look for rows by its column, and what its consumers have passed. Pure.
#
# A look reads rows that may have expired. So it is due only if rows were written since the last one, if a value that it
# left may have expired, or if consumers have passed rows that waited for them.


NEVER_MS = 253_370_764_800_000  # the year 9999 begins


def passed(facts: Facts) -> int | None:
    """The time that all consumers have passed: each has read everything before it. None: there are no consumers.

    A consumer that is not registered has passed nothing.
    """
    policy = facts.policy
    if policy is None or not policy.consumers:
        return None
    upper = facts.upper.element or 0
    holds = [facts.holds.get(name) for name in policy.consumers]
    return min(0 if hold is None else upper if hold.element is None else min(hold.element, upper) for hold in holds)


def has_to_look(facts: Facts, now_ms: int, *, by_hand: bool = False) -> bool:
    """Whether a look by the column is due. `by_hand`: regardless of the minimum time between looks."""
    at_ms = next_look_ms(facts, now_ms, by_hand=by_hand)
    return at_ms is not None and at_ms <= now_ms


def next_look_ms(facts: Facts, now_ms: int, *, by_hand: bool = False) -> int | None:
    """The next instant at which to look, if the shard does not change; None: not before it changes."""
    policy, looked = facts.policy, facts.done.looked
    if policy is None or policy.column is None or not facts.upper.element or blocked_by_column(facts) is not None:
        return None
    if looked.version != facts.version:
        return now_ms
    earliest_ms = now_ms if by_hand else looked.at_ms + policy.cut_every_ms
    so_far = passed(facts)
    if facts.upper.element > looked.upper or (looked.held is not None and (so_far is None or so_far > looked.held)):
        return earliest_ms
    return None if looked.next_ms is None or looked.next_ms > NEVER_MS else max(earliest_ms, looked.next_ms)


def of_age_ms(*ages_ms: int) -> int | None:
    """The first of these instants; None: there is none, or it is beyond NEVER_MS.

    Rows often have a far value for "valid for ever", such as 9999-12-31, or the greatest number.
    """
    first = min(ages_ms, default=None)
    return None if first is None or first > NEVER_MS else first


def waiting(facts: Facts) -> tuple[str, ...]:
    """Sentences that name the consumers for which expired rows are kept."""
    policy, looked, so_far = facts.policy, facts.done.looked, passed(facts)
    if policy is None or looked.held is None or looked.version != facts.version or so_far is None:
        return ()
    sentences = []
    for name in behind(facts, looked.held + 1):
        hold = facts.holds.get(name)
        where = "has no critical reader yet" if hold is None else f"is at {hold}"
        sentences.append(
            f"consumer {name!r} {where}, and rows that have expired by column {policy.column!r} wait for it"
        )
    return tuple(sentences)
