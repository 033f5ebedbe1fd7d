"""States of a shard as far as they can be made: the newest one, or that of any version which the log still has.

Where the rollup that the log names cannot be read, an older one is tried, and the log is replayed from there. Where an
entry cannot be read, the State before it is the last one that is known for sure. Both are findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from persist.commit.state_loader import FIRST
from persist.core import state_diff
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.errors import Corruption, InvalidUsage, NotReadable, PersistError, UpgradeNeeded
from persist.core.ids import family_of, shard_id_of
from persist.core.record import replace
from persist.core.state import State, blank_state
from persist.formats.store_errors import translated
from persist.inspect.documents import Findings, instant
from persist.inspect.log_listing import first_live, head_of, walked
from persist.inspect.readonly_location import Look

TRIES = 4  # looks at a shard that moves on meanwhile


@dataclass(frozen=True, slots=True)
class Seen:
    """What could be made of a shard. `head` is the newest seqno of its log, `state` the newest State (None: none)."""

    name: str
    head: int
    state: State | None
    findings: Findings

    def known(self) -> State:
        """The State. Raises Corruption: none can be made."""
        if self.state is None:
            why = "; ".join(dict.fromkeys(one.what for one in self.findings))
            raise Corruption(f"no State of shard {self.name!r} can be made: {why}")
        return self.state


def newest(look: Look, name: str) -> Seen:
    """The newest State that can be made. Raises UnknownShard, Unavailable, Corruption (the store itself is damaged)."""
    head, findings = head_of(look, name), Findings(name)
    for left in range(TRIES, -1, -1):
        try:
            state = look.versions.load(name)
            if state is not None:
                return Seen(name, max(head, int(state.seqno)), state, findings)
        except (Corruption, UpgradeNeeded) as error:
            moved = head_of(look, name)
            if moved == head or not left:
                blob = error.details.get("blob")  # of a rollup: the blob is damaged, not the log
                findings.note(f"the rollup cannot be read: {error.message}" if blob else error.message, blob)
                break
            head = moved
    found = _made(look, name, head, findings)
    if found is not None and found.seqno < head:
        findings.note(f"v{found.seqno} is shown: no later State can be made, and the log ends at v{head}")
    return Seen(name, head, found, findings)


def at_version(look: Look, name: str, seqno: int) -> Seen:
    """The State of that version. Raises NotReadable: the log does not have it any more, InvalidUsage: not yet."""
    head = head_of(look, name)
    if not 0 < seqno < 2**63:
        raise InvalidUsage(f"version {seqno} is none: versions are in [1, {2**63 - 1}]")
    if seqno > head:
        raise InvalidUsage(f"shard {name!r} has no v{seqno} yet: its log ends at v{head}")
    findings = Findings(name)
    state = _made(look, name, seqno, findings)
    if state is None or state.seqno != seqno:
        first = first_live(look, name)
        if findings:
            return Seen(name, head, None, findings)
        raise NotReadable(f"v{seqno} of shard {name!r} is not there any more: its log begins at v{first}")
    return Seen(name, head, state, findings)


def version_at(look: Look, name: str, at_ms: int) -> int:
    """The last version that was committed by that instant, by its committer's clock. Raises NotReadable."""
    head_of(look, name)
    found: int | None = None
    earliest: int | None = None
    for logged in walked(look, name):
        if logged.change is None:
            continue
        earliest = logged.change.walltime_ms if earliest is None else min(earliest, logged.change.walltime_ms)
        if logged.change.walltime_ms <= at_ms:
            found = logged.seqno
    if found is None:
        raise NotReadable(f"the log of shard {name!r} has no version of then: it begins at {instant(earliest)}")
    return found


def _made(look: Look, name: str, target: int, findings: Findings) -> State | None:
    """The State of a version, or the last one before it that can be made."""
    best: State | None = None
    for base in _bases(look, name, target, findings):
        found = _replayed(look, base, target, findings)
        if found is None:
            continue
        if found.seqno == target:
            return found
        if best is None or found.seqno > best.seqno:
            best = found
    return best


def _bases(look: Look, name: str, target: int, findings: Findings) -> Iterator[State]:
    """States in rollups at or before a version, newest first; at last the first one of all, if the log has it."""
    family = family_of(shard_id_of(name))
    with translated():
        listed = [stat.key for stat in look.blob.list(family) if belongs_to(stat.key, shard_of(stat.key))]
    keys = sorted((rollup_seqno(key), key) for key in listed if is_rollup_key(key))
    for seqno, key in reversed(keys):
        if seqno > target:
            continue
        try:
            state = look.versions.read_rollup(key)
        except (Corruption, UpgradeNeeded) as error:
            findings.note(f"rollup v{seqno} cannot be read: {error.message}", key)
            continue
        if state is None or state.name != name:
            continue
        if state.seqno != seqno:
            findings.note(f"rollup v{seqno} holds the State v{state.seqno}", key)
            continue
        yield state
    begins = next(walked(look, name, 1, 1), None)
    if begins is not None and begins.change is not None and begins.change.schemas is not None:
        yield state_diff.apply(begins.change, blank_state(name))


def _replayed(look: Look, base: State, target: int, findings: Findings) -> State | None:
    """The State of a version, or the last one before it that the log leads to. None: the log leads nowhere from there.

    A base that is not of this log, as after a lost race, leads nowhere.
    """
    state, is_known = base, base.seqno == FIRST and not base.rollups
    for logged in walked(look, base.name, int(base.seqno), target):
        change = logged.change
        if change is None:
            findings.note(logged.wrong or "")
            return state if is_known else None
        if change.seqno == base.seqno:
            if base.commit_id and change.commit_id != base.commit_id:
                return None
            state, is_known = replace(state, commit_id=change.commit_id), True
            continue
        if change.seqno != state.seqno + 1:
            return None  # the log begins later
        try:
            state = state_diff.apply(change, state)
        except PersistError as error:
            findings.note(error.message)
            return state if is_known else None
        is_known = True
    return state if is_known else None


class Rechecked:
    """Tells whether what was named by a State, and is not there, is missing: the shard may have moved on meanwhile.

    A key never comes back. So what the newest State does not name was taken away as it should be.
    """

    def __init__(self, look: Look, state: State) -> None:
        self._look = look
        self._seqno = int(state.seqno)
        self._name = state.name
        self._keys: frozenset[str] | None = None  # None: what the State itself names

    @property
    def has_moved(self) -> bool:
        """Whether the shard has a later version than the State."""
        return self._keys is not None or head_of(self._look, self._name) > self._seqno

    def is_named(self, key: str) -> bool:
        """Whether the newest State names this blob itself, which the State named. Raises what `newest` raises."""
        head = head_of(self._look, self._name)
        if head > self._seqno:
            found = newest(self._look, self._name)
            if found.state is None:
                return True
            self._keys, self._seqno = frozenset(found.state.blob_keys()), int(found.state.seqno)
        return self._keys is None or key in self._keys


def named(look: Look, state: State) -> State:
    """The State with the names of other shards as who looks may see them."""
    if not look.prefixes:
        return state
    loans = {key: replace(loan, borrower=look.shown_name(loan.borrower)) for key, loan in state.loans.items()}
    return replace(state, loans=loans, borrowed={key: look.shown_name(owner) for key, owner in state.borrowed.items()})


def named_shard(look: Look, key: str) -> str | None:
    """The name of the shard to which a well-formed blob key belongs, in whichever life. None: no log has it."""
    family = family_of(shard_of(key))
    return next((name for name in look.names() if family_of(shard_id_of(name)) == family), None)


def seqno_of(text: object) -> int:
    """A version as it is written, `v12` or `12`. Raises InvalidUsage."""
    digits = text.removeprefix("v") if isinstance(text, str) else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19):
        raise InvalidUsage(f"{text!r:.60} is no version; give a number such as 12, or v12")
    return int(digits)
