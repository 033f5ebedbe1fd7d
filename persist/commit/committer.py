"""The committer of one shard in one process, and the only code that commits.

A commit is: take the queued commands -> plan on the cached State -> compare-and-set at the next seqno -> publish the
State -> answer the callers. One compare-and-set is in flight at a time; commands that arrive meanwhile queue up and are
committed together (group commit), each with its own outcome. Any number of machines, in any process, may work on one
shard: they only meet in the compare-and-set. The README of this package describes this path step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Protocol

from consensus.advisory_locks import Turn
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_store import NodeCache, StaleIndex
from persist.commit.background_duties import Duty, Upkeep
from persist.commit.blob_tasks import BlobWorker, GroupRead, read_apart
from persist.commit.cached_state import CachedState
from persist.commit.clocks_and_ids import StoreClock, System, checked_ms, probed
from persist.commit.command_queue import CommandQueue, Pending, Waiter
from persist.commit.commit_plan import (
    BatchMerge,
    Commit,
    Outcome,
    PlanInput,
    Supply,
    Task,
    plan_commit,
    supplied,
    with_long_diff,
)
from persist.commit.log_writer import LogWriter, TooLarge
from persist.commit.part_validator import BRINGING, Inspector, schema_change_of
from persist.commit.spill_files import SpillReader, SpillWriter
from persist.commit.state_loader import Versions, dropped
from persist.core import commands as c
from persist.core import invariants
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Run
from persist.core.blob_keys import diff_key, shard_of
from persist.core.errors import (
    Corruption,
    Expired,
    Indeterminate,
    InvalidUsage,
    PersistError,
    ReadOnly,
    Unavailable,
    UnknownShard,
)
from persist.core.state import State
from persist.core.transitions.context import SOUND, Context, Verdict
from persist.core.transitions.outcomes_and_audit import is_of_the_future
from persist.core.transitions.part_admission import check_staged
from persist.formats.http_messages import validate_caller, validate_command
from persist.telemetry.metrics import MachineMetrics


def outcomes_for(versions: Versions, commit: Commit, group: Sequence[Pending]) -> list[Outcome]:
    """One outcome per command. A refusal names the home that has taken over.

    A write that committed nothing, as a retry does, succeeds only if this process may still write: another home may
    not have the first try.
    """
    outcomes = [
        versions.identity.named(outcome) if isinstance(outcome, ReadOnly) else outcome
        for outcome in _unless_copied(versions, commit, group)
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
            versions.identity.check_writable()
        except PersistError as error:
            for index in writes:
                outcomes[index] = error
    return outcomes


def _unless_copied(versions: Versions, commit: Commit, group: Sequence[Pending]) -> Sequence[Outcome]:
    """The outcomes; those of reads of a handed-over shard become errors if the store has become a copy."""
    reads = [not isinstance(pending.command, c.WriteCommand) for pending in group[: len(commit.outcomes)]]
    if not commit.following.handed_over or not any(reads):
        return commit.outcomes
    try:
        versions.identity.check_no_copy(if_due=True)
    except PersistError as copied:
        return [copied if is_read else outcome for outcome, is_read in zip(commit.outcomes, reads, strict=True)]
    return commit.outcomes


FINALISE_STEPS_MAX = 1_000  # commits that take a dropped shard to its tombstone before its name is used again
QUEUE_MAX = 10_000  # queued commands of a shard; one more is refused (Overloaded)
GROUP_MAX = 1_000  # commands that are committed together
RETRY_S = 30.0  # how long one commit may take
TURN_S = 1.0  # that a commit waits at most for its turn among processes


class Machine(CachedState):
    """The cached State of the shard `name`, and commits on it. Thread-safe.

    `check_all` is that of `LocationSettings`.
    """

    def __init__(
        self,
        name: str,
        versions: Versions,
        system: System,
        *,
        upkeep: Upkeep,
        nodes: NodeCache,
        check_all: bool = False,
    ) -> None:
        super().__init__(name, versions, system.clock)
        self.policy = upkeep.policy
        self.metrics = MachineMetrics()
        self._system = system
        self._check_all = check_all
        self._queue = CommandQueue(name, QUEUE_MAX, GROUP_MAX)
        self._nodes = nodes
        self._log = LogWriter(name, versions, system, self.metrics)
        self._attributes = AttributeIndex(versions.blob, system.ids, nodes)
        self._spilled = SpillReader(versions.blob, nodes)
        spilled = SpillWriter(versions, system.ids, nodes)
        self._blobs = BlobWorker(versions, self._attributes, spilled, system.ids, self.metrics, self.policy)
        self._inspector = Inspector(versions.blob, versions.receipts, versions.bound)
        self._store_clock = StoreClock(versions.blob, system.clock, system.ids)
        self._upkeep = upkeep

    def collect_with(self, collect: Callable[[str], object]) -> None:
        """Call `collect(name)` in the background whenever a commit leaves garbage."""
        self._upkeep.collect = collect

    def retain_with(self, retain: Callable[[str], object]) -> None:
        """Call `retain(name)` in the background now and then, as commits land, if the rows have a policy."""
        self._upkeep.retain = retain

    @property
    def queued(self) -> int:
        return self._queue.queued

    def create(self, state: State, follows: str | None = None) -> State:
        """Commit the first State of a shard unless the shard exists; return the State that is there afterwards.

        If a shard of this name was dropped, the next life of the name begins, provided `follows` is its id or None.
        """
        existing: State | None
        try:
            existing = self.refresh()  # not only the log: this process may have read commits that the log has lost
        except UnknownShard:
            existing = None
        if existing is None:
            data, named = self._versions.create(state, self._system.ids.uuid7())
            won, _ = self._log.compare_and_set(1, data, self._deadline())
            if won:
                self._log.settled(named.commit_id, data)
                self._versions.check_begun(self.name)
            existing = named if won else self._versions.load(self.name)
        if existing is None:
            raise Unavailable(f"shard {self.name!r} could not be created: the store lost the race and shows no winner")
        existing = self.publish(existing)
        if not existing.is_closed or follows not in (None, existing.shard_id):
            return existing
        return self._recreated(existing, state)

    def _recreated(self, ended: State, wanted: State) -> State:
        """Begin the next life of the name, unless another process does. The commands address the ended life only."""
        finalise = c.Finalise(shard=ended.shard_id, store_ms=probed(self._versions.blob, self._system.ids))
        try:
            for _ in range(FINALISE_STEPS_MAX):
                if self.apply(finalise) == c.Finalised(done=True):
                    break
            recreate = c.Recreate(wanted.schemas[wanted.schema_id], wanted.settings, shard=ended.shard_id)
            self.apply(recreate, wanted.entries[wanted.seqno].entries[0].caller or NOBODY)
        except UnknownShard:  # another process was faster
            return self.refresh()
        return self.state()

    def apply(self, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        """Validate and commit one command, and return its result. Raises the error with which it was refused.

        Unavailable: it definitely did not happen. Indeterminate: it may have; retry with the same token. `caller` is
        kept in the commit history. `by_names`: the rows were given by column name; SchemaMismatch if they are not of
        the current schema.
        """
        command, caller = validate_command(command), validate_caller(caller)
        return self._applied(command, self.verdict(command, by_names), caller)

    def verdict(self, command: c.Command, by_names: bool = False) -> Verdict:
        """The verdict on the parts or the schema that the command brings, for `submit`. It contains any error.

        Calls a store unless `knows(command)` and `is_at_once(command)`.
        """
        if isinstance(command, BRINGING):
            state = (self.cached if self.knows(command) else None) or self.refresh()
            return self._inspector.verdict(command, state, by_names)
        return SOUND

    def knows(self, command: c.Command) -> bool:
        """Whether the cached State is of the shard that the command addresses, and has the schemas that it names."""
        state = self.cached
        if state is None or state.is_closed or command.shard not in (None, state.shard_id):
            return False
        change = schema_change_of(command)
        if change is not None and not isinstance(change, c.Recreate):
            return change.expected_id in state.schemas
        parts = [part for run in getattr(command, "runs", ()) for part in run.parts]
        of_it = all(part.key is None or shard_of(part.key) == state.shard_id for part in parts)
        return of_it and all(part.schema_id in state.schemas for part in parts)

    def receipted(self, runs: Sequence[Run]) -> tuple[Run, ...]:
        """The staged runs with receipts, so that their commit need not validate them. Raises the error of a bad part.

        A retry is safe.
        """
        state = self.state()
        try:
            return self._receipted(runs, state)
        except (InvalidUsage, Expired):  # perhaps the shard has a newer schema, or the name another life
            newer = self.refresh()
            if newer is state:
                raise
            return self._receipted(runs, newer)

    def _receipted(self, runs: Sequence[Run], state: State) -> tuple[Run, ...]:
        check_staged(state, runs, Context(self._system.clock.now_ms(), self.policy, verdict=SOUND))
        return self._inspector.receipted(runs, state)

    def _applied(self, command: c.Command, verdict: Verdict, caller: Caller = NOBODY) -> c.Result:
        if self._queue.is_led:  # the leader should not have to read the index for this command
            self._warm(command)
        waiter = Waiter()
        pending = Pending(command, waiter.answer, waiter.lead, verdict, caller, self._system.sight.origin())
        try:
            if self._queue.enqueue(pending) or waiter.must_lead():
                self._lead()
        except BaseException:  # interrupted, perhaps by Ctrl-C: no other caller may wait for this one
            self._queue.abandon(pending, self._interrupted())
            raise
        return waiter.result()

    def submit(
        self,
        command: c.Command,
        run: Callable[[Callable[[], None]], object],
        answered: Callable[[Outcome], None],
        verdict: Verdict | None = None,
        caller: Caller = NOBODY,
        all_answered: Callable[[], None] | None = None,
    ) -> None:
        """As `apply`, without waiting for the commit: `answered(outcome)` is called once, on any thread.

        The command was validated, by `decode_command` or `validate_command`. `all_answered()` is called after the last
        answer of its group. `verdict` is the result of `verdict(command)`; None: it is determined here.

        `run` runs a commit on another thread if this command has to lead. It cannot be cancelled: other commands are
        committed with it.
        """

        once, verdict = Lock(), verdict or self.verdict(command)

        def lead() -> None:
            if once.acquire(blocking=False):
                run(self._lead)

        origin = self._system.sight.origin()
        if self._queue.enqueue(Pending(command, answered, lead, verdict, caller, origin, all_answered)):
            lead()

    def _lead(self) -> None:
        """Commit the queued commands, answer them, then hand the lead to the next queued command, if any."""
        group = self._queue.next_group()
        outcomes: Sequence[Outcome] = ()
        failed: BaseException = self._interrupted()
        upkeep: State | None = None
        try:
            with self._system.sight.commit(self.name, group, self.metrics) as watch:
                self._log.request_id = watch.request_id
                self._upkeep.give_way()
                commit, outcomes = self._commit_what_fits(group)
                watch.ended(commit.following.seqno, commit.diff is not None)
            upkeep = commit.upkeep
        except Exception as error:  # even a bug must not leave callers waiting
            failed = error
            if not isinstance(error, PersistError):
                raise
            if isinstance(error, Unavailable) and error.is_unwritable:
                outcomes = [self._unheld(pending.command, error) for pending in group[: self._queue.group_size]]
        finally:
            self._queue.answer(outcomes or [failed] * self._queue.group_size)
            self._queue.hand_over()
        if upkeep is not None:
            self._begin_upkeep(upkeep)

    def _commit_what_fits(self, group: list[Pending]) -> tuple[Commit, Sequence[Outcome]]:
        """Commit the group, or as much of its beginning as the consensus store takes at once; the rest stays queued.

        Only the command that brings a value that cannot be written, or that violates an invariant, is refused.
        """
        while True:
            try:
                commit = self._commit(group)
            except (InvalidUsage, Corruption):
                if len(group) == 1:
                    raise
                group = self._queue.halve_group()
            else:
                return commit, outcomes_for(self._versions, commit, group)

    def _interrupted(self) -> Indeterminate:
        return Indeterminate(
            f"the commit to shard {self.name!r} was interrupted, perhaps by Ctrl-C; retry with the same token"
        )

    def _commit(self, group: Sequence[Pending]) -> Commit:
        """Commit the commands together, and publish the State. Raises the error that is the outcome of each command.

        Processes of one machine take turns if the consensus store supports it: a commit that is planned on a State
        that another process replaces meanwhile loses the race.
        """
        cached = self.cached
        with self._versions.consensus.turn(self.name, TURN_S) as turn:
            is_fresh = cached is not None and turn is Turn.WAITED
            return self._committed(self.refresh() if is_fresh else cached, group, is_fresh)

    def _committed(self, base: State | None, group: Sequence[Pending], is_fresh: bool = False) -> Commit:
        """As `_commit`, planned on `base` (None: the current State), and again on the winner after each lost race."""
        commands: Sequence[c.Command] = [pending.command for pending in group]
        deadline, commit_id = self._deadline(), self._system.ids.uuid7()
        if base is None:
            base, is_fresh = self.refresh(), True
        lost = 0
        while True:
            commit, planned_s = self._planned(base, commands, group, commit_id)
            if commit.diff is None:
                if is_fresh:
                    return commit  # refused or without effect, on a State that was read after the commands arrived
            elif (written := self._written(commit, base, deadline)) is not None:
                self._leases.saw(written.following, planned_s, planned_s)
                self.publish(written.following)
                self.metrics.committed(len(commands))
                return written
            else:
                lost += 1
                self.metrics.races_lost += 1  # also if nothing is committed in the end
                self._log.lost(lost, deadline)
                commit_id = self._system.ids.uuid7()
            commands = commit.commands
            base, is_fresh = self.refresh(), True

    def _written(self, commit: Commit, base: State, deadline: float) -> Commit | None:
        """The commit as it is in the log now. None: plan again, on the current State.

        If the state diff of a single command is too long for the log, it is written to a blob that the log entry
        names. Its length is known only once it is encoded.
        """
        assert commit.diff is not None
        ends, gone = commit.following.is_closed, len(commit.diff.gone)
        try:
            nbytes = self._log.write(commit.diff, deadline, ends=ends)
        except TooLarge:
            if len(commit.commands) > 1:
                raise
            key = diff_key(commit.following.shard_id, self._system.ids)  # a life that begins here may have a new id
            commit = with_long_diff(commit, key)
            self._check_diff(commit, base)
            assert commit.diff is not None
            nbytes = self._log.write(commit.diff, deadline, key, ends)
        if not nbytes:
            return None
        self._upkeep.committed(commit.following.seqno, nbytes, gone)
        return commit

    def _planned(
        self, base: State, commands: Sequence[c.Command], group: Sequence[Pending], commit_id: str
    ) -> tuple[Commit, float]:
        """The commit, planned with what it needs from the stores, and the monotonic time up to which it counts leases.

        `commands` are those of the group, as the plan before left them.
        """
        base, read = self._known(base, commands)
        now_ms = self._system.clock.now_ms()
        context = Context(
            now_ms,
            self.policy,
            indexed=read.indexed,
            lease_clock_ms=self._leases.now_ms(base),
            renewed=self._leases.renewed(),
            remembered=read.remembered,
            store_ms=self._store_ms(commands, now_ms),
            checked_ms=checked_ms(self._system.stamps, now_ms),
        )
        verdicts, callers = [pending.verdict for pending in group], [pending.caller for pending in group]
        given = PlanInput(context, commit_id, self._check_all, verdicts, read.unread, callers)
        counted_s = self._system.clock.monotonic()
        commit = supplied(plan_commit(base, commands, given), self._supply)
        self._check_diff(commit, base)
        return commit, counted_s

    def _stepped(self, command: c.Command, state: State) -> tuple[Outcome, bool]:
        """The outcome of the command, and whether it would change the shard. Commits nothing."""
        pending = Pending(command, lambda outcome: None, lambda: None, SOUND)
        commit, _ = self._planned(state, [command], [pending], self._system.ids.uuid7())
        [outcome] = commit.outcomes
        return outcome, commit.diff is not None

    def _unheld(self, command: c.Command, error: PersistError) -> PersistError:
        """The outcome of a command that a readable but unwritable store refused with `error`.

        For `RegisterReader` the error has the `since`, `upper` and `seqno` that the hold would have, so that a read can
        proceed without a hold.
        """
        if not isinstance(command, c.RegisterReader):
            return error
        try:
            outcome, _ = self._stepped(command, self.refresh())
        except PersistError:
            return error
        if isinstance(outcome, c.ReaderRegistered):
            hold = {"since": outcome.since.to_json(), "upper": outcome.upper.to_json(), "seqno": int(outcome.seqno)}
            return Unavailable(error.message, **error.details, **hold)
        return outcome if isinstance(outcome, PersistError) else error

    def _check_diff(self, commit: Commit, base: State) -> None:
        """In tests: check that the encoded and decoded state diff leads from `base` to the following State."""
        if self._check_all and commit.diff is not None:
            decoded = self._versions.decode(self._versions.encode(commit.diff))
            invariants.check_diff(decoded, base, commit.following)

    def _store_ms(self, commands: Sequence[c.Command], now_ms: int) -> int:
        """The blob store's time if a token seems to come from the future, as this clock may be behind; else 0."""
        if any(is_of_the_future(command, now_ms) for command in commands):
            with contextlib.suppress(PersistError):  # then this machine's clock decides
                return self._store_clock.now_ms()
        return 0

    def _supply(self, task: Task) -> Supply:
        self.metrics.spills += isinstance(task, BatchMerge)
        try:
            return self._blobs.finish(task, task.state)
        except PersistError as error:
            return error
        except Exception as error:
            if isinstance(task, BatchMerge):
                raise
            return error  # even a bug affects only the command that needs this task

    def _known(self, base: State, commands: Sequence[c.Command]) -> tuple[State, GroupRead]:
        """What the commands need from the attribute index and from files of outcomes, and the State it belongs to.

        That is a newer State than `base` if a blob of `base` is gone.
        """
        while True:
            try:
                indexed = self._attributes.indexed(base, commands)
                return base, GroupRead(indexed, self._spilled.remembered(base, commands))
            except StaleIndex:
                newer = self.refresh()
                if newer.attribute_root != base.attribute_root or newer.spilled != base.spilled:
                    base = newer
                    continue
            except PersistError:
                pass  # read_apart finds the commands that need it
            return base, read_apart(base, commands, self._versions.blob, self._system.ids, self._nodes)

    def _warm(self, command: c.Command) -> None:
        """Read into the cache what the command will need from the blob store. A failure is ignored."""
        state = self.cached
        if state is not None and (state.attribute_root.height or state.spilled):
            with contextlib.suppress(PersistError, StaleIndex):
                self._attributes.indexed(state, [command])
                self._spilled.remembered(state, [command])

    def _begin_upkeep(self, state: State) -> None:
        """Submit the background duties that are due in this State. Does not wait."""
        for duty in self._upkeep.due(state):
            if not self._system.background.submit(partial(self._do, duty)):
                self._upkeep.ended(duty)
        stamps = self._system.stamps
        if stamps is not None and stamps.is_due() and stamps.begins():
            self._system.background.submit(stamps.compare)

    def _do(self, duty: Duty) -> None:
        try:
            with self._versions.consensus.turn(f"{self.name}#{duty.kind}", 0) as turn:
                if not self._upkeep.is_left(duty, turn is Turn.NONE):
                    with self._system.sight.duty(self.name, duty.kind, self.metrics):
                        self._done(duty)
        except (PersistError, StaleIndex) as error:
            self.metrics.upkeep_failed += 1
            self._system.sight.storms.corrupted(self.name, error, f"upkeep: {duty.kind}")
        finally:
            self._upkeep.ended(duty)

    def _done(self, duty: Duty) -> None:
        if callable(duty.task):
            duty.task(self.name)
            return
        command = self._blobs.finish(duty.task, self.state(), self.refresh)
        self._upkeep.written(duty)
        if command is not None:
            result = self._applied(command, SOUND)  # this process has just written its parts
            dropped(self._versions, command, result)
            self.metrics.upkept(result)

    def _deadline(self) -> float:
        return self._system.clock.monotonic() + RETRY_S


class Committer(Protocol):
    """What maintenance needs from a shard; implemented by `Machine`. Its commands may be repeated."""

    @property
    def name(self) -> str: ...

    def state(self) -> State:
        """The State as last seen; it includes every commit of this process."""

    def refresh(self) -> State:
        """The current State, read from the log."""

    def apply(self, command: c.Command) -> c.Result:
        """Commit one command. Unavailable: it did not happen. Indeterminate: it may have happened."""


CommitterOf = Callable[[str], Committer]
