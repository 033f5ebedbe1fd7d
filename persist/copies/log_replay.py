"""Whether the log of a shard leads from its oldest rollup to its State, step by step, and past each other rollup.

Each entry is read by itself, so that one that is damaged is named. Memory: one State, a page of the log, and what left
the State in the live log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from persist.commit.state_loader import Versions
from persist.copies.shard_checks import Kind
from persist.core import invariants, state_diff
from persist.core.errors import Corruption, HistoryLost
from persist.core.ids import SeqNo, shard_id_of
from persist.core.named_holds import is_foreign
from persist.core.state import State
from persist.core.state_diff import StateDiff
from persist.formats.store_errors import translated

SCAN_LIMIT = 1_000  # log entries that are read at once
SCANS_MAX = 10_000  # of one log; one with more entries cannot be loaded either

Note = Callable[[Kind, str, str], None]  # what is wrong, and the key of the blob


@dataclass
class Replay:
    """Replays the log of one shard. What is wrong is noted; `gone` are the blobs that left the State meanwhile."""

    versions: Versions
    name: str
    note: Note
    gone: set[str] = field(default_factory=set)
    _made: State | None = None
    _last: SeqNo | None = None  # of the entry before
    _keys: dict[SeqNo, str] = field(default_factory=dict)  # of the rollups that can be read

    def run(self, state: State | None) -> set[str]:
        """Up to `state`, the one that the shard shows; None: it cannot be loaded, so the log alone is looked at.

        Raises Unavailable.
        """
        rollups = {} if state is None else self._rollups(state)
        is_first, following = True, SeqNo(1)
        for _ in range(SCANS_MAX):
            with translated():
                page = self.versions.consensus.scan(self.name, int(following), SCAN_LIMIT)
            if not page:
                break
            for entry in page:
                seqno = SeqNo(entry.seqno)
                if is_first and state is not None and seqno not in state.rollups:
                    self._say(Kind.ROLLUP, f"the log begins at v{seqno}, of which the shard names no rollup")
                is_first = False
                if state is not None and seqno > state.seqno:
                    break  # the shard has moved on meanwhile
                if not self._follow(seqno, entry.data, rollups.get(seqno)):
                    return self.gone
            following = SeqNo(page[-1].seqno + 1)
        self._compare(state)
        return self.gone

    def _say(self, kind: Kind, what: str, key: str = "") -> None:
        self.note(kind, what, key)

    def _follow(self, seqno: SeqNo, data: bytes, held: State | None) -> bool:
        """Take the next entry. False: nothing can be said of what comes after it."""
        if self._last is not None and seqno != self._last + 1:
            self._say(Kind.LOG, f"the log goes from v{self._last} to v{seqno}: entries are not there")
            return False
        self._last = seqno
        try:
            change = self.versions.whole(self.name, self.versions.decode(data))
            if change.seqno != seqno:
                raise Corruption(f"it holds the state diff v{change.seqno}")
            made = None if self._made is None else state_diff.apply(change, self._made)
        except (Corruption, HistoryLost) as error:
            self._say(Kind.LOG, f"the log entry v{seqno} cannot be followed: {error.message}")
            return False
        self._step(change, made)
        self.gone.update(change.gone)
        if made is not None and held is not None and made != held:
            what = f"the rollup v{seqno} holds another State than the log: {_differing(made, held)}"
            self._say(Kind.ROLLUP, what, self._keys[seqno])
        self._made = held if made is None else made
        return True

    def _step(self, change: StateDiff, made: State | None) -> None:
        """That no frontier moves back, and that no blob comes back which had left.

        One of another shard may: a clone of that name is dropped, and the next one borrows it too.
        """
        added = () if change.trace is None else [key for batch in change.trace.batches for key in batch.blob_keys()]
        for key in added:
            if key in self.gone and not is_foreign(key, shard_id_of(self.name)):
                self._say(Kind.STEP, f"the commit v{change.seqno} names a blob that had left the shard", key)
        if made is None or self._made is None:
            return
        try:
            invariants.check_step(self._made, made)
        except Corruption as error:
            self._say(Kind.STEP, f"the commit v{change.seqno} breaks a promise: {error.message}")

    def _compare(self, state: State | None) -> None:
        if state is None:
            return
        if self._made is None:
            self._say(Kind.ROLLUP, "no rollup can be read from which its log goes on")
        elif self._made.seqno < state.seqno:
            self._say(Kind.LOG, f"the log ends at v{self._made.seqno}, before v{state.seqno}")
        elif self._made != state:
            differing = _differing(self._made, state)
            self._say(Kind.LOG, f"the log makes another v{state.seqno} than the newest rollup: {differing}")

    def _rollups(self, state: State) -> dict[SeqNo, State]:
        """The rollups that the State names, as far as they can be read. One that is missing is found by the listing."""
        found = {}
        for seqno, rollup in sorted(state.rollups.items()):
            try:
                held = self.versions.read_rollup(rollup.key)
            except Corruption as error:
                self._say(Kind.ROLLUP, f"the rollup v{seqno} cannot be read: {error.message}", rollup.key)
                continue
            if held is None:
                continue
            if (held.name, held.seqno) != (state.name, seqno):
                what = f"the rollup v{seqno} holds v{held.seqno} of shard {held.name!r}"
                self._say(Kind.ROLLUP, what, rollup.key)
                continue
            found[seqno], self._keys[seqno] = held, rollup.key
        return found


def _differing(one: State, other: State) -> str:
    """The fields in which two States differ."""
    names = [name for name in type(one).__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return ", ".join(names)
