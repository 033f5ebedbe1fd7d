"""What a copy of a blob store contains: for each shard the newest version that is complete.

The copy may be of any instant, and its keys may have been copied in any order over minutes. Accepted are only States
that were in the log of the shard: a rollup plus published entries, each of which names the commit before it. Everything
else is reported as incomplete. Read-only; the log is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from blob import Blob
from consensus import Consensus
from persist.commit.location import all_names
from persist.commit.state_loader import FIRST
from persist.copies.shard_facts import Readable, all_parts, entries_of, needed_blobs
from persist.core import state_diff
from persist.core.blob_keys import (
    BEATS,
    belongs_to,
    catalogue_number,
    is_beat_key,
    is_catalogue_key,
    is_journal_key,
    is_rollup_key,
    rollup_seqno,
    shard_of,
)
from persist.core.errors import Corruption
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
from persist.formats.store_errors import read_or_none, translated

MISSING_SHOWN_MAX = 20  # keys that are reported for one shard
MINUTE_MS = 60_000
VERSIONS_MAX = 100_000  # that are derived from one rollup, or read from one log


@dataclass(frozen=True, slots=True)
class ScannedShard:
    """The contents for the shard `name` ("": its name is unknown).

    `state`: the newest complete version; None: there is none. `known`: the newest seqno that the copy mentions; the
    shard may have had later ones. `missing`: blobs that newer versions lack, the first few. `why`: other problems, in
    sentences.
    """

    name: str
    family: str
    state: State | None
    known: SeqNo
    missing: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    dropped: bool = False  # by the catalogue, or by the State
    unborn: bool = False  # it has blobs, but there is no proof that its log was begun; the catalogue does not list it


@dataclass
class Evidence:
    """The evidence for one shard. `changes`: the published state diffs, by seqno and commit id."""

    name: str = ""
    dropped: bool = False
    rollups: dict[str, SeqNo] = field(default_factory=dict)  # their keys
    changes: dict[SeqNo, dict[str, StateDiff]] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    unsettled: dict[str, str] = field(default_factory=dict)  # rollups that may never have been named -> shard names

    def add(self, change: StateDiff) -> None:
        self.changes.setdefault(change.seqno, {}).setdefault(change.commit_id, change)

    @property
    def known(self) -> SeqNo:
        """The newest seqno that is mentioned."""
        settled = [seqno for key, seqno in self.rollups.items() if key not in self.unsettled]
        return max([*self.changes, *settled], default=SeqNo(0))

    def forked_at(self) -> SeqNo | None:
        """The first seqno at which two commits were published."""
        return min((seqno for seqno, commits in self.changes.items() if len(commits) > 1), default=None)

    def following(self, state: State) -> StateDiff | None:
        """The change that was committed on this State."""
        for change in self.changes.get(SeqNo(state.seqno + 1), {}).values():
            # The first entry of a log follows no State: the rollup that it names has its State.
            if change.parent_id == state.commit_id and change.rollup_seqno != change.seqno:
                return change
        return None

    def proves(self, state: State, key: str) -> bool:
        """Whether something settled proves the commit of this State."""
        if state.commit_id in self.changes.get(state.seqno, {}):
            return True
        following = self.changes.get(SeqNo(state.seqno + 1), {}).values()
        if any(change.parent_id == state.commit_id for change in following):
            return True
        return any(change.rollup_key == key for changes in self.changes.values() for change in changes.values())


class BlobStoreScan:
    """A copy of a blob store. Listings are read once; reads of single blobs may raise Unavailable.

    `older`: an older copy of the lost consensus store, whose logs count as published. `sizes`: the listing, key to
    size, if the caller has one.
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
        if sizes is None:
            with translated():
                sizes = {stat.key: stat.size for stat in blob.list("")}
        self.sizes = sizes
        self.problems: list[str] = []  # that concern no particular shard
        self.epoch = 0  # the latest published one
        self.format_version = 0  # the highest of all States and log entries that were read
        self._has_newest_catalogue = False  # if so, a shard that it lacks was created since, or never

    def shards(self) -> Iterator[ScannedShard]:
        """The contents for each shard, by name."""
        by_family = self.evidence()
        for family in sorted(by_family, key=lambda family: (by_family[family].name, family)):
            yield self.newest(family, by_family[family])

    def evidence(self) -> dict[str, Evidence]:
        """The evidence for each shard, by the common prefix of the ids of all its incarnations."""
        evidence_by_family: dict[str, Evidence] = {}

        def evidence_of(family: str) -> Evidence:
            return evidence_by_family.setdefault(family, Evidence())

        for key in self.sizes:
            if belongs_to(key, shard_of(key)):
                evidence = evidence_of(family_of(shard_of(key)))
                if is_rollup_key(key):
                    evidence.rollups[key] = rollup_seqno(key)
        for name, shard_id in self._catalogue().items():
            evidence = evidence_of(family_of(shard_id_of(name)))
            evidence.name, evidence.dropped = name, not shard_id
        for key in sorted(filter(is_journal_key, self.sizes)):
            self._read_journal(key, evidence_of)
        if self._older is not None:
            self._read_logs(self._older, evidence_of)
        return evidence_by_family

    def _read_logs(self, older: Consensus, evidence_of: Callable[[str], Evidence]) -> None:
        with translated():
            names = list(all_names(older.keys, ""))
        for name in names:
            evidence = evidence_of(family_of(shard_id_of(name)))
            evidence.name = name
            with translated():
                head = older.head(name)
            last = 0 if head is None else head.seqno
            for entry in entries_of(older, name, max(1, last - VERSIONS_MAX + 1), last):
                try:
                    evidence.add(decode_diff(entry.data, self._build))
                except Corruption as error:
                    evidence.why.append(f"v{entry.seqno} in {older.url}: {error.message}")

    def _read_journal(self, key: str, evidence_of: Callable[[str], Evidence]) -> None:
        try:
            data = read_or_none(self._blob, key)
            journal = None if data is None else decode_journal(data, self._build)
        except Corruption as error:
            self.problems.append(f"{key}: {error.message}")
            return
        self.epoch = max(self.epoch, 0 if journal is None else journal.epoch)
        for shard in journal.shards if journal is not None else ():
            evidence = evidence_of(family_of(shard_id_of(shard.name)))
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
                data = read_or_none(self._blob, key)
                if data is not None:
                    catalogue = decode_catalogue(data)
                    self._has_newest_catalogue = number == 0
                    return catalogue
            except Corruption as error:
                self.problems.append(f"{key}: {error.message}")
        return {}

    def newest(self, family: str, evidence: Evidence) -> ScannedShard:
        """The newest complete version of a shard."""
        missing: tuple[str, ...] = ()
        problems = list(evidence.why)
        forked = evidence.forked_at()
        if forked is not None:
            problems.append(f"two histories were published from v{forked} on: versions from there on are not accepted")
        limit = forked
        name, is_reported = evidence.name, False
        for base, from_rollup in self._bases(evidence, problems):
            name = name or base.name
            versions = [state for state in self.chain(base, evidence, problems) if limit is None or state.seqno < limit]
            for state in reversed(versions):
                missing_now = self.missing(state)
                if not missing_now:
                    dropped = state.is_closed or evidence.dropped
                    return ScannedShard(name, family, state, evidence.known, missing, tuple(problems), dropped)
                if not is_reported:
                    missing, is_reported = tuple(missing_now[:MISSING_SHOWN_MAX]), True
            if from_rollup and versions:
                limit = base.seqno
        is_unproven = not name and not evidence.changes and evidence.rollups.keys() == evidence.unsettled.keys()
        unborn = is_unproven and self._has_newest_catalogue
        name = name or next(iter(evidence.unsettled.values()), "")
        if unborn:
            problems.append("there is no proof that it was ever begun")
        elif is_unproven:
            problems.append("there is no proof that it was ever begun, and no catalogue of all names to rule it out")
        else:
            problems.append("no version of it is complete")
        return ScannedShard(name, family, None, evidence.known, missing, tuple(problems), evidence.dropped, unborn)

    def _bases(self, evidence: Evidence, problems: list[str]) -> Iterator[tuple[State, bool]]:
        """States from which the published changes continue, newest first; and whether each is from a rollup."""
        for key, seqno in sorted(evidence.rollups.items(), key=lambda item: (item[1], item[0]), reverse=True):
            try:
                data = read_or_none(self._blob, key)
                state = None if data is None else decode_state(data, self._build)
                self.format_version = max(self.format_version, 0 if data is None else format_of(data))
            except Corruption as error:
                problems.append(f"{key}: {error.message}")
                continue
            if state is None:
                continue
            if state.seqno != seqno or family_of(state.shard_id) != family_of(shard_of(key)):
                problems.append(f"{key} holds v{state.seqno} of {state.shard_id}")
                continue
            begins_log = state.seqno in state.rollups  # it may have lost the race for the first entry of the log
            published = evidence.changes.get(state.seqno, {})
            is_from_lost_history = bool(published) and state.commit_id not in published
            if is_from_lost_history or (begins_log and not evidence.proves(state, key)):
                evidence.unsettled[key] = state.name
            else:
                yield state, True
        for change in evidence.changes.get(SeqNo(1), {}).values():
            if change.schemas is not None and evidence.name:
                yield state_diff.apply(change, blank_state(evidence.name)), False

    def chain(self, base: State, evidence: Evidence, problems: list[str]) -> Iterator[State]:
        """The base, and the versions that follow from it by published changes."""
        state, versions_left = base, VERSIONS_MAX
        yield state
        while versions_left and (change := evidence.following(state)) is not None:
            versions_left -= 1
            try:
                full_change = self._whole(change)
                if full_change is None:
                    problems.append(f"v{change.seqno} was published, but the blob of its long state diff is missing")
                    return
                state = state_diff.apply(full_change, state)
            except Corruption as error:
                problems.append(f"v{change.seqno}: {error.message}")
                return
            yield state

    def _whole(self, change: StateDiff) -> StateDiff | None:
        """The full state diff; None: its blob is missing."""
        if change.elsewhere is None:
            return change
        data = read_or_none(self._blob, change.elsewhere.key)
        if data is None:
            return None
        long_diff = decode_diff(data, self._build)
        if (long_diff.seqno, long_diff.commit_id) != (change.seqno, change.commit_id):
            raise Corruption(f"blob {change.elsewhere.key} holds another state diff")
        return long_diff

    def missing(self, state: State) -> list[str]:
        """The blobs that this version lacks; one of another size counts as missing.

        Rollups, long state diffs and outputs of unfinished merges are not needed.
        """
        missing_keys: list[str] = []
        for named in all_parts(state, self._blob):
            key = named.part.key
            if key is not None and (self.sizes.get(key) != named.part.blob_size or named.error is not None):
                missing_keys.append(key)
        return missing_keys + [key for key, size in needed_blobs(state).items() if self.sizes.get(key) != size]


def last_heartbeat_ms(blob: Blob) -> int | None:
    """The minute of the last heartbeat of maintenance. None: there is none."""
    with translated():
        minutes = [int(stat.key.removeprefix(BEATS)) for stat in blob.list(BEATS) if is_beat_key(stat.key)]
    return max(minutes) * MINUTE_MS if minutes else None


# Lost logs: shards with blobs, of which the consensus store has nothing, so that no listing of names shows them.


FAMILIES_MAX = 10_000  # that are examined: each takes one blob


def find_lost_logs(location: Readable, known: Collection[str]) -> Iterator[str]:
    """Find shards that are not `known` to the log, but have a rollup of a later version than the first.

    `known` are all names in the log, including dropped shards. A rollup of only the first version may be of a shard
    that was never begun. The shard may have been created meanwhile. Costs one listing of the blob store, and one blob
    for each shard. Raises Unavailable.
    """
    families = {family_of(shard_id_of(name)) for name in known}
    newest: dict[str, str] = {}
    with translated():
        for stat in location.blob.list(""):
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
            state = location.versions.read_rollup(key)
        except Corruption:
            continue  # its shard is unknown
        if state is not None and family_of(state.shard_id) == family:
            names.add(state.name)
    yield from sorted(names)
