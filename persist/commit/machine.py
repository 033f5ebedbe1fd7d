"""The committer of one shard in one process, and the only code that commits.

A commit is: the cached State -> `step` each queued command -> expire lapsed leases -> encode the state diff ->
compare-and-set at the next seqno. One compare-and-set is in flight at a time; commands that arrive meanwhile queue up
and are committed together (group commit), each with its own outcome. Any number of machines, here or elsewhere, may
work on one shard: they only meet in the compare-and-set.

A compare-and-set of unknown outcome is repeated with the same bytes at the same seqno until the store gives a definite
answer; the commit id in the log then tells whether it was ours. So an unknown outcome reaches callers only when the
store stays away for `retry_s`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consensus import ConsensusError, ConsensusIndeterminate, ConsensusUnavailable
from persist.attributes.index import AttributeIndex
from persist.attributes.storage import NodeCache, StaleIndex
from persist.commit.counters import MachineMetrics
from persist.commit.pending import Pending, inline_bytes
from persist.commit.spill import spilled
from persist.commit.system import Background, Clock
from persist.commit.upkeep import Upkeep
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core import invariants, state_diff
from persist.core.errors import (
    Corruption,
    Indeterminate,
    InlineBudget,
    InvalidUsage,
    Overloaded,
    PersistError,
    Unavailable,
    UnknownShard,
)
from persist.core.ids import IdSource, SeqNo
from persist.core.record import replace
from persist.core.state import Policy, State
from persist.core.transitions import Context, expire_lapsed, step
from persist.core.transitions.context import RETRY_SOON_S, Indexed
from persist.formats.store_errors import translate

QUEUE_MAX = 10_000
GROUP_MAX = 1_000
BACKOFF_FIRST_S = 0.004
BACKOFF_MAX_S = 1.0
LOST_FIRST_S = 0.001
LOST_MAX_S = 0.02  # a lost race is no sign of a sick store: who waits for long loses again to one who does not
RELIEFS_MAX = 4  # merges that one commit takes along


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """`retry_s` bounds how long one commit may take; `check_all` checks every invariant at every commit (tests).

    `small_merges`: whether upkeep merges small batches; not in a process of maintenance, which merges by its own plan.
    """

    retry_s: float = 30.0
    check_all: bool = False
    small_merges: bool = True


class Machine:
    """Commits commands on the shard `name`. Thread-safe."""

    def __init__(
        self,
        name: str,
        versions: Versions,
        *,
        policy: Policy,
        settings: MachineSettings,
        clock: Clock,
        ids: IdSource,
        background: Background,
        metrics: MachineMetrics | None = None,
        nodes: NodeCache | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.metrics = metrics or MachineMetrics()
        self._versions = versions
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._attributes = AttributeIndex(versions.blob, ids, nodes if nodes is not None else NodeCache())
        self._upkeep = Upkeep(
            self.apply,
            lambda: self._state,
            versions=versions,
            attributes=self._attributes,
            policy=policy,
            ids=ids,
            background=background,
            metrics=self.metrics,
            merges=settings.small_merges,
        )
        self._lock = threading.Lock()  # guards the queue and the cached State; never held across I/O
        self._refresh_lock = threading.Lock()  # so that many waiters make one read
        self._moved = threading.Condition(self._lock)
        self._queue: deque[Pending] = deque()
        self._leading = False
        self._state: State | None = None
        self._waiting = 0
        self._watchers: list[Callable[[State], None]] = []

    # --- reading

    def state(self) -> State:
        """The cached State, loaded if there is none. May be stale; `refresh` is not. UnknownShard if there is none."""
        cached = self._state
        return cached if cached is not None else self.refresh()

    @property
    def cached(self) -> State | None:
        """The cached State, or None if there is none yet. Never blocks."""
        return self._state

    def refresh(self) -> State:
        """The State as of now: every commit that was acknowledged before this call is in it."""
        return self._catch_up()[0]

    def refresh_quietly(self) -> None:
        """As `refresh`, for push channels: when it fails, polling finds out."""
        with contextlib.suppress(PersistError):
            self.refresh()

    @property
    def is_watched(self) -> bool:
        """Whether anybody here waits for the shard to move."""
        return self._waiting > 0 or bool(self._watchers)

    def watch(self, callback: Callable[[State], None]) -> Callable[[], None]:
        """Call `callback(state)` after every move of the cached State, from any thread; returns the way to stop."""
        with self._lock:
            self._watchers.append(callback)

        def stop() -> None:
            with self._lock:
                if callback in self._watchers:
                    self._watchers.remove(callback)

        return stop

    def wait_for(self, ready: Callable[[State], bool], timeout_s: float, poll_s: float) -> State:
        """The State once `ready(state)`, or as it is after `timeout_s`.

        Woken by local commits at once; others' commits are found by reading every `poll_s`, or sooner if a push
        channel calls `refresh`.
        """
        deadline = self._clock.monotonic() + timeout_s
        with self._lock:
            self._waiting += 1
        try:
            state = self.refresh()
            while not ready(state) and (left := deadline - self._clock.monotonic()) > 0:
                with self._lock:
                    if self._state is state:
                        self._moved.wait(min(left, poll_s))
                    moved = self._state is not state
                state = self.state() if moved else self.refresh()
            return state
        finally:
            with self._lock:
                self._waiting -= 1

    # --- committing

    def create(self, state: State) -> State:
        """Commit the first State of a shard, unless the shard exists; the State that is there afterwards."""
        existing = self._versions.load(self.name)
        if existing is None:
            commit_id = self._ids.uuid7()
            data, named = self._versions.create(state, commit_id)
            won, _ = self._compare_and_set(1, data)
            existing = named if won else self._versions.load(self.name)
        if existing is None:
            raise Unavailable(f"shard {self.name!r} could not be created: the store lost the race and shows no winner")
        self._publish(existing)
        return existing

    def apply(self, command: c.Command) -> c.Result:
        """Commit one command and return its result. Raises the error with which it was refused.

        Unavailable: it definitely did not happen. Indeterminate: it may have; retry with the same token.
        """
        woken = threading.Event()
        pending = Pending(command, lambda _: woken.set())
        if self._leading:  # whoever leads now should not have to read the index for us
            self._warm(command)
        if not self._enqueue(pending):
            woken.wait()
            if pending.answered:
                return pending.outcome()
        self._lead()
        return pending.outcome()

    def submit(
        self, command: c.Command, run: Callable[[Callable[[], None]], object], answered: Callable[[Pending], None]
    ) -> None:
        """As `apply`, without waiting: `answered` is called once, on any thread, when the command has its outcome.

        `run` runs a commit on another thread when it falls to this command to lead. Nobody can cancel it: others are
        committed with it.
        """

        def wake(pending: Pending) -> None:
            if pending.answered:
                answered(pending)
            else:
                run(self._lead)

        if self._enqueue(Pending(command, wake)):
            run(self._lead)

    def _enqueue(self, pending: Pending) -> bool:
        """Queue a command; whether it has to lead."""
        with self._lock:
            if len(self._queue) >= QUEUE_MAX:
                raise Overloaded(
                    f"shard {self.name!r} has {QUEUE_MAX} commands queued; slow down",
                    retry_after_s=RETRY_SOON_S,
                )
            self._queue.append(pending)
            lead = not self._leading
            self._leading = True
            return lead

    def _lead(self) -> None:
        """Commit what is queued, then hand the lead to the next queued command, if any."""
        with self._lock:
            group = self._next_group()
        committed: State | None = None
        try:
            committed = self._commit(group)
        except PersistError as error:
            self._fail(group, error)
        except BaseException as error:  # a bug: nobody may be left waiting
            self._fail(group, error)
            raise
        finally:
            with self._lock:
                following = self._queue[0] if self._queue else None
                self._leading = following is not None
            for pending in group:
                pending.wake(pending)
            if following is not None:
                following.wake(following)
        if committed is None and any(isinstance(pending.error, Overloaded) for pending in group):
            committed = self._state  # what is refused until a flush succeeds must not wait for a commit to ask for one
        if committed is not None:
            self._upkeep.after(committed)

    def _next_group(self) -> list[Pending]:
        """The commands to commit together. A flush is the last: what was read in the index before it is void after."""
        group: list[Pending] = []
        while self._queue and len(group) < GROUP_MAX:
            group.append(self._queue.popleft())
            if isinstance(group[-1].command, c.FlushAttributes):
                break
        return group

    @staticmethod
    def _fail(group: Sequence[Pending], error: BaseException) -> None:
        for pending in group:
            pending.result, pending.error = None, error

    def _commit(self, group: Sequence[Pending]) -> State | None:
        """Answer every command of the group; the State committed, if any. Raises when the stores do not let it."""
        deadline = self._clock.monotonic() + self._settings.retry_s
        base, fresh = self._state, False
        if base is None:
            base, fresh = self._catch_up()[0], True
        lost = 0
        while True:
            base, indexed = self._indexed(base, group)
            following = self._step_all(base, group, indexed, lost)
            if following is base:
                if fresh:
                    return None  # refused or without effect, on a State that was read after the commands came in
                base, fresh = self._catch_up()[0], True
                continue
            commit_id = self._ids.uuid7()
            change = state_diff.diff(base, following, commit_id)
            if self._settings.check_all:
                invariants.check_diff(change, base, following)
            if self._compare_and_set_at(change, deadline):
                self._publish(following)
                self.metrics.committed(len(group), lost)
                return following
            lost += 1
            if self._clock.monotonic() > deadline:
                raise Unavailable(f"shard {self.name!r} is contended: {lost} commits in a row lost the race; retry")
            self._back_off(lost, LOST_FIRST_S, LOST_MAX_S)
            base, fresh = self._catch_up()[0], True

    def _indexed(self, base: State, group: Sequence[Pending]) -> tuple[State, Indexed]:
        """What the group needs of the attribute index; of a newer State where the index of `base` is gone."""
        while True:
            try:
                return base, self._attributes.indexed(base, [pending.command for pending in group])
            except StaleIndex as error:
                newer = self._catch_up()[0]
                if newer.attribute_root == base.attribute_root:
                    raise Corruption(f"the attribute index of shard {self.name!r} has lost a chunk: {error}") from error
                base = newer

    def _warm(self, command: c.Command) -> None:
        """Read into the cache what the command will need of the attribute index; failing that is no harm."""
        state = self._state
        if state is not None and state.attribute_root.height:
            with contextlib.suppress(PersistError, StaleIndex):
                self._attributes.indexed(state, [command])

    def _step_all(self, base: State, group: Sequence[Pending], indexed: Indexed, lost: int) -> State:
        """The State after all commands of the group, whose outcomes are set; `base` itself when nothing changed.

        Inline rows of the whole group come in first; where they find no room, or are many, they leave the State again
        as one blob before anything is committed.
        """
        now_ms = max(self._clock.now_ms(), base.walltime_ms)
        context = Context(now_ms, self.policy, indexed=indexed)
        room, offered = self.policy.inline_shard_bytes_max, sum(map(inline_bytes, group))
        roomy = context
        if base.trace.inline_bytes + offered > room:
            roomy = replace(context, policy=replace(self.policy, inline_shard_bytes_max=room + offered))
        state = self._stepped(base, group, roomy)
        if state.trace.inline_bytes > base.trace.inline_bytes:
            state = self._relieved(state, state.trace.inline_bytes - base.trace.inline_bytes, context, lost)
            if state.trace.inline_bytes > room:  # the blob store did not take them: each command's rows by themselves
                state = self._stepped(base, group, context)
        if state is base:
            return base
        state = replace(expire_lapsed(state, now_ms), seqno=SeqNo(base.seqno + 1), walltime_ms=now_ms)
        invariants.check_step(base, state)
        if self._settings.check_all or state.trace.batches[: len(base.trace.batches)] != base.trace.batches:
            invariants.check_state(state)
        return state

    def _stepped(self, base: State, group: Sequence[Pending], context: Context) -> State:
        state = base
        for pending in group:
            pending.result = pending.error = None
            try:
                following, result = self._step_one(state, pending, context)
            except PersistError as error:
                pending.error = error
                continue
            pending.result = result
            if isinstance(pending.command, c.Insert) and following is not state and isinstance(result, c.Appended):
                context = replace(context, inserted_at=result.lower.element)
            state = following
        return state

    def _relieved(self, state: State, added: int, context: Context, lost: int) -> State:
        """The State with the merges that this commit takes along, because what waits for upkeep may not become more."""
        for _ in range(RELIEFS_MAX):
            command = self._upkeep.relief(state, added, lost)
            if command is None:
                break
            with contextlib.suppress(PersistError):
                state = step(state, command, context)[0]
            added = 0
        return state

    def _step_one(self, state: State, pending: Pending, context: Context) -> tuple[State, c.Result]:
        try:
            return step(state, pending.command, context)
        except InlineBudget:  # no room in the State: the rows go to the blob store, the command is the same otherwise
            pending.command = spilled(pending.command, state, self._versions.blob, self._ids)
            self.metrics.spills += 1
            return step(state, pending.command, context)

    # --- compare-and-set

    def _compare_and_set_at(self, change: state_diff.StateDiff, deadline: float) -> bool:
        """Whether this state diff is in the log. Settles unknown outcomes by repeating and reading back."""
        data = self._versions.encode(change)
        if len(data) > self._versions.consensus.value_bytes_max:
            raise InvalidUsage(
                f"a commit to shard {self.name!r} takes {len(data)} bytes, more than the consensus store's "
                f"{self._versions.consensus.value_bytes_max}; write larger parts or fewer commands at once"
            )
        won, was_unknown = self._compare_and_set(change.seqno, data, deadline)
        if won or not was_unknown:
            return won  # only a try of unknown outcome may have been the one that won
        return self._is_ours(change, deadline)

    def _is_ours(self, change: state_diff.StateDiff, deadline: float) -> bool:
        """Whether the log entry at the diff's seqno is this very commit: a "lost" race may be one's own earlier try."""
        tries = 0
        while True:
            try:
                found = self._versions.diffs(self.name, change.seqno, 1)
                break
            except Unavailable as error:
                tries += 1
                if self._clock.monotonic() > deadline:
                    raise Indeterminate(
                        f"the outcome of a commit to shard {self.name!r} stays unread: {error}"
                    ) from error
                self._back_off(tries)
        if found and found[0].seqno == change.seqno:
            return found[0].commit_id == change.commit_id
        raise Indeterminate(
            f"shard {self.name!r} moved far beyond v{change.seqno} before the outcome of a commit could be read; "
            "retry with the same token"
        )

    def _compare_and_set(self, seqno: int, data: bytes, deadline: float | None = None) -> tuple[bool, bool]:
        """One compare-and-set, repeated while the store gives no definite answer.

        Whether the last try won, and whether the outcome of an earlier one is unknown.
        """
        deadline = deadline if deadline is not None else self._clock.monotonic() + self._settings.retry_s
        unknown: ConsensusError | None = None
        tries = 0
        while True:
            try:
                won = self._versions.consensus.compare_and_set(self.name, seqno, data)
                return won, unknown is not None
            except (ConsensusUnavailable, ConsensusIndeterminate) as error:
                if isinstance(error, ConsensusIndeterminate):
                    unknown = error
                tries += 1
                self.metrics.retries += 1
                if self._clock.monotonic() > deadline:
                    raise translate(unknown or error) from error
                self._back_off(tries)
            except ConsensusError as error:
                raise translate(error) from error

    def _back_off(self, tries: int, first_s: float = BACKOFF_FIRST_S, most_s: float = BACKOFF_MAX_S) -> None:
        jitter = 0.5 + int(self._ids.uuid7()[-4:], 16) / 0x10000
        self._clock.sleep(min(first_s * 2 ** min(tries, 16), most_s) * jitter)

    # --- the cached State

    def _catch_up(self) -> tuple[State, list[state_diff.StateDiff]]:
        with self._refresh_lock:
            cached = self._state
            if cached is None:
                loaded = self._versions.load(self.name)
                if loaded is None:
                    raise UnknownShard(f"there is no shard {self.name!r} here; create it first")
                state = loaded
                diffs: list[state_diff.StateDiff] = []
            else:
                state, diffs = self._versions.catch_up(cached)
            return self._publish(state), diffs

    def _publish(self, state: State) -> State:
        """Make `state` the cached one unless a newer one is; the one that is cached then."""
        with self._lock:
            cached = self._state
            if cached is not None and cached.seqno >= state.seqno:
                return cached
            self._state = state
            self._moved.notify_all()
            watchers = tuple(self._watchers)
        for watcher in watchers:
            watcher(state)
        return state
