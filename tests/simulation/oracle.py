"""Who sees everything: every commit, write, deletion and truncation at the moment it takes effect.

The oracle follows each shard's State from the log itself and keeps the naive truth beside it: which commands
landed, and what rows that makes at every time. What it checks is named; a violation is raised in the task that
caused it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from blob.memory_blobs import MemoryBlob
from consensus import HIDDEN
from consensus.memory_logs import MemoryConsensus
from persist.commit.blob_tasks import keys_in
from persist.core import state_diff
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import ENDED, RETIRED, TokenOutcome
from persist.core.blob_keys import (
    is_bundle_key,
    is_loan_key,
    is_part_key,
    is_rollup_key,
    part_id_of,
    rollup_seqno,
    shard_of,
)
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import critical_reader_id_of, family_of, incarnation_of
from persist.core.invariants import check_state, check_step
from persist.core.named_holds import is_foreign
from persist.core.state import State, WriterState, blank_state
from persist.formats.state_frames import decode_diff, decode_state
from tests.simulation.attributed import AttributeTruth
from tests.simulation.erasures import ErasureTruth, Meant
from tests.simulation.instants import InstantTruth, number
from tests.simulation.oracle_errors import Violation, expect

Value = int | tuple[int | None, ...]  # of the column `v`; with more columns where these are not null
Row = tuple[str, Value]  # key and value
Update = tuple[str, Value, int, int]  # key, value, time, diff
Contents = dict[Row, int]


@dataclass
class Write:
    """A write that somebody tried. `updates` are at their times; those of an insert at 0 until it landed.

    `answer` is what the caller knows: None (nothing yet, or it died), "ok", "refused" (definitely did not happen) or
    "unknown".
    """

    number: int
    kind: str
    who: str
    shard: str
    updates: list[Update]
    lower: int = -1  # asked for
    upper: int = -1
    token: str = ""
    invoked: int = 0
    returned: int = 0
    answer: str | None = None
    told: tuple[int | None, int | None] | None = None  # the interval that an "ok" named
    actual: int | None = None  # the upper that a mismatch named
    landed: tuple[int | None, int | None] | None = None
    landed_seqno: int = 0
    attributes: tuple[AttributeUpdate, ...] = ()
    as_of: int | None = None  # what a restore leads back to, and the last time before the cut of a truncation
    by_policy: bool = False
    meant: Meant | None = None  # of an erasure
    removed: int = 0  # by an erasure that landed


REWRITES = ("restore", "truncate", "drop", "erase")  # kinds of writes whose rows are worked out from the contents


def is_clone(name: str) -> bool:
    """Whether shards of this name are clones, also of clones."""
    return "." in name


def source_of(name: str) -> str:
    """What shards of this name are clones of."""
    return name.rpartition(".")[0]


def life_of(name: str, shard: str) -> str:
    """How histories call the life of a name that has this id."""
    return f"{name}~{incarnation_of(name, shard)}"


@dataclass(frozen=True)
class Taken:
    """What a truncation took away at a time."""

    cut: int
    at: int
    updates: list[Update]


@dataclass
class ShardTruth:
    """What is true of one shard now."""

    name: str
    state: State
    life: str  # as histories call it
    named: set[str] = field(default_factory=set)
    gone_at: dict[str, int] = field(default_factory=dict)
    part_ids: set[str] = field(default_factory=set)
    dead_parts: set[str] = field(default_factory=set)
    updates: list[Update] = field(default_factory=list)
    landed: dict[str, Write | None] = field(default_factory=dict)
    lapsed: set[str] = field(default_factory=set)  # readers that were gone once; one may be registered again, late
    first: int = 1  # the seqno at which the live log begins
    since_asked: Antichain = MINIMUM
    uppers: list[tuple[int | None, int]] = field(default_factory=list)  # each upper and the event that made it
    attributes: AttributeTruth = field(default_factory=AttributeTruth)
    instants: InstantTruth = field(default_factory=InstantTruth)
    erasures: ErasureTruth = field(default_factory=ErasureTruth)
    truncations: list[Taken] = field(default_factory=list)  # that no restore has undone, of either kind
    unwritten: list[Update] = field(default_factory=list)  # those of `updates` that stand for what drops took away

    @property
    def cut(self) -> int:
        """Of the last truncation that was not undone."""
        return self.truncations[-1].cut if self.truncations else 0

    def contents(self, as_of: int) -> Contents:
        total: Contents = {}
        for key, value, time, diff in self.updates:
            if time <= as_of:
                total[key, value] = total.get((key, value), 0) + diff
        return {row: count for row, count in total.items() if count}

    def leading_back(self, as_of: int, time: int) -> list[Update]:
        """The updates at `time` after which the contents are those of `as_of`."""
        then, now = self.contents(as_of), self.contents(time - 1)
        rows = sorted({*then, *now}, key=repr)
        return [(k, v, time, diff) for k, v in rows if (diff := then.get((k, v), 0) - now.get((k, v), 0))]

    def truncating(self, as_of: int, seen: int, time: int) -> list[Update]:
        """The updates at `time` that take away what was there as of `as_of` and still was where the upper was `seen`.

        What truncations took away since is not.
        """
        then, now = self.contents(as_of), self.contents(seen - 1)
        for taken in self.truncations:
            for key, value, _, diff in taken.updates if taken.at > as_of else ():
                then[key, value] = then.get((key, value), 0) + diff
        rows = sorted({*then, *now}, key=repr)
        return [(k, v, time, -gone) for k, v in rows if (gone := min(then.get((k, v), 0), now.get((k, v), 0))) > 0]

    def truncated(self, as_of: int, time: int) -> list[Update]:
        """What a truncation has taken away at `time`. The State tells what it had looked at."""
        seen = [one.seen for one in self.state.truncations if one.before == as_of + 1]
        going, left = self.truncating(as_of, *(seen or [time]), time), self.contents(time - 1)
        short = [row for row in going if left.get(row[:2], 0) + row[3] < 0]
        expect(not short, "truncated", f"{self.name} was truncated at {time}, and {short} had gone since {seen}")
        return going

    def dropping(self, as_of: int, time: int) -> list[Update]:
        """The updates at `time` that stand for a drop: what was written up to `as_of`, and not dropped before."""
        going: Contents = {}
        of_drops = {id(row) for row in self.unwritten}
        written = [row for row in self.updates if row[2] <= as_of and id(row) not in of_drops]
        for key, value, _, diff in (*written, *self.unwritten):
            going[key, value] = going.get((key, value), 0) + diff
        return [(k, v, time, -going[k, v]) for k, v in sorted(going, key=repr) if going[k, v]]

    def check_policy(self, cut: int, now_ms: int) -> None:
        """A truncation by the policy lands: nothing goes that is too young, nor what a consumer has not passed."""
        policy = self.state.settings.rows
        expect(policy is not None, "retained", f"{self.name} is truncated before {cut} by a policy that is not there")
        assert policy is not None

        def is_older(age_ms: int) -> bool:
            return cut <= self.instants.latest(now_ms - age_ms + self.instants.off_ms())

        old = policy.age_ms is not None and is_older(policy.age_ms)
        expect(old, "retained", f"{self.name} is truncated before {cut}, which is younger than {policy}")
        for consumer in policy.consumers:
            hold = self.state.critical_readers.get(critical_reader_id_of(consumer))
            passed = hold is not None and hold.since >= Antichain(cut)
            late = policy.consumers_max_age_ms is not None and is_older(policy.consumers_max_age_ms)
            expect(passed or late, "consumed", f"{self.name} is truncated before {cut}, and {consumer} is at {hold}")

    def between(self, lower: int, upper: int) -> dict[tuple[str, Value, int], int]:
        """Updates with times in `[lower, upper)`, summed."""
        total: dict[tuple[str, Value, int], int] = {}
        for key, value, time, diff in self.updates:
            if lower <= time < upper:
                total[key, value, time] = total.get((key, value, time), 0) + diff
        return {row: count for row, count in total.items() if count}


class Oracle:
    """`tick` numbers everything that happens, so that histories have an order of real time."""

    def __init__(self) -> None:
        self.shards: dict[str, ShardTruth] = {}
        self.states: dict[str, dict[int, State]] = {}  # of each shard, where copies of the blob store are looked at
        self.keeps_states = False
        self.ended: dict[str, ShardTruth] = {}  # by life, of names that were used again
        self.writes: dict[str, Write] = {}  # by token
        self.paths: Counter[str] = Counter()  # how often each path of interest was walked
        self.log: list[str] = []
        self.clock: Callable[[], int] = lambda: 0
        self.blobs: ObservedBlob | None = None
        self.logs: ObservedConsensus | None = None
        self.lists: dict[str, frozenset[str]] = {}  # what each bundle lists that was ever named
        self.orphan_age_ms = 0
        self.clocks_off_ms = 0  # the most that a clock was off which may count as checked
        self.sent_ms: dict[str, int] = {}  # when the command of each token was sent first
        self.registered: dict[str, int] = {}  # readers: when they were first asked for
        self.renewed: dict[str, tuple[int, int]] = {}  # readers: when they asked for what was granted, and the lease
        self.retired: set[str] = set()  # readers that asked to be
        self.definite: dict[str, Callable[[int], list[Update]]] = {}  # shards whose rows follow from their time
        self._tick = 0

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def note(self, text: str) -> None:
        self.log.append(f"{self.clock() % 10_000_000 / 1000:9.3f}s {text}")

    # --- what happened

    def committed(self, name: str, seqno: int, data: bytes) -> None:
        change = decode_diff(data)
        if change.elsewhere is not None:
            assert self.blobs is not None
            change = decode_diff(self.blobs.get(change.elsewhere.key))
            self.paths["long diff"] += 1
        truth = self.shards.get(name)
        if truth is None:
            first = state_diff.apply(change, blank_state(name))
            assert self.blobs is not None
            if self.blobs.stat(change.rollup_key) is not None:  # a creator may sleep for so long that it is swept
                rollup = decode_state(self.blobs.get(change.rollup_key))
                expect(rollup == first, "created", f"the first entry of {name} is not its first rollup")
            self._created(name, first)
            return
        old = truth.state
        new = state_diff.apply(change, old)
        self.note(f"{name} v{int(seqno)} upper {new.upper} since {new.since} {_changes(change)}")
        check_step(old, new)
        check_state(new)
        if new.incarnation != old.incarnation:
            truth = self._next_life(truth, new)
            old = blank_state(name)
        kept = all(new.schemas.get(number) == schema for number, schema in old.schemas.items())
        expect(kept, "schema", f"a schema of {name} changed at v{new.seqno}")
        truth.state = new
        self._keep(new)
        self._check_blobs(truth, new, change)
        if (at := truth.erasures.began(old, new)) is not None:
            truth.instants.asked = max(truth.instants.asked, at)
        self._check_since(truth, old, new)
        self._check_leases(truth, old, new)
        self._land(truth, old, new, change)
        self._check_erased(truth, old, new)
        sent = (self.sent_ms.get(token, 0) for token in _landed(old, change))
        truth.instants.committed(old, new, self.clock(), max(sent, default=0))
        if new.upper != old.upper:
            truth.uppers.append((new.upper.element, self.tick()))
        self._count_paths(old, new, change)

    def _created(self, name: str, first: State) -> None:
        truth = self.shards[name] = ShardTruth(name, first, life_of(name, first.shard_id))
        truth.named = set(first.blob_keys())
        truth.uppers.append((0, self.tick()))
        truth.instants.off_ms = lambda: self.clocks_off_ms
        self.note(f"{name} created")
        self._keep(first)

    def _keep(self, state: State) -> None:
        if self.keeps_states:
            self.states.setdefault(state.name, {})[int(state.seqno)] = state

    def begun(self, name: str, data: bytes) -> None:
        """A log begins with all of a State: that of a clone, or of a name whose clone may not be any more."""
        assert self.blobs is not None
        first = decode_state(self.blobs.get(decode_diff(data).rollup_key))
        self._created(name, first)
        truth = self.shards[name]
        truth.named = self._with_listed(truth.named)
        for key in truth.named:
            self._blob(key, name)
        if first.tombstone:
            self.paths["clone fenced"] += 1
        else:
            self._cloned(truth)

    def _cloned(self, truth: ShardTruth) -> None:
        """It has what its source had written by its upper."""
        source, state = self.shards[source_of(truth.name)], truth.state
        truth.updates = [update for update in source.updates if update[2] < number(state.upper)]
        truth.since_asked = state.since
        truth.uppers = [(state.upper.element, self.tick())]
        truth.part_ids = {part.id for part in state.trace.parts()}
        truth.dead_parts -= truth.part_ids
        self.paths["cloned"] += 1
        self.paths["clone of a clone"] += is_clone(source.name)

    def _next_life(self, truth: ShardTruth, new: State) -> ShardTruth:
        """Nothing is true of the new life; its log and its blobs go on."""
        self.ended[truth.life] = truth
        fresh = ShardTruth(truth.name, new, life_of(truth.name, new.shard_id), truth.named, truth.gone_at)
        fresh.dead_parts, fresh.first = truth.dead_parts | truth.part_ids, truth.first
        fresh.uppers.append((0, self.tick()))
        fresh.instants.off_ms = truth.instants.off_ms
        self.shards[truth.name] = fresh
        self.paths["name used again"] += 1
        if is_clone(truth.name):
            foreign = {key for key in truth.gone_at if is_foreign(key, new.shard_id)}  # they may come again, as lent
            fresh.gone_at = {key: seqno for key, seqno in truth.gone_at.items() if key not in foreign}
            fresh.dead_parts -= {part_id_of(key) for key in foreign if is_part_key(key)}
            self._cloned(fresh)
            self.paths["clone after a drop"] += 1
        return fresh

    def _blob(self, key: str, name: str) -> bytes:
        assert self.blobs is not None
        expect(self.blobs.stat(key) is not None, "reachable", f"{name} names {key}, which is not there")
        return self.blobs.get(key)

    def _check_blobs(self, truth: ShardTruth, new: State, change: state_diff.StateDiff) -> None:
        now = self._with_listed(new.blob_keys())
        for key in now - truth.named:
            expect(key not in truth.gone_at, "single-use", f"{key} left {truth.name} at v{truth.gone_at.get(key)}")
            self._blob(key, truth.name)
        left = truth.named - now
        gone = self._with_listed(change.gone, set(change.emptied))
        passing = {key for key in gone - left if key not in now and key not in truth.gone_at}  # came in this commit
        expect(gone - passing == left, "gone", f"v{new.seqno} says that {gone - left} left, but {left - gone} did")
        self.paths["part came and left"] += len(passing)
        self.paths["bundle left"] += any(map(is_bundle_key, change.gone))
        self.paths["parts bundled"] += any(map(is_bundle_key, now - truth.named))
        for key in left | passing:
            truth.gone_at[key] = int(new.seqno)
        truth.named = now
        begins = truth.first in {int(seqno) for seqno in new.rollups}
        expect(begins, "log", f"the log of {truth.name} begins at v{truth.first}, whose rollup v{new.seqno} forgets")
        parts = {part.id for part in new.trace.parts()} | {part_id_of(key) for key in now if is_part_key(key)}
        back = parts & truth.dead_parts
        expect(not back, "single-use", f"parts {back} came back to {truth.name} at v{new.seqno}")
        truth.dead_parts |= (truth.part_ids - parts) | {part_id_of(key) for key in passing if is_part_key(key)}
        truth.part_ids = set(parts)

    def _with_listed(self, keys: Iterable[str], emptied: Set[str] = frozenset()) -> set[str]:
        """The blobs, and the parts that bundles among them list."""
        assert self.blobs is not None
        found = set(keys)
        for key in sorted(filter(is_bundle_key, found - emptied)):
            if key not in self.lists:
                expect(self.blobs.stat(key) is not None, "reachable", f"{key} is named, and is not there")
                self.lists[key] = frozenset(keys_in(self.blobs, key))
            found |= self.lists[key]
        return found

    def _check_since(self, truth: ShardTruth, old: State, new: State) -> None:
        if new.since != old.since and not (old.settings.keeps_history and new.settings.keeps_history):
            asked = max(number(truth.since_asked), truth.instants.asked)
            if old.settings.history_ms == 0 or new.settings.history_ms == 0:  # since may follow the latest time
                asked = max(asked, number(new.upper) - 1)
            said = f"{truth.name} forgets before {new.since}; asked was at most {asked}"
            expect(number(new.since) <= asked, "since", said)
        for reader_id, reader in new.critical_readers.items():
            expect(new.since <= reader.since, "since", f"{truth.name} forgets what {reader_id} holds")
        for held_id, held in new.leased_readers.items():
            if held.point:  # since may pass it: its time stays readable alone
                continue
            expect(new.since <= held.since, "since", f"{truth.name} forgets what {held_id} holds")

    def _check_leases(self, truth: ShardTruth, old: State, new: State) -> None:
        """No reader is forgotten before its lease has passed. A renewal may be a quarter of it old and still do."""
        truth.lapsed.update(reader for reader in old.leased_readers if reader not in new.leased_readers)
        if new.is_closed or new.incarnation != old.incarnation:
            return
        for reader in old.leased_readers:
            if reader in new.leased_readers or reader in self.retired or reader not in self.renewed:
                continue
            asked_ms, lease_ms = self.renewed[reader]
            silent_ms = self.clock() - asked_ms
            expect(silent_ms >= lease_ms * 3 // 4, "lease", f"{reader} renewed its lease {silent_ms} ms ago")

    def _check_erased(self, truth: ShardTruth, old: State, new: State) -> None:
        for at, proof in truth.erasures.receipts(old, new):
            truth.erasures.check_gone(at, proof, truth.updates, self.stored(), lambda began: self._late(truth, began))
            self.paths["receipt"] += 1

    def stored(self) -> dict[str, bytes]:
        """All bytes of both stores, by where they lie."""
        assert self.blobs is not None
        assert self.logs is not None
        found = {f"blob {key}": data for key, (data, _) in self.blobs._blobs.items()}
        return found | {f"log {key} {no}": data for key, log in self.logs._logs.items() for no, data in log.items()}

    def _late(self, truth: ShardTruth, began_ms: int) -> set[str]:
        """Blobs that came since then, and were never named."""
        assert self.blobs is not None
        known = truth.named | truth.gone_at.keys()
        return {f"blob {k}" for k, (_, at_ms) in self.blobs._blobs.items() if at_ms >= began_ms and k not in known}

    def _land(self, truth: ShardTruth, old: State, new: State, change: state_diff.StateDiff) -> None:
        fresh = _landed(old, change)
        covered = old.upper
        for token, entry in sorted(fresh.items(), key=lambda item: item[1].lower):
            expect(token not in truth.landed, "once", f"token {token} landed twice in {truth.name}")
            write = self.writes.get(token)
            truth.landed[token] = write
            expect(write is not None, "phantom", f"{truth.name} took a command that nobody sent: {token}")
            assert write is not None
            meant = write.shard in (truth.name, truth.life)
            expect(meant, "life", f"#{write.number} of {write.who} was for {write.shard} and landed in {truth.life}")
            again = f"#{write.number} of {write.who} landed at {write.landed}, and again at {entry.lower}"
            expect(write.landed is None, "once", again)
            write.landed = (entry.lower.element, entry.upper.element)
            write.landed_seqno = int(new.seqno)
            lower = entry.lower
            if write.kind == "append":  # another replica may have written it, perhaps in this very commit
                lower, covered = max(lower, covered), max(covered, entry.upper)
            if lower < entry.upper or write.kind != "append":
                self._add_rows(truth, write, lower.element)
        changes = [write.attributes for token in fresh if (write := truth.landed[token]) and write.attributes]
        if changes:
            held = {str(key): value for key, value in new.attributes.items()}
            truth.attributes.land(changes, held, self.tick())
            self.paths["attributes changed"] += len(changes)

    def _add_rows(self, truth: ShardTruth, write: Write, lower: int | None) -> None:
        if truth.name in self.definite:
            assert write.landed is not None
            rows = self.definite[truth.name]
            low, high = lower, write.landed[1]
            assert low is not None
            assert high is not None
            truth.updates += [update for time in range(low, high) for update in rows(time)]
        elif write.kind == "insert":
            assert lower is not None
            truth.updates += [(k, v, lower, d) for k, v, _, d in write.updates]
        elif write.meant is not None:
            assert lower is not None
            going = write.meant.of(truth.contents(lower - 1))
            write.removed = sum(going.values())
            truth.updates += [(k, v, lower, -count) for (k, v), count in sorted(going.items(), key=repr)]
        elif write.as_of is not None:
            assert lower is not None
            assert write.landed is not None
            is_cut = write.kind != "restore"
            again = is_cut and write.as_of < truth.cut
            if write.landed[0] == write.landed[1]:  # it is remembered that there was nothing to do
                kinds = {"drop": truth.dropping, "truncate": truth.truncated, "restore": truth.leading_back}
                left = [] if again else kinds[write.kind](write.as_of, lower)
                expect(not left, "truncated" if is_cut else "restored", f"#{write.number} landed, and left {left}")
                if not again and write.kind == "truncate":
                    truth.truncations.append(Taken(write.as_of + 1, lower, []))
                return
            if write.by_policy:
                truth.check_policy(write.as_of + 1, self.clock())
            expect(not again, "truncated", f"#{write.number} truncated before {write.as_of + 1}, after {truth.cut}")
            if write.kind == "drop":
                truth.unwritten += (going := truth.dropping(write.as_of, lower))
                truth.updates += going
                least = min(truth.contents(lower).values(), default=0)
                expect(least >= 0, "truncated", f"#{write.number} left a row there {least} times, by a drop")
                self.paths["dropped"] += 1
            else:
                going = truth.truncated(write.as_of, lower) if is_cut else truth.leading_back(write.as_of, lower)
                truth.updates += going
            if is_cut:
                truth.truncations.append(Taken(write.as_of + 1, lower, going))
            else:
                truth.truncations = [taken for taken in truth.truncations if taken.at <= write.as_of]
        else:
            truth.updates += write.updates

    def _count_paths(self, old: State, new: State, change: state_diff.StateDiff) -> None:
        paths = self.paths
        writers = change.writers
        if writers:
            paths["writer expired"] += len(writers.deleted)
            if sum(1 for w in writers.set.values() if w.token) > 1:
                paths["group commit"] += 1
        readers = change.leased_readers
        if readers:
            paths["reader gone"] += len(readers.deleted)
        if change.rollups:
            paths["rollup named"] += len(change.rollups.set)
            paths["rollup forgotten"] += len(change.rollups.deleted)
        if change.trace is not None and change.trace.count and change.gone:
            paths["merge applied"] += 1
        if new.since != old.since:
            paths["since moved"] += 1
        paths["history hold moved"] += new.settings.keeps_history and new.history_hold != old.history_hold
        paths["attributes flushed"] += new.attribute_root.flushes - old.attribute_root.flushes
        paths["schema evolved"] += len(new.schemas) - len(old.schemas)
        paths["shard dropped"] += new.is_closed and not old.is_closed
        paths["shard finalised"] += new.tombstone and not old.tombstone
        if any(part.key is not None for b in new.trace.batches[len(old.trace.batches) :] for part in b.parts()):
            paths["blob part appended"] += 1

    def deleted(self, key: str, put_ms: int) -> None:
        """A blob is about to go."""
        truth = next((t for t in self.shards.values() if family_of(t.state.shard_id) == family_of(shard_of(key))), None)
        self.note(f"delete {key}")
        for other in self.shards.values():
            if other is not truth:
                needed = key in other.named or other.gone_at.get(key, 0) > other.first
                expect(not needed, "lent", f"{key} is deleted, and a version of {other.name} that can be read names it")
        if truth is None:
            self.paths["orphan deleted"] += 1
            return
        expect(key not in truth.named, "reachable", f"{key} is deleted although v{truth.state.seqno} names it")
        gone = truth.gone_at.get(key)
        if gone is None:
            age = self.clock() - put_ms
            self.paths["orphan deleted"] += 1
            # Nothing can be committed there any more, or at least not this rollup: another one was.
            # A list of a loan that was not made: who wrote it takes it away. Were it named after all, that would show.
            dead = truth.state.tombstone or shard_of(key) != truth.state.shard_id or _is_late(truth.state, key)
            dead |= is_loan_key(key)
            expect(dead or age >= self.orphan_age_ms, "reachable", f"orphan {key} is deleted at the age of {age} ms")
            return
        held = truth.state.seqno_since
        expect(gone <= held, "leased", f"{key} left at v{gone} and is deleted, but a reader holds v{held}")
        self.paths["blob collected"] += 1

    def truncated(self, name: str, seqno: int) -> None:
        truth = self.shards[name]
        truth.first = seqno
        self.note(f"truncate {name} to v{seqno}")
        self.paths["log truncated"] += 1
        rollup = next((r for s, r in truth.state.rollups.items() if s == seqno), None)
        expect(rollup is not None, "log", f"the log of {name} begins at v{seqno}, where no rollup is")
        assert rollup is not None
        self._blob(rollup.key, name)


def _changes(change: state_diff.StateDiff) -> str:
    changed = [(name, getattr(change, name)) for name in state_diff.MAPPINGS]
    said = [f"{name}+{len(entries.set)}-{len(entries.deleted)}" for name, entries in changed if entries]
    if change.trace is not None:
        new = ",".join(str(batch.desc) for batch in change.trace.batches)
        said.append(f"trace@{change.trace.first}-{change.trace.count}+{new}")
    if change.gone:
        said.append(f"gone {len(change.gone)}")
    return " ".join(said)


class ObservedBlob(MemoryBlob):
    """A store that shows every deletion to the oracle before it happens."""

    def __init__(self, oracle: Oracle, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms=now_ms)
        self._oracle = oracle
        oracle.blobs = self

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            found = self.stat(key)
            if found is not None:
                self._oracle.deleted(key, found.modified_ms)
        super().delete(keys)


class ObservedConsensus(MemoryConsensus):
    """A store that shows every commit and truncation to the oracle as it happens."""

    def __init__(self, oracle: Oracle, value_bytes_max: int) -> None:
        super().__init__(value_bytes_max=value_bytes_max)
        self._oracle = oracle
        oracle.logs = self

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        won = super().compare_and_set(key, seqno, data, after)
        if won and not key.startswith(HIDDEN):
            self._oracle.committed(key, seqno, data)
        return won

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        won = super().begin(key, seqno, data)
        if won and not key.startswith(HIDDEN):
            self._oracle.begun(key, data)
        return won

    def truncate(self, key: str, seqno: int) -> int:
        deleted = super().truncate(key, seqno)
        if deleted:
            self._oracle.truncated(key, seqno)
        return deleted


__all__ = [
    "Contents",
    "ObservedBlob",
    "ObservedConsensus",
    "Oracle",
    "Row",
    "ShardTruth",
    "Update",
    "Value",
    "Violation",
    "Write",
]


def _landed(old: State, change: state_diff.StateDiff) -> dict[str, WriterState | TokenOutcome]:
    """What landed with a commit, by its token: with a registered writer, or by itself."""
    fresh: dict[str, WriterState | TokenOutcome] = {}
    for writer_id, entry in (change.writers.set if change.writers else {}).items():
        before = old.writers.get(writer_id)
        if entry.token is not None and (before is None or before.token != entry.token):
            fresh[str(entry.token)] = entry
    for key, outcome in (change.outcomes.set if change.outcomes else {}).items():
        if outcome.digest not in (RETIRED, ENDED):  # these tell of what landed before
            fresh[f"i{key}"] = outcome
    return fresh


def _is_late(state: State, key: str) -> bool:
    """Whether this rollup can be named no more: one of the same version or of a later one is."""
    return is_rollup_key(key) and rollup_seqno(key) <= max(state.rollups)
