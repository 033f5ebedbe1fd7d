"""Random commands against a naive model: same answers, same refusals, and the same rows at every readable time.

The shard checks the invariants, the state diff laws and the codec after every commit (`tests.support.shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.erasure_progress import pending_erasures
from persist.core.errors import PersistError
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo, Token, WriterId
from persist.core.state import Policy
from persist.core.transitions import lifecycle
from tests.support.examples import examples
from tests.support.shard import Shard, make_part, numbered
from tests.unit.core.model import CLOSED, Model, Refused, Update, sums

WRITERS = [WriterId(numbered("w", n)) for n in range(1, 7)]
READERS = [ReaderId(numbered("r", n)) for n in (1, 2)]
CRITICAL = [CriticalReaderId(numbered("c", n)) for n in (1, 2)]
LEASE_MS = 1000

writers = st.sampled_from(WRITERS)
readers = st.sampled_from(READERS)
criticals = st.sampled_from(CRITICAL)
aheads = st.sampled_from([1, 1, 1, 1, 0, -1])  # of a token to its writer's last one: new, a retry, too old
opaques = st.sampled_from("ab")
sinces = st.sampled_from([*range(9), *range(4), 25, CLOSED, CLOSED])
keys = st.sampled_from("xyz")
diffs = st.sampled_from([1, 1, 1, -1, 2])
aheads_of_upper = st.sampled_from([*[-1, 0, 1, 2, 5] * 3, CLOSED])
lengths = st.sampled_from([*[0, 1, 1, 2, 3, 5] * 5, CLOSED])
offsets = st.lists(st.tuples(keys, st.integers(0, 4), diffs), max_size=6)
rows = st.lists(st.tuples(keys, diffs), min_size=1, max_size=3)


def frontier(time: float) -> Antichain:
    return EMPTY if time == CLOSED else Antichain(int(time))


def number(held: Antichain) -> float:
    return CLOSED if held.element is None else held.element


class HoldsAgainstModel(RuleBasedStateMachine):
    """What moves since: every path by which holds come, move and go, on a shard without rows."""

    def __init__(self) -> None:
        super().__init__()
        self._small_steps = patch.object(lifecycle, "FINALISE_BATCHES_PER_STEP", 2)
        self._small_steps.start()

    def teardown(self) -> None:
        self._small_steps.stop()

    @initialize()
    def create(self) -> None:
        self.shard = Shard(Policy())
        self.model = Model()
        self.register_reader(READERS[0], 0)
        self.advance_upper(5)

    # --- what both are told

    def told(self, command: c.Command, model: Callable[[], Any], seen: Callable[[Any], Any]) -> None:
        """The shard's answer (through `seen`) is the model's, or both refuse with the same kind."""
        try:
            expected = model()
        except Refused as refused:
            expected = refused.kind
        [result] = self.shard.commit(command)
        assert (result.kind if isinstance(result, PersistError) else seen(result)) == expected

    def behind(self, by: int) -> float:
        """A time near the upper; near zero once the shard is closed."""
        return max(0, (0 if self.model.upper == CLOSED else self.model.upper) - by)

    @rule(ahead=aheads_of_upper)
    def advance_upper(self, ahead: int) -> None:
        time = self.behind(-ahead)
        self.told(c.AdvanceUpper(frontier(time)), lambda: self.model.advance_upper(time), appended)

    @rule(reader=readers, since=st.none() | sinces)
    def register_reader(self, reader: ReaderId, since: float | None) -> None:
        self.told(
            c.RegisterReader(reader, None if since is None else frontier(since), LEASE_MS),
            lambda: self.model.register_reader(reader, since),
            lambda r: number(r.since),
        )

    def seqno(self, reader: ReaderId, wanted: int) -> SeqNo:
        """The earliest State that a reader may say it needs, or a later one."""
        known = self.shard.state.leased_readers.get(reader)
        return SeqNo(max(wanted, 0 if known is None else known.seqno))

    @rule(reader=readers)
    def heartbeat_reader(self, reader: ReaderId) -> None:
        command = c.DowngradeSince(reader, None, self.seqno(reader, 0), moves_since=False)
        self.told(command, lambda: self.model.move_hold(reader, 0), downgraded)

    @rule(reader=readers)
    def expire_reader(self, reader: ReaderId) -> None:
        self.told(c.ExpireReader(reader), lambda: self.model.expire_reader(reader), lambda r: None)

    @rule(reader=readers, since=sinces, seqno=st.integers(1, 100))
    def downgrade_since(self, reader: ReaderId, since: float, seqno: int) -> None:
        command = c.DowngradeSince(reader, frontier(since), self.seqno(reader, seqno))
        self.told(command, lambda: self.model.downgrade(reader, since), downgraded)

    @rule(reader=readers, since=sinces, seqno=st.integers(1, 100))
    def move_hold(self, reader: ReaderId, since: float, seqno: int) -> None:
        command = c.DowngradeSince(reader, frontier(since), self.seqno(reader, seqno), moves_since=False)
        self.told(command, lambda: self.model.move_hold(reader, since), downgraded)

    @rule(reader=criticals, opaque=opaques)
    def register_critical(self, reader: CriticalReaderId, opaque: str) -> None:
        command = c.RegisterCriticalReader(reader, opaque)
        self.told(command, lambda: self.model.register_critical(reader, opaque), critical)

    @rule(reader=criticals, expected=opaques, opaque=opaques, since=sinces, force=st.booleans())
    def downgrade_critical(
        self, reader: CriticalReaderId, expected: str, opaque: str, since: float, force: bool
    ) -> None:
        self.told(
            c.CompareAndDowngradeSince(reader, expected, opaque, frontier(since), force),
            lambda: self.model.downgrade_critical(reader, expected, opaque, since, force),
            critical,
        )

    @rule(reader=criticals, expected=opaques)
    def expire_critical(self, reader: CriticalReaderId, expected: str) -> None:
        command = c.ExpireCriticalReader(reader, expected)
        self.told(command, lambda: self.model.expire_critical(reader, expected), lambda r: None)

    @rule(passed=st.sampled_from([1, LEASE_MS // 4, LEASE_MS // 2, LEASE_MS + 1]))
    def tick(self, passed: int) -> None:
        """Leases that lapsed are gone; what they held is not forgotten by that."""
        self.shard.now_ms += passed
        before = self.shard.state
        self.shard.expire_lapsed()
        after = self.shard.state
        assert (after.trace, after.since, after.critical_readers) == (
            before.trace,
            before.since,
            before.critical_readers,
        )
        for gone in set(before.leased_readers) - set(after.leased_readers):
            assert before.leased_readers[gone].lapsed(self.shard.now_ms)
            del self.model.readers[gone]
        for lapsed in set(before.writers) - set(after.writers):
            self.model.expire_writer(lapsed)

    @invariant()
    def frontiers_agree(self) -> None:
        state = self.shard.state
        assert (number(state.upper), number(state.since)) == (self.model.upper, self.model.since)
        assert state.tombstone == self.model.tombstone
        assert len(pending_erasures(state)) == self.model.waits


class ShardAgainstModel(HoldsAgainstModel):
    @initialize(inline=st.booleans())
    def create(self, inline: bool) -> None:  # type: ignore[override]
        self.shard = Shard(Policy())
        self.model = Model()
        self.inline = inline
        self.contents: dict[str, list[Update]] = {}  # the rows of every part ever made, by part id
        self.merges: list[c.MergeResult] = []  # prepared, to be applied later or again
        self.erasures = 0
        self.register_reader(READERS[0], 0)

    def token(self, writer: WriterId, ahead: int) -> Token:
        known = self.model.writers.get(writer)
        last = int(known.token[2:]) if known and known.token else 1
        return Token(numbered("i", last + ahead))

    def part(self, updates: list[Update]) -> Part:
        part = make_part(
            len(self.contents) + 1,
            rows=len(updates),
            times=(min(u[1] for u in updates), max(u[1] for u in updates)),
            inline=10 * len(updates) if self.inline else None,
            diff_sum=sum(u[2] for u in updates),
        )
        self.contents[part.id] = updates
        return part

    def runs(self, updates: list[Update]) -> tuple[Run, ...]:
        halves = [updates[: len(updates) // 2], updates[len(updates) // 2 :]]
        return tuple(Run((self.part(half),)) for half in halves if half)

    @rule(writer=writers)
    def expire_writer(self, writer: WriterId) -> None:
        self.told(c.ExpireWriter(writer), lambda: self.model.expire_writer(writer), lambda r: None)

    @rule(writer=writers, ahead=aheads, length=lengths, behind=st.sampled_from([0, 0, 0, 1, -2]), data=offsets)
    def compare_and_append(
        self, writer: WriterId, ahead: int, length: float, behind: int, data: list[tuple[str, int, int]]
    ) -> None:
        token = self.token(writer, ahead)
        expected = self.model.upper if behind == 0 else self.behind(behind)
        upper = expected + length
        updates = self.within(expected, upper, data)
        self.told(
            c.CompareAndAppend(writer, token, frontier(expected), frontier(upper), self.runs(updates)),
            lambda: self.model.compare_and_append(writer, token, expected, upper, updates),
            appended,
        )

    @rule(writer=writers, ahead=aheads, length=lengths, behind=st.sampled_from([-1, 0, 1, 2, 2, 3]), data=offsets)
    def append(
        self, writer: WriterId, ahead: int, length: float, behind: int, data: list[tuple[str, int, int]]
    ) -> None:
        token = self.token(writer, ahead)
        lower = self.behind(behind)
        upper = lower + length
        updates = self.within(lower, upper, data)
        self.told(
            c.Append(writer, token, frontier(lower), frontier(upper), self.runs(updates)),
            lambda: self.model.append(writer, token, lower, upper, updates),
            appended,
        )

    @rule(writer=writers, behind=st.integers(1, 3), beyond=st.integers(1, 2), key=keys, diff=diffs)
    def append_what_is_half_known(self, writer: WriterId, behind: int, beyond: int, key: str, diff: int) -> None:
        """One part with a row at every time, some of them before the upper: these are clipped."""
        token, lower = self.token(writer, 1), int(self.behind(behind))
        upper = lower + behind + beyond
        updates = [(key, time, diff) for time in range(lower, upper)]
        self.told(
            c.Append(writer, token, frontier(lower), frontier(upper), (Run((self.part(updates),)),)),
            lambda: self.model.append(writer, token, lower, upper, updates),
            appended,
        )

    @staticmethod
    def within(lower: float, upper: float, data: list[tuple[str, int, int]]) -> list[Update]:
        return [(key, int(lower) + offset, diff) for key, offset, diff in data if lower + offset < upper]

    @rule(inserts=st.lists(st.tuples(writers, aheads, rows), min_size=1, max_size=3))
    def insert_together(self, inserts: list[tuple[WriterId, int, list[tuple[str, int]]]]) -> None:
        told = [(writer, self.token(writer, ahead + at), held) for at, (writer, ahead, held) in enumerate(inserts)]
        commands = [
            c.Insert(writer, token, self.runs([(key, 0, diff) for key, diff in held])) for writer, token, held in told
        ]
        expected = self.model.insert_together([(str(writer), str(token), held) for writer, token, held in told])
        results = self.shard.commit(*commands)
        assert [r.kind if isinstance(r, PersistError) else appended(r) for r in results] == expected

    @rule(writer=writers, ahead=aheads, force=st.sampled_from([False, False, True]), count=st.integers(0, 2))
    def erase(self, writer: WriterId, ahead: int, force: bool, count: int) -> None:
        """Erase all rows of some keys: at the next time, or pending in a shard that is fed by `append`."""
        self.erasures += 1
        token, retracted = self.token(writer, ahead), self.model.erasable()[:count]
        upper = 1 if self.model.upper == CLOSED else int(self.model.upper)
        erasure = c.NewErasure(numbered("e", self.erasures), pending=self.model.waits, force=force)
        runs = self.runs([(key, 0, diff) for key, diff in retracted])
        self.told(
            c.Rewrite(writer, token, Antichain(upper), upper - 1, c.ERASE, runs, erasure=erasure),
            lambda: self.model.erase(writer, token, force, retracted),
            appended,
        )

    @precondition(lambda self: len(self.contents) > 8)
    @rule(force=st.booleans(), steps=st.integers(0, 3))
    def drop(self, force: bool, steps: int) -> None:
        self.told(c.Drop(force), lambda: self.model.drop(force), lambda r: None)
        if self.shard.state.is_closed:
            for _ in range(steps):
                self.model.tombstone = self.shard.one(c.Finalise()) == c.Finalised(done=True)

    @precondition(lambda self: self.model.fed and self.model.upper != CLOSED)
    @rule(writer=writers, count=st.integers(0, 1))
    def drop_while_an_erasure_is_pending(self, writer: WriterId, count: int) -> None:
        self.erase(writer, 1, False, count)
        self.drop(True, 1)

    @precondition(lambda self: self.model.tombstone and self.inline)
    @rule()
    def recreate(self) -> None:
        """The next life of the name has nothing of the one before. (Blob keys here are those of the first life.)"""
        before = self.shard.state
        command = c.Recreate(before.schemas[1], shard=before.shard_id)
        self.told(command, self.model.recreate, lambda r: None)
        assert self.shard.state.shard_id != before.shard_id
        self.told(command, self.model.recreated_again, lambda r: None)
        self.merges.clear()

    # --- merges, which change nothing that can be seen

    @precondition(lambda self: self.shard.state.trace.batches and not self.shard.state.since.is_empty)
    @rule(data=st.data(), now=st.booleans())
    def prepare_merge(self, data: st.DataObject, now: bool) -> None:
        batches = self.shard.state.trace.batches
        first = data.draw(st.integers(0, len(batches) - 1))
        last = data.draw(st.integers(first, min(first + 3, len(batches) - 1)))
        candidates = [part for batch in batches[first : last + 1] for part in batch.parts()]
        inputs = [part for part in candidates if data.draw(st.booleans())]
        if not inputs:
            return
        since = data.draw(st.integers(0, int(number(self.shard.state.since))))
        summed = sums(((key, max(time, since)), diff) for part in inputs for key, time, diff in self.visible(part))
        merged = sorted((key, time, diff) for (key, time), diff in summed.items())
        outputs = (Run((self.part(merged),)),) if merged else ()
        self.merges.append(c.MergeResult(tuple(part.id for part in inputs), outputs, Antichain(since)))
        if now:
            assert self.shard.one(self.merges[-1]) == c.MergeApplied(True)

    @precondition(lambda self: self.merges and not self.model.tombstone)
    @rule(data=st.data())
    def apply_merge_late(self, data: st.DataObject) -> None:
        """A merge is applied iff all its inputs are there still, or it is what replaced them."""
        merge = data.draw(st.sampled_from(self.merges))
        before = self.shard.state
        held = {part.id for part in before.trace.parts()}
        outputs = {part.id for run in merge.outputs for part in run.parts}
        landed_before = bool(outputs) and outputs <= held
        applies = set(merge.inputs) <= held
        assert self.shard.one(merge) == c.MergeApplied(applies or landed_before)
        assert (self.shard.state is not before) == applies

    # --- what can be seen

    def visible(self, part: Part) -> Iterator[Update]:
        for key, written, diff in self.contents[part.id]:
            time = written if part.time is None else part.time
            if part.clip is None or time >= part.clip:
                yield key, time, diff

    @invariant()
    def every_readable_time_reads_the_same(self) -> None:
        latest = max((update[1] for update in self.model.updates), default=0) + 1
        if self.model.since == CLOSED:
            return
        updates = [update for part in self.shard.state.trace.parts() for update in self.visible(part)]
        for as_of in range(int(self.model.since), int(min(self.model.upper, latest + 1))):
            found = sums((key, diff) for key, time, diff in updates if time <= as_of)
            assert found == self.model.snapshot(as_of)

    @invariant()
    def batches_say_true_things(self) -> None:
        for batch in self.shard.state.trace.batches:
            updates = [update for part in batch.parts() for update in self.visible(part)]
            since, lower, upper = (number(f) for f in (batch.desc.since, batch.desc.lower, batch.desc.upper))
            assert all(max(since, lower) <= time for _, time, _ in updates)
            assert all(time < max(upper, self.model.since + 1) for _, time, _ in updates)
            assert batch.rows >= len(updates)
            assert batch.diff_sum is None or batch.diff_sum == sum(diff for _, _, diff in updates)


def appended(result: Any) -> tuple[float, float]:
    return number(result.lower), number(result.upper)


def downgraded(result: Any) -> tuple[float, float]:
    return number(result.reader_since), number(result.shard_since)


def critical(result: Any) -> tuple[float, str, float]:
    return number(result.since), result.opaque, number(result.shard_since)


HoldsAgainstModel.TestCase.settings = examples(5, stateful_step_count=20)
TestHoldsAgainstModel = HoldsAgainstModel.TestCase
ShardAgainstModel.TestCase.settings = examples(2.5, stateful_step_count=40)
TestShardAgainstModel = ShardAgainstModel.TestCase
