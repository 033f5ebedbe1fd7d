"""From the consensus log and the rollups to a State: the newest rollup, then the state diffs; and making rollups.

Opening costs one head, one blob, one bounded scan and one listing of rollups, whatever the number of commits.

Two histories are never mixed. A log may lose its newest entries (failover to a replica that lacks them, a restored
backup) and then grow differently. Each entry names the commit before it, and a State names its own; every read
that continues from a State begins with the entry of that State, and compares the commit ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from blob import Blob, BlobNotFound
from consensus import Consensus
from persist.commit.location_identity import Identity, raise_format, read_format
from persist.commit.validation_receipts import Receipts
from persist.core import commands as c
from persist.core import state_diff
from persist.core.blob_keys import is_rollup_key, loan_key, rollup_key, rollup_seqno, rollups_prefix
from persist.core.errors import (
    Corruption,
    HistoryLost,
    Indeterminate,
    InvalidUsage,
    PersistError,
    ReadOnly,
    Unavailable,
)
from persist.core.ids import IdSource, SeqNo, ShardId, shard_id_of
from persist.core.named_holds import LentKeys
from persist.core.record import replace
from persist.core.state import Rollup, State, blank_state
from persist.core.state_diff import StateDiff
from persist.formats.state_frames import (
    HEAD_BYTES,
    Build,
    decode_diff,
    decode_state,
    encode_diff,
    encode_lent,
    encode_state,
    format_of,
)
from persist.formats.store_errors import translated, translated_but_missing
from persist.parts.part_files import DecodeLimit

KEPT_MAX = 96 * 1024 * 1024  # bytes of untrusted row groups that are read together
PASSING_MAX = 160 * 1024 * 1024  # additional bytes while they are decoded
FIRST = SeqNo(1)
SCAN_LIMIT = 1_000  # entries a scan
LOAD_TRIES_MAX = 100  # each failed try means that a newer rollup has appeared meanwhile
LOAD_SCANS_MAX = 10_000  # a log with more entries than these scans return cannot be loaded
ENDS_MAX = 20_000  # shards of which the last log entry is known
COMMITS_MAX = 20_000  # commits whose ids are remembered, of all shards together
CATCH_UP_SCANS_MAX = 2  # beyond this, loading a newer rollup is cheaper
ROLLUPS_LISTED_MAX = 10_000  # looked at for one beyond the log's head, when a shard is loaded


class LogCut(Unavailable):
    """A log entry was cut while it was read."""


class Versions:
    """Reads and writes the versions of shards at one location. Thread-safe.

    It caches the location's format version and, for each shard, the beginning of the log entry of the newest State that
    it has read or written. `identity` checks that the two stores belong together before anything is loaded or written.
    """

    def __init__(self, blob: Blob, consensus: Consensus, ids: IdSource, build: Build, identity: Identity) -> None:
        self.blob = blob
        self.consensus = consensus
        self.receipts = Receipts(consensus, ids)
        self.bound = DecodeLimit(KEPT_MAX, PASSING_MAX)  # of untrusted row groups
        self._ids = ids
        self.build = build
        self.identity = identity
        self._format = 0  # the highest version in a frame so far
        self._format_read = 0  # the version of the location; 0: not read yet
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._commits: OrderedDict[tuple[str, int], str] = OrderedDict()

    @property
    def format_version(self) -> int:
        """The format version to write. A frame of a higher version shows that it was raised meanwhile."""
        if not self._format_read:
            version = read_format(self.blob, self.build)
            if version < self.build.newest and self._is_new():
                version = raise_format(self.blob, self.build)[1]
            self._format_read = version
        return max(self._format_read, self._format)

    def encode(self, change: StateDiff, ends: bool = False) -> bytes:
        """The log entry of a state diff. `ends`: the shard is dropped after it.

        ReadOnly: this process may only read. Diffs that only move holds are encoded all the same.
        """
        if not state_diff.only_holds(change):
            self.identity.check_writable()
        return encode_diff(change, self.format_version, ends=ends)

    def decode(self, data: bytes) -> StateDiff:
        """The state diff of a log entry."""
        change = decode_diff(data, self.build)
        self._format = max(self._format, format_of(data))
        return change

    def load(self, name: str) -> State | None:
        """The current State, or None if there is no shard of that name.

        Corruption: the log has lost entries, as a newer rollup in the blob store shows.
        """
        self.identity.check()
        for _ in range(LOAD_TRIES_MAX):
            with translated():
                head = self.consensus.head(name)
            if head is None:
                self._check_log(name, shard_id_of(name), FIRST)
                return None
            newest = self.decode(head.data)
            state = self._rollup(name, newest) or self._first(name, newest)
            if state is None:
                continue
            try:
                tail = self._tail(state, LOAD_SCANS_MAX)
            except HistoryLost as error:
                raise Corruption(
                    f"rollup {newest.rollup_key} holds another v{state.seqno} of shard {name!r} than the log; restore "
                    "both stores from one backup"
                ) from error
            if tail is not None and tail.seqno >= newest.seqno:
                self._check_log(name, tail.shard_id, tail.seqno)
                return tail
        raise Corruption(
            f"the rollup that the newest state diff of shard {name!r} names is missing. Restore both stores from one "
            "backup, or rebuild the log from the blob store by `persist backup recover` and an empty consensus store"
        )

    def catch_up(self, state: State) -> State:
        """The current State, from an earlier one. HistoryLost: the earlier State is not in this log's history."""
        caught_up = self._tail(state, CATCH_UP_SCANS_MAX)
        if caught_up is not None:
            return caught_up
        loaded = self.load(state.name)
        if loaded is None or loaded.seqno < state.seqno:
            raise _lost(state, "ends before it")
        return loaded

    def diffs(self, name: str, first: SeqNo, limit: int) -> list[StateDiff]:
        """The live state diffs from `first` on, ascending, at most `limit`, as they are in the log.

        `whole` reads a long one from its blob.
        """
        return [change for change, _ in self._entries(name, first, limit)]

    def whole_diffs(self, name: str, after: SeqNo) -> Iterator[StateDiff]:
        """The live state diffs after that version, ascending, long ones read from their blobs. Raises as `whole`."""
        while page := self.diffs(name, SeqNo(after + 1), SCAN_LIMIT):
            for change in page:
                yield self.whole(name, change)
            after = page[-1].seqno

    def _entries(self, name: str, first: SeqNo, limit: int) -> list[tuple[StateDiff, bytes]]:
        """As `diffs`, each with the bytes of its log entry."""
        with translated():
            entries = self.consensus.scan(name, int(first), limit)
        return [(self.decode(entry.data), entry.data) for entry in entries]

    def whole(self, name: str, change: StateDiff) -> StateDiff:
        """The state diff, read from its blob if the log entry only refers to it.

        Raises LogCut: its log entry was truncated meanwhile, and its blob collected. Corruption: only its blob is gone.
        """
        if change.elsewhere is None:
            return change
        key = change.elsewhere.key
        try:
            with translated_but_missing():
                diff = self.decode(self.blob.get(key))
        except BlobNotFound as error:
            live = self.diffs(name, change.seqno, 1)
            if live and live[0].seqno == change.seqno:
                raise Corruption(f"the state diff v{change.seqno} of shard {name!r} is missing: {key}") from error
            raise LogCut(f"the state diff v{change.seqno} of shard {name!r} was collected meanwhile; retry") from error
        if (diff.seqno, diff.commit_id) != (change.seqno, change.commit_id):
            raise Corruption(f"blob {key} holds another state diff than v{change.seqno} of shard {name!r}")
        return diff

    def ends(self, name: str, commit_id: str, data: bytes) -> None:
        """Note that the newest State of this shard was made by this commit, with this log entry."""
        with self._lock:
            self._ends[name] = commit_id, data[:HEAD_BYTES]
            self._ends.move_to_end(name)
            if len(self._ends) > ENDS_MAX:
                self._ends.popitem(last=False)

    def note(self, state: State) -> None:
        """Remember the commit id of this State, which is in the log."""
        with self._lock:
            self._commits[state.name, state.seqno] = state.commit_id
            if len(self._commits) > COMMITS_MAX:
                self._commits.popitem(last=False)

    def commit_at(self, name: str, seqno: SeqNo) -> str | None:
        """The id of the commit that made this version; None if its log entry was truncated."""
        with self._lock:
            known = self._commits.get((name, seqno))
        if known is not None:
            return known
        with translated():
            entries = self.consensus.scan(name, int(seqno), 1)
        return self.decode(entries[0].data).commit_id if entries and entries[0].seqno == seqno else None

    def beginning(self, name: str, commit_id: str) -> bytes:
        """The beginning of the log entry of this commit; empty if another State of the shard was read since."""
        with self._lock:
            known = self._ends.get(name)
        return known[1] if known is not None and known[0] == commit_id else b""

    def read_rollup(self, key: str) -> State | None:
        """The State in a rollup; None if the rollup is gone."""
        try:
            with translated_but_missing():
                return decode_state(self.blob.get(key), self.build)
        except BlobNotFound:
            return None
        except Corruption as error:
            raise type(error)(error.message, **error.details, blob=key) from error

    def create(self, state: State, commit_id: str) -> tuple[bytes, State]:
        """The first log entry of a shard (not committed yet) and its State, whose rollup is written.

        The State v1 names its own rollup, so the log begins with a rollup. The entry is the change from the blank
        State, so that it can replace the rollup, which may be swept if this process pauses before the commit. For the
        same reason it is never a long diff. InvalidUsage: the schema is too large for one log entry.
        """
        self.identity.check_writable()
        key = rollup_key(state.shard_id, state.seqno, self._ids)
        named = replace(state, rollups={**state.rollups, state.seqno: Rollup(key, 0)}, commit_id=commit_id)
        first = state_diff.diff(blank_state(state.name), named, commit_id)
        entry = self.encode(first)
        if len(entry) > self.consensus.value_bytes_max:
            raise InvalidUsage(
                f"the schema of shard {state.name!r} is too large: it takes {len(entry)} bytes in the log, and "
                f"{self.consensus.value_bytes_max} are possible; create the shard with fewer columns, then add the "
                "others with evolve_schema"
            )
        self.write_rollup(named, key)
        return entry, named

    def begin(self, state: State, key: str = "") -> bool:
        """Begin the log of a name that has none at this State, which names no rollup.

        The blobs that it names must be in the blob store. False: the name has a log, and nothing was changed. A retry
        with the same State is safe; with the same `key` it leaves no second rollup, which a copy of the blob store
        could mistake for the one that the log names. Raises Unavailable, Indeterminate (it may have happened).
        """
        self.identity.check_writable()
        with translated():
            if self.consensus.head(state.name) is not None:
                begun = self.is_begun(state)
            else:
                key = key or rollup_key(state.shard_id, state.seqno, self._ids)
                named = replace(state, rollups={state.seqno: Rollup(key, 0)})
                self.write_rollup(named, key)
                data = self._beginning(named)
                begun = self.consensus.begin(state.name, int(state.seqno), data) or self.is_begun(state)
        if begun:
            self.check_begun(state.name)
        return begun

    def check_begun(self, name: str) -> None:
        """After the first commit of a log: check whether another home has taken over.

        That home may have listed the logs before the commit, and would not know the shard. Raises Indeterminate: this
        cannot be determined now; ReadOnly: a home has taken over, and the new shard exists only here.
        """
        try:
            self.identity.check_home()
        except ReadOnly:
            raise
        except PersistError as error:  # never a definite failure: a caller would take its loans back
            raise Indeterminate(f"shard {name!r} may have been created; check, then retry: {error}") from error
        self.identity.check_writable()

    def _beginning(self, named: State) -> bytes:
        """The log entry with which a log begins at this State. An entry of v1 can replace its rollup, as in `create`,
        unless it is too long for the log.
        """
        ends = named.is_closed
        if named.seqno == FIRST:
            data = self.encode(state_diff.diff(blank_state(named.name), named, named.commit_id), ends)
            if len(data) <= self.consensus.value_bytes_max:
                return data
        seqno, [rollup] = named.seqno, named.rollups.values()
        entry = StateDiff(
            seqno=seqno,
            walltime_ms=named.walltime_ms,
            commit_id=named.commit_id,
            rollup_seqno=seqno,
            rollup_key=rollup.key,
            features=named.features or None,
        )
        return self.encode(entry, ends)

    def is_begun(self, state: State) -> bool:
        """Whether an earlier try to begin the log at this State has succeeded."""
        first = self.diffs(state.name, state.seqno, 1)
        return bool(first) and (first[0].seqno, first[0].commit_id) == (state.seqno, state.commit_id)

    def before(self, name: str, held: SeqNo, is_later: Callable[[State], bool]) -> State:
        """The last State, from `held` on, before the first one for which `is_later` is true.

        Raises Corruption: the log does not go back to `held`, which a reader holds.
        """
        newest = self.load(name)
        rollups = sorted(seqno for seqno in newest.rollups if seqno <= held) if newest is not None else []
        state = self.read_rollup(newest.rollups[rollups[-1]].key) if newest is not None and rollups else None
        if newest is None or state is None:
            raise Corruption(f"the log of shard {name!r} does not go back to v{held}, which a reader holds")
        while page := self.diffs(name, SeqNo(state.seqno + 1), SCAN_LIMIT):
            for short in page:
                following = state_diff.apply(self.whole(name, short), state)
                if following.seqno > held and is_later(following):
                    return state
                state = following
        return state

    def write_rollup(self, state: State, key: str = "") -> tuple[str, int]:
        """Write the State to a new blob; return its key and size, to be named by an AddRollup."""
        self.identity.check_writable()
        key = key or rollup_key(state.shard_id, state.seqno, self._ids)
        data = encode_state(state, self.format_version)
        with translated():
            self.blob.put(key, data)
        return key, len(data)

    def write_lent(self, shard: ShardId, keys: tuple[str, ...]) -> str:
        """Write a list of blobs of this shard to a new blob, to be named by a loan; return its key."""
        self.identity.check_writable()
        key, data = loan_key(shard, self._ids), encode_lent(LentKeys(keys), self.format_version)
        with translated():
            self.blob.put(key, data)
        return key

    def _is_new(self) -> bool:
        with translated():
            return not self.consensus.keys("", "", 1)

    def _rollup(self, name: str, newest: StateDiff) -> State | None:
        state = self.read_rollup(newest.rollup_key)
        if state is not None and state.name != name:  # the message omits that name: the caller may not know that shard
            raise Corruption(
                f"rollup {newest.rollup_key} of shard {name!r} holds the State of another shard", blob=newest.rollup_key
            )
        if state is not None and state.seqno != newest.rollup_seqno:
            raise Corruption(
                f"rollup {newest.rollup_key} holds v{state.seqno}, not v{newest.rollup_seqno}", blob=newest.rollup_key
            )
        return state

    def _first(self, name: str, newest: StateDiff) -> State | None:
        """The State v1 from the first log entry, if no later rollup is named and the entry is still there."""
        if newest.rollup_seqno != FIRST:
            return None
        diffs = self.diffs(name, FIRST, 1)
        if not diffs or diffs[0].seqno != FIRST or diffs[0].schemas is None:
            return None
        return state_diff.apply(self.whole(name, diffs[0]), blank_state(name))

    def _tail(self, state: State, scans_max: int) -> State | None:
        """The State after all live diffs. None if the log begins after `state`, or needs more scans.

        Every scan begins with the entry of the State itself, whose commit id is compared. HistoryLost: it differs.
        """
        for _ in range(scans_max):
            page = self._entries(state.name, state.seqno, SCAN_LIMIT)
            if not page:
                raise _lost(state, "ends before it")
            own = page[0][0]
            if own.seqno != state.seqno:
                break
            if own.commit_id != state.commit_id:
                raise _lost(state, "has another commit there")
            try:
                for change, _ in page[1:]:
                    state = state_diff.apply(self.whole(state.name, change), state)
            except LogCut:
                break
            if len(page) < SCAN_LIMIT:
                self.ends(state.name, state.commit_id, page[-1][1])
                return state
        return None

    def _check_log(self, name: str, shard_id: ShardId, head: SeqNo) -> None:
        """Raise Corruption if the blob store has a rollup of a State beyond the head of the log.

        A rollup is written after its State is in the log; only the first one is written before.
        """
        with translated():
            listed = islice(self.blob.list(rollups_prefix(shard_id)), ROLLUPS_LISTED_MAX)
            newest = max((rollup_seqno(stat.key) for stat in listed if is_rollup_key(stat.key)), default=head)
            if newest <= head:
                return
            entry = self.consensus.head(name)  # other processes may have committed meanwhile
        if entry is None or entry.seqno < newest:
            self.identity.confirm()  # raises ReadOnly, where another consensus store has taken over
            ends = f"ends at v{entry.seqno}" if entry is not None else "is empty"
            raise Corruption(
                f"the log of shard {name!r} {ends}, but the blob store has a rollup of v{newest}: the consensus store "
                "has lost commits. Restore a newer backup of it, or rebuild the log from the blob store by `persist "
                "backup recover` and an empty consensus store"
            )


def _lost(state: State, why: str) -> HistoryLost:
    return HistoryLost(
        f"this process has read v{state.seqno} of shard {state.name!r}, and the log {why}: the consensus store has "
        "lost commits. This process refuses this shard from now on, since two histories would be mixed. Restore the "
        "commits, or restart this process to continue without them"
    )


# Rollups: writing them, and checking that one can be read back and agrees with the log, before the log entries that it
# replaces are deleted.
#
# Two processes may write a rollup of one State, of which one is named. The other process deletes its blob: otherwise
# the sweep would find it only a day later, and an erasure could not be proved until then.


def rolled_up(versions: Versions, state: State, apply: Callable[[c.Command], c.Result]) -> bool:
    """Write the State as a rollup and name it; return whether it is named. Raises the errors of the stores.

    After an error it may be named, so its blob is kept.
    """
    command = c.AddRollup(state.seqno, *versions.write_rollup(state))
    result = apply(command)
    dropped(versions, command, result)
    return result == c.RollupAdded(True)


def dropped(versions: Versions, command: c.Command, result: c.Result) -> None:
    """Delete the rollup of a command that the shard has refused.

    It is never named later, since another rollup of its seqno, or a newer one, is named.
    """
    if isinstance(command, c.AddRollup) and result == c.RollupAdded(False):
        with suppress(PersistError), translated():  # the sweep finds it
            versions.blob.delete([command.key])


def read_back(versions: Versions, state: State, seqno: SeqNo) -> State | None:
    """The State in the rollup that `state` names for this seqno; None: the rollup is gone.

    Raises Corruption if it cannot be decoded, or is of another seqno or commit than the log entry.
    """
    key = state.rollups[seqno].key
    rollup = versions.read_rollup(key)
    if rollup is None:
        return None
    if (rollup.seqno, rollup.name) != (seqno, state.name):
        raise Corruption(f"rollup {key} holds v{rollup.seqno} of shard {rollup.name!r}, not v{seqno} of {state.name!r}")
    logged = versions.diffs(state.name, seqno, 1)
    if logged and logged[0].seqno == seqno and logged[0].commit_id != rollup.commit_id:
        raise Corruption(f"rollup {key} holds another v{seqno} of shard {state.name!r} than its log")
    return rollup


def check_replayed(versions: Versions, state: State, first: SeqNo, seqno: SeqNo) -> bool:
    """Whether the rollup of `seqno` is there. It is compared with the rollup of `first` plus the log entries up to it.

    Raises Corruption if they differ. If the rollup of `first` cannot be read, the one of `seqno` is only read back.
    Reads `seqno - first` log entries.
    """
    held = read_back(versions, state, seqno)
    if held is None:
        return False
    made = None
    with suppress(Corruption):
        made = read_back(versions, state, first) if first in state.rollups else None
    while made is not None and made.seqno < seqno:
        page = versions.diffs(state.name, SeqNo(made.seqno + 1), min(SCAN_LIMIT, seqno - made.seqno))
        if not page or page[0].seqno != made.seqno + 1:
            return True  # another collector has cut the log meanwhile
        for change in page:
            made = state_diff.apply(versions.whole(state.name, change), made)
    if made is not None and decode_state(encode_state(made), versions.build) != held:
        raise Corruption(
            f"rollup {state.rollups[seqno].key} of shard {state.name!r} differs from the State that its log leads to; "
            "the log is not truncated"
        )
    return True
