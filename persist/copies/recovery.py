"""Recovery from the blob store alone: its consensus store is lost, and every shard begins a log anew in an empty one.

The order makes it safe to be killed anywhere, and to be repeated: a mark in the new consensus store, which names the
epoch; the epoch in the blob store, which fences processes of the old one; the logs; the binding of the two stores.
Until that is there no process opens the location. So nobody makes a shard anew, or commits to one, that is to come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blob import Blob, BlobExists, BlobNotFound
from consensus import HIDDEN, Consensus
from persist.client.timestamps import instant_text
from persist.commit.location import Location
from persist.commit.location_identity import (
    COPY_KEY,
    FIRST_EPOCH,
    ID_KEY,
    LOG_KEY,
    Identity,
    epoch_key,
    epochs_in,
    raise_format,
    read_format,
)
from persist.commit.state_loader import Versions
from persist.copies.blob_store_scan import BlobStoreScan, Found
from persist.copies.state_rewrite import carried, relent
from persist.core.batch import Description, Run, batch_of, trace_of
from persist.core.blob_keys import BEATS, is_beat_key
from persist.core.erasure import Erasure
from persist.core.errors import Conflict, Corruption, InvalidUsage
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import LocationBinding, SeqNo
from persist.core.record import replace
from persist.core.shard_view import digest_of
from persist.core.state import State
from persist.core.transitions.writers import with_times
from persist.formats.state_frames import Build, decode_binding, encode_binding
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.publication_writer import Publisher, PublishSettings

GAP = 1_000_000  # times that may have been given out after what is known
SEQNO_GAP = 1_000_000  # commits that may have been made after what is known, or are yet by a process of the old epoch
GAP_MAX = 2**48
NAMED_MAX = 5  # shards that one message names
MINUTE_MS = 60_000
PUBLISHED_AT_ONCE = 1_000  # shards of which one publication tells

Told = Callable[[int, int], object]  # shards that are done, of so many


@dataclass(frozen=True, slots=True)
class RecoveryRequest:
    """`accept_loss`: also where the newest version that was published is not whole.

    `gap`: times that are left out after the last known one. `older`: an older copy of the lost consensus store; what it
    knows counts as published. `fenced`: stores of a home that ends, to which the epoch goes first. `handed_over`: the
    mark to whose epoch that home has handed every shard over, so nothing comes after what is known, and no time is left
    out. `least`: the new epoch is above this one as well, of which an index tells. `note` is called with what is
    planned, and with the names whose logs an earlier try has begun, before any other is.
    """

    accept_loss: bool = False
    gap: int = GAP
    older: Consensus | None = None
    fenced: Sequence[Blob] = ()
    handed_over: LocationBinding | None = None
    least: int = 0
    note: Callable[[Recovered, frozenset[str]], object] = lambda found, begun: None

    def check(self) -> None:
        """Raises InvalidUsage."""
        if not 1 <= self.gap <= GAP_MAX:
            raise InvalidUsage(f"the gap is {self.gap}; it must be in [1, {GAP_MAX}]")


@dataclass(frozen=True, slots=True)
class ShardRecovered:
    """What comes back of one shard, or would: the commit `version`. Of commits after `known` nothing tells.

    `upper` is that of the newest version that is whole, and `resumes` the upper from which it goes on: times between
    the two may have been given out, and are never given out again. `state_ms`: when that version was committed, by its
    committer's clock. `lost`: versions that were published after it, and are not whole. `missing`: blobs that these
    lack, the first few. `why`: what else is wrong. `name` "": nothing tells the name, and nothing comes back. `family`:
    what the keys of its blobs begin with. `unborn`: blobs are there, and the first commit was not published, if there
    was one: it does not come back. `handed_over`: the epoch of the home to which the version that is there was handed.
    `shard_id` and `acknowledged` are of that version: its life of the name, and the digest of what callers were told.
    """

    name: str
    family: str
    version: int | None
    known: int
    upper: list[int] | None
    resumes: list[int] | None
    state_ms: int | None
    lost: int
    missing: tuple[str, ...]
    why: tuple[str, ...]
    dropped: bool
    unborn: bool = False
    handed_over: int = 0
    shard_id: str = ""
    acknowledged: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the newest version that anything tells of comes back. Of one that is unborn nothing tells any."""
        return self.unborn or (bool(self.name) and self.upper is not None and not self.lost)

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        told: dict[str, Any] = {"shard": self.name or None, "id": self.family, "whole": self.is_whole}
        told["version"] = self.version
        told |= {"unknown_after": self.known, "upper": self.upper, "resumes": self.resumes}
        told |= {"lost_versions": self.lost, "missing": list(self.missing)}
        told["as_of"] = None if self.state_ms is None else instant_text(self.state_ms)
        return {**told, "dropped": self.dropped, "unborn": self.unborn, "why": list(self.why)}


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery brought back, or would. `epoch` is the new one. `beat_ms`: the minute in which maintenance last
    said that it was at work; what was committed within seconds before that is there. None: it never did. `had_ended`:
    an earlier run has done it, and told of the shards.
    """

    epoch: int
    shards: tuple[ShardRecovered, ...]
    beat_ms: int | None
    had_ended: bool = False

    @property
    def lacking(self) -> list[str]:
        """The shards of which the newest version would not come back, by name, or by what their keys begin with."""
        return [one.name or one.family for one in self.shards if not one.is_whole]


class _Unbound(Identity):
    """That of stores which are not bound yet. Only a recovery may write there."""

    def check(self) -> LocationBinding:
        return LocationBinding("", 0, "")

    def check_writable(self) -> None:
        return

    def confirm(self) -> None:
        return

    def look(self) -> None:
        return


def plan(
    location: Location, gap: int = GAP, older: Consensus | None = None, fenced: Sequence[Blob] = (), least: int = 0
) -> Recovered:
    """What a recovery would bring back; see `RecoveryRequest`. Writes nothing. Raises what `recover` raises."""
    blob, consensus = location.blob, location.consensus
    mark, after = _look(blob, consensus, location.settings.build)
    if mark is not None and mark.epoch < least:
        raise Conflict(
            f"the recovery to {consensus.url} was begun for epoch {mark.epoch}, and the index has epoch {least}: this "
            "home would only read. Use the home of that epoch, or give another empty consensus store"
        )
    if older is not None:
        _check_older(blob, older, location.settings.build)
    bucket = BlobStoreScan(blob, location.settings.build, older)
    planned = _planned(bucket, RecoveryRequest(gap=gap, older=older), LocationBinding("", 0, "0" * 32))
    with translated():  # a copy may lack an epoch of which something else tells
        told = [epoch for other in (blob, *fenced) for epoch in epochs_in(other)]
    last = max(FIRST_EPOCH, least, bucket.epoch, after, *told)
    epoch = last + 1 if mark is None else mark.epoch
    return Recovered(epoch, tuple(told for told, _ in planned), _beat_ms(blob))


def recover(
    location: Location,
    *,
    accept_loss: bool = False,
    gap: int = GAP,
    older: Consensus | None = None,
    told: Told = lambda done, of: None,
) -> Recovered:
    """Begin the log of every shard anew in the location's consensus store, which is empty.

    `accept_loss`: also where the newest version that was published is not whole. `older`: an older copy of the lost
    consensus store; what it knows counts as published. Repeating it after an error goes on.
    Raises InvalidUsage (the consensus store is in use, the blob store has no location, `older` is of another one),
    Conflict (another recovery has taken over), Corruption (without `accept_loss`: something of a shard is missing;
    nothing was written).
    """
    return begin_anew(location, RecoveryRequest(accept_loss, gap, older), told)


def begin_anew(location: Location, how: RecoveryRequest, told: Told = lambda done, of: None) -> Recovered:
    """As `recover`. Raises Conflict also where a shard was not handed over, though all are to be."""
    how.check()
    before = plan(location, how.gap, how.older, how.fenced, how.least)
    if not how.accept_loss:
        _check_whole(before)
    binding = how.handed_over or marked(location, before.epoch)
    for blob in (*how.fenced, location.blob):
        fence(blob, binding)
    bucket = BlobStoreScan(location.blob, location.settings.build, how.older)
    planned = _planned(bucket, how, binding)  # what was published until the fence
    found = Recovered(binding.epoch, tuple(told for told, _ in planned), before.beat_ms)
    if not how.accept_loss:
        _check_whole(found)
    versions = _versions(location, bucket.format_version)
    goes = {state.name: state for _, state in planned if state is not None}
    fenced_at = SeqNo(max((state.seqno for state in goes.values()), default=0) + SEQNO_GAP)
    states = relent(goes, versions, location.clock.now_ms(), fenced_at)
    begin_marked(location.consensus, binding, location.settings.build)
    with translated():
        location.blob.delete(
            [COPY_KEY]
        )  # before anything of the new home is there, which `persist region replicate` deletes
        how.note(found, frozenset(name for name in states if location.consensus.head(name) is not None))
    for number, state in enumerate(states.values()):
        with translated():
            there = location.consensus.head(state.name)
        if there is None and not versions.begin(state):
            raise Conflict(f"another recovery brings shard {state.name!r} back as well; look, then retry")
        told(number + 1, len(states))
    _bind(location, binding)
    publish_heads(location, list(states))
    return found


def ended(location: Location) -> Recovered | None:
    """What went on of a recovery that has ended: its epoch. None: none has. What follows its end is done once more.

    Raises Conflict: another consensus store has taken over since.
    """
    mark = mark_of(location.consensus, location.settings.build)
    if mark is None or not is_bound(location.consensus, mark):
        return None
    with translated():
        last = epochs_in(location.blob)[-1]
    if last > mark.binding.epoch:
        raise Conflict(f"another consensus store has taken over {location.blob.url} at epoch {last} since")
    with translated():
        location.blob.delete([COPY_KEY])
    publish_heads(location, list(location.all_names(with_dropped=True)))
    return Recovered(mark.binding.epoch, (), _beat_ms(location.blob), had_ended=True)


# --- what is there


def _look(blob: Blob, consensus: Consensus, build: Build) -> tuple[LocationBinding | None, int]:
    """Check that the consensus store is empty, or a recovery into it was begun: its mark.

    Beyond the other number is the epoch of the next mark: one that was taken back left home at the epoch after it.
    """
    with translated():
        if blob.stat(ID_KEY) is None:
            raise InvalidUsage(f"{blob.url} has no location: there is nothing to recover")
        bound, mark = consensus.head(LOG_KEY), mark_of(consensus, build)
        if mark is not None and is_bound(consensus, mark):
            epoch = mark.binding.epoch
            raise InvalidUsage(f"the recovery to {consensus.url} has ended, at epoch {epoch}: nothing is left to do")
        if bound is not None:
            raise InvalidUsage(
                f"{consensus.url} is, or was, the consensus store of a location: give a new, empty one", in_use=True
            )
        names = consensus.keys("", "", 1)
        if (mark is None or mark.is_taken_back) and names:
            raise InvalidUsage(f"{consensus.url} is not empty: it has shard {names[0]!r}. Give a new, empty one")
        if mark is None:
            return None, 0
        if blob.get(ID_KEY).decode("ascii", "replace") != mark.binding.location_id:
            raise InvalidUsage(f"a recovery of another location into {consensus.url} was begun; give an empty one")
        return (None, mark.binding.epoch + 1) if mark.is_taken_back else (mark.binding, 0)


def _check_older(blob: Blob, older: Consensus, build: Build) -> None:
    with translated():
        entry = older.head(LOG_KEY)
        binding = None if entry is None else decode_binding(entry.data, build)
        if entry is None or binding is None or _held(blob, binding) != entry.data:
            raise InvalidUsage(
                f"{older.url} is no copy of a consensus store of {blob.url}; recover without it, or give the right one"
            )


def _planned(
    bucket: BlobStoreScan, how: RecoveryRequest, binding: LocationBinding
) -> list[tuple[ShardRecovered, State | None]]:
    planned = []
    for found in bucket.found():
        if how.handed_over and not found.unborn and (found.state is None or found.state.handed_over != binding.epoch):
            raise Conflict(f"shard {found.name or found.family!r} was not handed over to epoch {binding.epoch}")
        planned.append(_plan(found, 0 if how.handed_over else how.gap, binding.pair))
    return planned


def _plan(found: Found, gap: int, pair: str) -> tuple[ShardRecovered, State | None]:
    state, lost = found.state, 0
    if state is not None and found.name:
        lost = max(0, found.known - state.seqno)
        goes = _resumed(state, found.known, gap, pair)
        told = ShardRecovered(
            found.name, found.family, int(state.seqno), int(max(found.known, state.seqno)), state.upper.to_json(),
            goes.upper.to_json(), state.walltime_ms, lost, found.missing, found.why, found.dropped,
            handed_over=state.handed_over, shard_id=state.shard_id, acknowledged=digest_of(state),
        )  # fmt: skip
        return told, goes
    lost = int(found.known)
    told = ShardRecovered(
        found.name, found.family, None, lost, None, None, None, lost, found.missing, found.why, found.dropped,
        found.unborn,
    )  # fmt: skip
    return told, None


def _resumed(state: State, known: SeqNo, gap: int, pair: str) -> State:
    """The State with which the new log begins: beyond every seqno, and every time, that the old one may have had."""
    commit_id = hashlib.sha256(f"{pair}/{state.name}".encode()).hexdigest()[:32]
    # What a receipt says of the lost home's stores, a copy may still have: these stores are looked at anew.
    erasures = {name: replace(erasure, proof=None) for name, erasure in state.erasures.items()}
    goes = replace(carried(state, commit_id), seqno=SeqNo(max(known, state.seqno) + SEQNO_GAP), erasures=erasures)
    upper = state.upper.element
    if upper is None:
        return goes
    resumes = min(upper + gap, TIME_MAX)
    if resumes <= upper:
        return goes
    empty = batch_of(Description(Antichain(upper), Antichain(resumes), MINIMUM), ())
    # An append there is no replica's, whose rows the shard has: it would be acknowledged and left out.
    taken = with_times(goes.service_times, upper, resumes)
    waiting = {name: _at(erasure, resumes) for name, erasure in erasures.items()}
    return replace(goes, trace=trace_of((*goes.trace.batches, empty)), service_times=taken, erasures=waiting)


def _at(erasure: Erasure, time: int) -> Erasure:
    """An erasure that is pending becomes effective at the next time."""
    if erasure.pending is None:
        return erasure
    runs = (tuple(part.at(time) for part in run.parts) for run in erasure.pending.runs)
    return replace(erasure, at=time, pending=replace(erasure.pending, runs=tuple(map(Run, runs))))


def _check_whole(found: Recovered) -> None:
    if lacking := found.lacking:
        more = ", …" if len(lacking) > NAMED_MAX else ""
        raise Corruption(
            f"the newest version of {len(lacking)} shards is not whole: {', '.join(lacking[:NAMED_MAX])}{more}. A dry "
            "run tells what would come back; go on with that by --accept-loss"
        )


def _beat_ms(blob: Blob) -> int | None:
    with translated():
        beats = [stat.key for stat in blob.list(BEATS) if is_beat_key(stat.key)]
    return int(beats[-1].removeprefix(BEATS)) * MINUTE_MS if beats else None


# --- step by step


def marked(location: Location, epoch: int) -> LocationBinding:
    """The binding that is to be, of this epoch, which the new consensus store keeps until it is there.

    Repeating it gives the same one, whatever the epoch. Raises InvalidUsage, Conflict (another store has taken over).
    """
    blob, consensus = location.blob, location.consensus
    mark, _ = _look(blob, consensus, location.settings.build)
    if mark is not None and _held(blob, mark) in (None, encode_binding(mark)):
        return mark
    if mark is not None:
        raise Conflict(
            f"another consensus store has taken over {blob.url} at epoch {mark.epoch}, while it was recovered to "
            f"{consensus.url}: use that one, or recover to an empty one"
        )
    with translated():
        location_id = blob.get(ID_KEY).decode("ascii", "replace")
    binding = LocationBinding(location_id, epoch, location.ids.uuid7())
    set_mark(consensus, binding, location.settings.build)
    return binding


def fence(blob: Blob, binding: LocationBinding) -> None:
    """Write the epoch: processes of the old one only read, once they see it. Repeating it is safe. Raises Conflict."""
    hold_epoch(blob, binding)
    with translated():
        last = epochs_in(blob)[-1]
    if last > binding.epoch:
        raise Conflict(f"another consensus store has taken over {blob.url} at epoch {last}")


def _held(blob: Blob, binding: LocationBinding) -> bytes | None:
    try:
        with translated_but_missing():
            return blob.get(epoch_key(binding.epoch))
    except BlobNotFound:
        return None


def _versions(location: Location, least: int) -> Versions:
    """Those of stores that are not bound yet, at the format version that the blob store has.

    A copy may lack the blob of a version that something else names: the version is raised to `least`.
    """
    blob, consensus, build = location.blob, location.consensus, location.settings.build
    version = read_format(blob, build)
    if version < least:
        _, version = raise_format(blob, _up_to(build, least))
    kept = _up_to(build, version)
    return Versions(blob, consensus, location.ids, kept, _Unbound(blob, consensus, location.ids, location.clock, kept))


def _up_to(build: Build, version: int) -> Build:
    return Build(tuple(known for known in build.formats if known <= version), build.features)


def _bind(location: Location, binding: LocationBinding) -> None:
    data = encode_binding(binding)
    with translated():
        location.consensus.compare_and_set(LOG_KEY, 1, data)
        entry = location.consensus.head(LOG_KEY)
    if entry is None or entry.data != data:
        raise Conflict(f"{location.consensus.url} was bound by another process meanwhile; look, then retry")
    location.identity.check()


def publish_heads(location: Location, names: list[str]) -> None:
    """Publish the newest commit of each shard, so that the blob store tells it, should the logs be lost."""
    publisher = Publisher(location.blob, location.identity, location.clock, location.ids, PublishSettings())
    for start in range(0, len(names), PUBLISHED_AT_ONCE):
        for name in names[start : start + PUBLISHED_AT_ONCE]:
            with translated():
                head = location.consensus.head(name)
            if head is not None:
                publisher.add(name, head.data)
        with translated():
            publisher.publish(now=True)


# The mark in a consensus store that is to be a location's: the binding that is to be, and what became of it.
#
# Its log has a mark at each odd seqno: the binding. The even one after it decides: the same binding once more, when
# the logs of shards begin, or one without a pair, where it was taken back. So of who goes on and who takes it back
# one wins, whenever either is killed; and what was taken back never becomes a home under that epoch.


MARK_KEY = HIDDEN + "recovery"


@dataclass(frozen=True, slots=True)
class RecoveryMark:
    """The newest entry of the mark's log. `binding.pair` is "" where it was taken back."""

    seqno: int
    binding: LocationBinding

    @property
    def is_taken_back(self) -> bool:
        """Whether nothing becomes of it. Another one may follow, of a later epoch."""
        return not self.binding.pair

    @property
    def has_begun(self) -> bool:
        """Whether logs of shards have begun, or are about to: it cannot be taken back any more."""
        return self.seqno % 2 == 0 and not self.is_taken_back


def mark_of(consensus: Consensus, build: Build) -> RecoveryMark | None:
    """The mark that is there. Raises Unavailable, Corruption."""
    with translated():
        entry = consensus.head(MARK_KEY)
    return None if entry is None else RecoveryMark(entry.seqno, decode_binding(entry.data, build))


def is_bound(consensus: Consensus, mark: RecoveryMark) -> bool:
    """Whether the consensus store is bound as the mark says: that home is there. Raises Unavailable."""
    with translated():
        entry = consensus.head(LOG_KEY)
    return entry is not None and entry.data == encode_binding(mark.binding)


def set_mark(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Mark the store, in which no mark is, or one that was taken back. Raises Conflict: another one was quicker."""
    before = mark_of(consensus, build)
    with translated():
        consensus.compare_and_set(MARK_KEY, 1 if before is None else before.seqno + 1, encode_binding(binding))
    found = mark_of(consensus, build)
    if found is None or found.binding != binding:
        raise Conflict(f"another recovery into {consensus.url} was begun; look, then retry")


def begin_marked(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Decide that logs begin under this binding. Repeating it is safe. Raises Conflict: it was taken back meanwhile."""
    found = mark_of(consensus, build)
    if found is not None and found.binding == binding and not found.has_begun:
        with translated():
            consensus.compare_and_set(MARK_KEY, found.seqno + 1, encode_binding(binding))
        found = mark_of(consensus, build)
    if found is None or found.binding != binding:
        raise Conflict(f"what was begun at {consensus.url} was taken back meanwhile; look, then retry")


def take_back(consensus: Consensus, mark: RecoveryMark, build: Build) -> None:
    """Decide that nothing becomes of the mark. Repeating it is safe. Raises Conflict: it has begun as home."""
    if mark.is_taken_back:
        return
    gone = LocationBinding(mark.binding.location_id, mark.binding.epoch, "")
    with translated():
        is_in_use = consensus.head(LOG_KEY) is not None or bool(consensus.keys("", "", 1))
        if not mark.has_begun and not is_in_use:
            consensus.compare_and_set(MARK_KEY, mark.seqno + 1, encode_binding(gone))
    found = mark_of(consensus, build)
    if found is None or found.binding != gone:
        raise Conflict(f"{consensus.url} has begun as home: repeat the switch; it cannot be undone")


def hold_epoch(blob: Blob, binding: LocationBinding) -> None:
    """Write the epoch, once. Repeating it is safe. Raises Conflict: it is of another consensus store."""
    with translated():
        try:
            blob.put(epoch_key(binding.epoch), encode_binding(binding))
        except BlobExists:
            if blob.get(epoch_key(binding.epoch)) != encode_binding(binding):
                raise Conflict(f"another consensus store has taken over {blob.url} at epoch {binding.epoch}") from None
