"""What a copy of a blob store tells by itself: of each shard the newest version that is there whole.

The copy may be of any instant, and its keys may have been copied in any order over minutes. What is accepted is a State
that was in the log of the shard: it is made of a rollup and of entries that were published, each of which names the
commit before it. What cannot be shown to be so is told as incomplete. Only reads; nothing here asks for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from blob import Blob, BlobNotFound
from consensus import Consensus, Entry
from persist.commit.location import all_names
from persist.commit.state_loader import FIRST
from persist.copies.shard_facts import Readable, all_parts, entries_of, needed_blobs
from persist.core import state_diff
from persist.core.blob_keys import (
    belongs_to,
    catalogue_number,
    is_catalogue_key,
    is_journal_key,
    is_rollup_key,
    rollup_seqno,
    shard_of,
)
from persist.core.errors import Corruption, PersistError
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.state import State, blank_state
from persist.core.state_diff import StateDiff
from persist.formats.state_frames import (
    THIS_BUILD,
    Build,
    decode_catalogue,
    decode_diff,
    decode_journal,
    decode_state,
    format_of,
)
from persist.formats.store_errors import translated, translated_but_missing

MISSING_TOLD_MAX = 20  # keys that are told of one shard
VERSIONS_MAX = 100_000  # that are made from one rollup, or read of one log


@dataclass(frozen=True, slots=True)
class Found:
    """What is there of the shard `name` ("": nothing tells its name).

    `state`: the newest version that is whole; None: there is none. `known`: the newest seqno that anything in the copy
    tells of; the shard may have had later ones. `missing`: blobs that newer versions lack, the first few. `why`: what
    else is wrong, in sentences.
    """

    name: str
    family: str
    state: State | None
    known: SeqNo
    missing: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    dropped: bool = False  # the catalogue tells so, or the State
    unborn: bool = False  # blobs are there, and nothing tells that a log was begun; the catalogue does not name it


@dataclass
class Evidence:
    """What a copy tells of one shard. `changes`: the state diffs that were published, by their seqno and commit id."""

    name: str = ""
    dropped: bool = False
    rollups: dict[str, SeqNo] = field(default_factory=dict)  # their keys
    changes: dict[SeqNo, dict[str, StateDiff]] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    unsettled: dict[str, str] = field(default_factory=dict)  # rollups that may never have been named: whose they are

    def add(self, change: StateDiff) -> None:
        """One that is settled."""
        self.changes.setdefault(change.seqno, {}).setdefault(change.commit_id, change)

    @property
    def known(self) -> SeqNo:
        named = [seqno for key, seqno in self.rollups.items() if key not in self.unsettled]
        return max([*self.changes, *named], default=SeqNo(0))

    def forked_at(self) -> SeqNo | None:
        """The first seqno of which two commits were published."""
        return min((seqno for seqno, commits in self.changes.items() if len(commits) > 1), default=None)

    def following(self, state: State) -> StateDiff | None:
        """The change that was committed after this State."""
        for change in self.changes.get(SeqNo(state.seqno + 1), {}).values():
            if change.parent_id == state.commit_id and not _begins(change):
                return change
        return None

    def tells_of(self, state: State, key: str) -> bool:
        """Whether something settled tells of the commit that made this State."""
        if state.commit_id in self.changes.get(state.seqno, {}):
            return True
        following = self.changes.get(SeqNo(state.seqno + 1), {}).values()
        if any(change.parent_id == state.commit_id for change in following):
            return True
        return any(change.rollup_key == key for changes in self.changes.values() for change in changes.values())


def _begins(change: StateDiff) -> bool:
    """Whether it is the first entry of a log, whose State lies in the rollup that it names."""
    return change.rollup_seqno == change.seqno


class BlobStoreScan:
    """A copy of a blob store. What it lists is read once; reads of single blobs may raise Unavailable.

    `older`: an older copy of the consensus store that was lost. What its logs hold counts as published. `sizes`: what
    is there, by its key, for who has listed it already.
    """

    def __init__(
        self,
        blob: Blob,
        build: Build = THIS_BUILD,
        older: Consensus | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._blob = blob
        self._build = build
        self._older = older
        self.sizes = _listed(blob) if sizes is None else sizes
        self.problems: list[str] = []  # with what is of no shard in particular
        self.epoch = 0  # the last one that anything that was published tells of
        self.format_version = 0  # the highest of any State or log entry that was read
        self._names_are_told = False  # the newest catalogue could be read: what it lacks was begun since, or never

    def found(self) -> Iterator[Found]:
        """What is there of each shard, by its name."""
        known = self.evidence()
        for family in sorted(known, key=lambda family: (known[family].name, family)):
            yield self.newest(family, known[family])

    def evidence(self) -> dict[str, Evidence]:
        """What the copy tells of each shard, by what the ids of all its lives begin with."""
        found: dict[str, Evidence] = {}

        def of(family: str) -> Evidence:
            return found.setdefault(family, Evidence())

        for key in self.sizes:
            if belongs_to(key, shard_of(key)):
                evidence = of(family_of(shard_of(key)))
                if is_rollup_key(key):
                    evidence.rollups[key] = rollup_seqno(key)
        for name, shard_id in self._catalogue().items():
            evidence = of(family_of(shard_id_of(name)))
            evidence.name, evidence.dropped = name, not shard_id
        for key in sorted(filter(is_journal_key, self.sizes)):
            self._read_journal(key, of)
        if self._older is not None:
            self._read_logs(self._older, of)
        return found

    def _read_logs(self, older: Consensus, of: Callable[[str], Evidence]) -> None:
        with translated():
            names = list(all_names(older.keys, ""))
        for name in names:
            evidence = of(family_of(shard_id_of(name)))
            evidence.name = name
            for entry in _log(older, name):
                try:
                    evidence.add(decode_diff(entry.data, self._build))
                except Corruption as error:
                    evidence.why.append(f"v{entry.seqno} in {older.url}: {error.message}")

    def _read_journal(self, key: str, of: Callable[[str], Evidence]) -> None:
        try:
            data = self._get(key)
            journal = None if data is None else decode_journal(data, self._build)
        except Corruption as error:
            self.problems.append(f"{key}: {error.message}")
            return
        self.epoch = max(self.epoch, 0 if journal is None else journal.epoch)
        for shard in journal.shards if journal is not None else ():
            evidence = of(family_of(shard_id_of(shard.name)))
            evidence.name = shard.name
            for entry in shard.entries:
                try:
                    evidence.add(decode_diff(entry, self._build))
                    self.format_version = max(self.format_version, format_of(entry))
                except Corruption as error:
                    evidence.why.append(f"an entry in {key}: {error.message}")

    def _catalogue(self) -> dict[str, str]:
        for number, key in enumerate(sorted(filter(is_catalogue_key, self.sizes), key=catalogue_number, reverse=True)):
            try:
                data = self._get(key)
                if data is not None:
                    found = decode_catalogue(data)
                    self._names_are_told = number == 0
                    return found
            except Corruption as error:
                self.problems.append(f"{key}: {error.message}")
        return {}

    def newest(self, family: str, evidence: Evidence) -> Found:
        """The newest version of a shard that is there whole."""
        missing: tuple[str, ...] = ()
        why = list(evidence.why)
        forked = evidence.forked_at()
        if forked is not None:
            why.append(f"two histories were published from v{forked} on: versions from there on are not accepted")
        below = forked
        name, tried = evidence.name, False
        for base, from_rollup in self._bases(evidence, why):
            name = name or base.name
            versions = [state for state in self.chain(base, evidence, why) if below is None or state.seqno < below]
            for state in reversed(versions):
                lacking = self.missing(state)
                if not lacking:
                    dropped = state.is_closed or evidence.dropped
                    return Found(name, family, state, evidence.known, missing, tuple(why), dropped)
                if not tried:
                    missing, tried = tuple(lacking[:MISSING_TOLD_MAX]), True
            if from_rollup and versions:
                below = base.seqno
        untold = not name and not evidence.changes and evidence.rollups.keys() == evidence.unsettled.keys()
        unborn = untold and self._names_are_told
        name = name or next(iter(evidence.unsettled.values()), "")
        if unborn:
            why.append("nothing tells that it was ever begun")
        elif untold:
            why.append("nothing tells that it was ever begun, and there is no catalogue of all names to rule it out")
        else:
            why.append("no version of it is there whole")
        return Found(name, family, None, evidence.known, missing, tuple(why), evidence.dropped, unborn)

    def _bases(self, evidence: Evidence, why: list[str]) -> Iterator[tuple[State, bool]]:
        """States from which to go on, newest first; whether each is that of a rollup."""
        for key, seqno in sorted(evidence.rollups.items(), key=lambda item: (item[1], item[0]), reverse=True):
            try:
                data = self._get(key)
                state = None if data is None else decode_state(data, self._build)
                self.format_version = max(self.format_version, 0 if data is None else format_of(data))
            except Corruption as error:
                why.append(f"{key}: {error.message}")
                continue
            if state is None:
                continue
            if state.seqno != seqno or family_of(state.shard_id) != family_of(shard_of(key)):
                why.append(f"{key} holds v{state.seqno} of {state.shard_id}")
                continue
            begins = state.seqno in state.rollups  # it may have lost the race for the first entry of the log
            published = evidence.changes.get(state.seqno, {})
            is_other = bool(published) and state.commit_id not in published  # of a history that was lost
            if is_other or (begins and not evidence.tells_of(state, key)):
                evidence.unsettled[key] = state.name
            else:
                yield state, True
        for change in evidence.changes.get(SeqNo(1), {}).values():
            if change.schemas is not None and evidence.name:
                yield state_diff.apply(change, blank_state(evidence.name)), False

    def chain(self, base: State, evidence: Evidence, why: list[str]) -> Iterator[State]:
        """The base, and the versions to which published changes lead from there."""
        state, left = base, VERSIONS_MAX
        yield state
        while left and (change := evidence.following(state)) is not None:
            left -= 1
            try:
                whole = self._whole(change)
                if whole is None:
                    why.append(f"v{change.seqno} was published, and the blob of its long state diff is not there")
                    return
                state = state_diff.apply(whole, state)
            except PersistError as error:
                if not isinstance(error, Corruption):
                    raise
                why.append(f"v{change.seqno}: {error.message}")
                return
            yield state

    def _whole(self, change: StateDiff) -> StateDiff | None:
        """The state diff itself; None: its blob is not there."""
        if change.elsewhere is None:
            return change
        data = self._get(change.elsewhere.key)
        if data is None:
            return None
        found = decode_diff(data, self._build)
        if (found.seqno, found.commit_id) != (change.seqno, change.commit_id):
            raise Corruption(f"blob {change.elsewhere.key} holds another state diff")
        return found

    def missing(self, state: State) -> list[str]:
        """The blobs without which this version is not whole; one with another size counts as missing.

        Rollups, long state diffs and what merges have written so far are not needed for any row.
        """
        found: list[str] = []
        for named in all_parts(state, self._blob):
            part = named.part
            if part.key is None:
                continue
            size = part.blob_size
            if self.sizes.get(part.key) != size or named.failed is not None:
                found.append(part.key)
        return found + [key for key, size in needed_blobs(state).items() if self.sizes.get(key) != size]

    def _get(self, key: str) -> bytes | None:
        try:
            with translated_but_missing():
                return self._blob.get(key)
        except BlobNotFound:
            return None


def _listed(blob: Blob) -> dict[str, int]:
    with translated():
        return {stat.key: stat.size for stat in blob.list("")}


def _log(older: Consensus, name: str) -> Iterator[Entry]:
    """The newest entries of a log, ascending."""
    with translated():
        head = older.head(name)
    return iter(()) if head is None else entries_of(older, name, max(1, head.seqno - VERSIONS_MAX + 1), head.seqno)


# Shards of which the blob store knows, and the consensus store nothing: their logs are lost, and no listing of names
# shows them.


FAMILIES_MAX = 10_000  # that are looked into: each takes one blob


def lost_logs(place: Readable, known: Collection[str]) -> Iterator[str]:
    """Names of shards that are not `known` to the log, and of which a rollup tells a later version.

    `known` are all names in the log, those of dropped shards too. A rollup of the first version alone is that of a
    shard that was never begun. Who looks may find that such a shard is there by now. One listing of the blob store, and
    one blob for each. Raises Unavailable.
    """
    families = {family_of(shard_id_of(name)) for name in known}
    newest: dict[str, str] = {}
    with translated():
        for stat in place.blob.list(""):
            key = stat.key
            if not is_rollup_key(key) or not belongs_to(key, shard_of(key)):
                continue
            family = family_of(shard_of(key))
            if family in families or rollup_seqno(key) <= FIRST:
                continue
            if family not in newest and len(newest) == FAMILIES_MAX:
                break
            newest[family] = max(newest.get(family, key), key, key=rollup_seqno)
    names = set()
    for family, key in newest.items():
        try:
            state = place.versions.read_rollup(key)
        except Corruption:
            continue  # nobody can tell whose it is
        if state is not None and family_of(state.shard_id) == family:
            names.add(state.name)
    yield from sorted(names)
