"""Recovery from the blob store: the consensus store is lost, and every shard restarts its log in an empty one.

The order of steps makes it safe to kill and repeat: a mark in the new consensus store, which names the epoch; the epoch
in the blob store, which fences processes of the old one; the logs; the binding of the two stores. Until the binding
exists no process opens the location, so that no other process creates or commits to a shard that is not recovered yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blob import Blob, BlobExists
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
from persist.copies.blob_store_scan import BlobStoreScan, ScannedShard, last_heartbeat_ms
from persist.copies.shard_facts import first_names
from persist.copies.state_rewrite import relend, to_carried
from persist.core.batch import Description, Run, batch_of, trace_of
from persist.core.errors import Conflict, Corruption, InvalidUsage
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain
from persist.core.ids import LocationBinding, SeqNo
from persist.core.record import replace
from persist.core.shard_view import digest_of
from persist.core.state import State
from persist.core.transitions.time_checks import with_times
from persist.formats.state_frames import Build, decode_binding, encode_binding
from persist.formats.store_errors import read_or_none, translated
from persist.maintenance.journal_writer import Publisher, PublishSettings

GAP = 1_000_000  # times that may have been used after the last known one
SEQNO_GAP = 1_000_000  # commits that may have been made after the last known one, also by a process of the old epoch
GAP_MAX = 2**48
PUBLISHED_AT_ONCE = 1_000  # shards in one publication


@dataclass(frozen=True, slots=True)
class RecoveryRequest:
    """The options of a recovery. `accept_loss`: also if the newest published version of a shard is incomplete.

    `gap`: times that are skipped after the last known one. `older`: an older copy of the lost consensus store, whose
    logs count as published. `fenced`: stores of a home that ends, to which the epoch is written first. `handed_over`:
    the mark to whose epoch that home has handed over every shard, so that nothing follows what is known, and no time is
    skipped. `least`: the new epoch is above this one as well, which an index has. `note` is called with the plan, and
    with the names whose logs an earlier try has begun, before further logs are begun.
    """

    accept_loss: bool = False
    gap: int = GAP
    older: Consensus | None = None
    fenced: Sequence[Blob] = ()
    handed_over: LocationBinding | None = None
    least: int = 0
    note: Callable[[Recovered, frozenset[str]], object] = lambda recovered, begun: None

    def check(self) -> None:
        """Raises InvalidUsage: the gap is out of range."""
        if not 1 <= self.gap <= GAP_MAX:
            raise InvalidUsage(f"the gap is {self.gap}; it must be in [1, {GAP_MAX}]")


@dataclass(frozen=True, slots=True)
class ShardRecovered:
    """What is, or would be, recovered of one shard: the commit `version`. Nothing is known of commits after `known`.

    `upper` is that of the newest complete version, and `resumes` the upper from which it continues: times between the
    two may have been used, and are never used again. `state_ms`: when that version was committed, by its committer's
    clock. `lost`: later published versions that are incomplete. `missing`: blobs that these lack, the first few. `why`:
    other problems. `name` "": the name is unknown, and nothing is recovered. `family`: the common prefix of its blob
    keys. `unborn`: it has blobs, but its first commit was not published, if there was one: it is not recovered.
    `handed_over`: the epoch of the home to which the version was handed over. `shard_id` and `acknowledged` are of that
    version: its incarnation, and the digest of what callers were acknowledged.
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
        """Whether the newest known version is recovered. An unborn shard has none."""
        return self.unborn or (bool(self.name) and self.upper is not None and not self.lost)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"shard": self.name or None, "id": self.family, "whole": self.is_whole}
        fields["version"] = self.version
        fields |= {"unknown_after": self.known, "upper": self.upper, "resumes": self.resumes}
        fields |= {"lost_versions": self.lost, "missing": list(self.missing)}
        fields["as_of"] = None if self.state_ms is None else instant_text(self.state_ms)
        return {**fields, "dropped": self.dropped, "unborn": self.unborn, "why": list(self.why)}


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is, or would be, recovered. `epoch` is the new one. `beat_ms`: the minute of the last heartbeat of
    maintenance; commits up to seconds before it are included. None: there was none. `had_ended`: an earlier run has
    completed the recovery and reported the shards.
    """

    epoch: int
    shards: tuple[ShardRecovered, ...]
    beat_ms: int | None
    had_ended: bool = False

    @property
    def lacking(self) -> list[str]:
        """The shards whose newest version is not recovered, by name, or by the prefix of their keys."""
        return [shard.name or shard.family for shard in self.shards if not shard.is_whole]


class _Unbound(Identity):
    """The identity of stores that are not bound yet. Only a recovery may write to them."""

    def check(self) -> LocationBinding:
        return LocationBinding("", 0, "")

    def check_writable(self) -> None:
        return

    def confirm(self) -> None:
        return

    def check_home(self) -> None:
        return


def plan(location: Location, request: RecoveryRequest | None = None) -> Recovered:
    """What a recovery would recover; see `RecoveryRequest`. Writes nothing. Raises what `run_recovery` raises."""
    request = request or RecoveryRequest()
    blob, consensus, least = location.blob, location.consensus, request.least
    mark, least_after_revoked = _check_target(blob, consensus, location.settings.build)
    if mark is not None and mark.epoch < least:
        raise Conflict(
            f"the recovery to {consensus.url} was begun for epoch {mark.epoch}, and the index has epoch {least}: this "
            "home would be read-only. Use the home of that epoch, or give another empty consensus store"
        )
    if request.older is not None:
        _check_older(blob, request.older, location.settings.build)
    scan = BlobStoreScan(blob, location.settings.build, request.older)
    planned = _planned(scan, RecoveryRequest(gap=request.gap), LocationBinding("", 0, "0" * 32))
    with translated():  # a copy may lack an epoch that something else mentions
        epochs = [epoch for other in (blob, *request.fenced) for epoch in epochs_in(other)]
    last_epoch = max(FIRST_EPOCH, least, scan.epoch, least_after_revoked, *epochs)
    epoch = last_epoch + 1 if mark is None else mark.epoch
    return Recovered(epoch, tuple(recovered for recovered, _ in planned), last_heartbeat_ms(blob))


def run_recovery(location: Location, request: RecoveryRequest | None = None) -> Recovered:
    """Restart the log of every shard in the location's consensus store, which is empty. See `RecoveryRequest`.

    Repeating it after an error continues it. Raises InvalidUsage (the consensus store is in use, the blob store has no
    location, `older` is of another one), Conflict (another recovery has taken over, or a shard was not handed over,
    though all should be), Corruption (without `accept_loss`: a shard is incomplete; nothing was written).
    """
    request = request or RecoveryRequest()
    request.check()
    preview = plan(location, request)
    if not request.accept_loss:
        _check_whole(preview)
    binding = request.handed_over or mark_recovery(location, preview.epoch)
    for blob in (*request.fenced, location.blob):
        fence(blob, binding)
    scan = BlobStoreScan(location.blob, location.settings.build, request.older)
    planned = _planned(scan, request, binding)  # including what was published until the fence
    recovered = Recovered(binding.epoch, tuple(summary for summary, _ in planned), preview.beat_ms)
    if not request.accept_loss:
        _check_whole(recovered)
    versions = _versions(location, scan.format_version)
    states_to_begin = {state.name: state for _, state in planned if state is not None}
    fenced_at = SeqNo(max((state.seqno for state in states_to_begin.values()), default=0) + SEQNO_GAP)
    states = relend(states_to_begin, versions, location.clock.now_ms(), fenced_at)
    confirm_mark(location.consensus, binding, location.settings.build)
    with translated():
        # Before any blob of the new home is written, which `persist region replicate` would delete from a copy.
        location.blob.delete([COPY_KEY])
        request.note(recovered, frozenset(name for name in states if location.consensus.head(name) is not None))
    for state in states.values():
        with translated():
            head = location.consensus.head(state.name)
        if head is None and not versions.begin(state):
            raise Conflict(f"another recovery is recovering shard {state.name!r} as well; check, then retry")
    _bind(location, binding)
    publish_heads(location, list(states))
    return recovered


def _bind(location: Location, binding: LocationBinding) -> None:
    data = encode_binding(binding)
    with translated():
        location.consensus.compare_and_set(LOG_KEY, 1, data)
        entry = location.consensus.head(LOG_KEY)
    if entry is None or entry.data != data:
        raise Conflict(f"{location.consensus.url} was bound by another process meanwhile; check, then retry")
    location.identity.check()


def find_ended_recovery(location: Location) -> Recovered | None:
    """The epoch of a completed recovery. None: there is none. The steps after its completion are repeated.

    Raises Conflict: another consensus store has taken over since.
    """
    mark = read_mark(location.consensus, location.settings.build)
    if mark is None or not is_bound(location.consensus, mark):
        return None
    with translated():
        last_epoch = epochs_in(location.blob)[-1]
    if last_epoch > mark.binding.epoch:
        raise Conflict(f"another consensus store has taken over {location.blob.url} at epoch {last_epoch} since")
    with translated():
        location.blob.delete([COPY_KEY])
    publish_heads(location, list(location.all_names(with_dropped=True)))
    return Recovered(mark.binding.epoch, (), last_heartbeat_ms(location.blob), had_ended=True)


# --- the plan


def _check_target(blob: Blob, consensus: Consensus, build: Build) -> tuple[LocationBinding | None, int]:
    """Check that the consensus store is empty, or has the mark of a begun recovery, which is returned.

    The number is a lower bound of the epoch after a revoked mark: the old home continued at the epoch after it.
    """
    with translated():
        if blob.stat(ID_KEY) is None:
            raise InvalidUsage(f"{blob.url} has no location: there is nothing to recover")
        bound, mark = consensus.head(LOG_KEY), read_mark(consensus, build)
        if mark is not None and is_bound(consensus, mark):
            epoch = mark.binding.epoch
            raise InvalidUsage(f"the recovery to {consensus.url} is complete, at epoch {epoch}: there is nothing to do")
        if bound is not None:
            raise InvalidUsage(f"{consensus.url} is, or was, in use by a location: give a new, empty one", in_use=True)
        names = consensus.keys("", "", 1)
        if (mark is None or mark.is_revoked) and names:
            raise InvalidUsage(f"{consensus.url} is not empty: it has shard {names[0]!r}. Give a new, empty one")
        if mark is None:
            return None, 0
        if blob.get(ID_KEY).decode("ascii", "replace") != mark.binding.location_id:
            raise InvalidUsage(f"a recovery of another location into {consensus.url} was begun; give an empty one")
        return (None, mark.binding.epoch + 1) if mark.is_revoked else (mark.binding, 0)


def _check_older(blob: Blob, older: Consensus, build: Build) -> None:
    with translated():
        entry = older.head(LOG_KEY)
        binding = None if entry is None else decode_binding(entry.data, build)
        if entry is None or binding is None or read_or_none(blob, epoch_key(binding.epoch)) != entry.data:
            raise InvalidUsage(f"{older.url} is not a copy of a consensus store of {blob.url}; omit it or give another")


def _planned(
    scan: BlobStoreScan, request: RecoveryRequest, binding: LocationBinding
) -> list[tuple[ShardRecovered, State | None]]:
    planned = []
    for scanned in scan.shards():
        is_handed_over = scanned.state is not None and scanned.state.handed_over == binding.epoch
        if request.handed_over and not scanned.unborn and not is_handed_over:
            raise Conflict(f"shard {scanned.name or scanned.family!r} was not handed over to epoch {binding.epoch}")
        planned.append(_plan(scanned, 0 if request.handed_over else request.gap, binding.pair))
    return planned


def _plan(scanned: ScannedShard, gap: int, pair: str) -> tuple[ShardRecovered, State | None]:
    state, lost = scanned.state, 0
    if state is not None and scanned.name:
        lost = max(0, scanned.known - state.seqno)
        resumed = _resumed(state, scanned.known, gap, pair)
        recovered = ShardRecovered(
            scanned.name, scanned.family, int(state.seqno), int(max(scanned.known, state.seqno)), state.upper.to_json(),
            resumed.upper.to_json(), state.walltime_ms, lost, scanned.missing, scanned.why, scanned.dropped,
            handed_over=state.handed_over, shard_id=state.shard_id, acknowledged=digest_of(state),
        )  # fmt: skip
        return recovered, resumed
    lost = int(scanned.known)
    recovered = ShardRecovered(
        scanned.name, scanned.family, None, lost, None, None, None, lost, scanned.missing, scanned.why, scanned.dropped,
        scanned.unborn,
    )  # fmt: skip
    return recovered, None


def _resumed(state: State, known: SeqNo, gap: int, pair: str) -> State:
    """The first State of the new log: beyond every seqno, and every time, that the old one may have used."""
    commit_id = hashlib.sha256(f"{pair}/{state.name}".encode()).hexdigest()[:32]
    # A proof covers the stores of the lost home, and these may be a copy with more blobs: they are examined again.
    erasures = {name: replace(erasure, proof=None) for name, erasure in state.erasures.items()}
    resumed = replace(to_carried(state, commit_id), seqno=SeqNo(max(known, state.seqno) + SEQNO_GAP), erasures=erasures)
    upper = state.upper.element
    if upper is None:
        return resumed
    resumes = min(upper + gap, TIME_MAX)
    if resumes <= upper:
        return resumed
    empty = batch_of(Description(Antichain(upper), Antichain(resumes), MINIMUM), ())
    # An append there is not by a replica whose rows the shard has: it must not be acknowledged and dropped.
    service_times = with_times(resumed.service_times, upper, resumes)
    pending_erasures = dict(erasures)
    for name, erasure in erasures.items():
        if erasure.pending is not None:  # it becomes effective at the time from which the shard continues
            runs = tuple(Run(tuple(part.at(resumes) for part in run.parts)) for run in erasure.pending.runs)
            pending_erasures[name] = replace(erasure, at=resumes, pending=replace(erasure.pending, runs=runs))
    trace = trace_of((*resumed.trace.batches, empty))
    return replace(resumed, trace=trace, service_times=service_times, erasures=pending_erasures)


def _check_whole(recovered: Recovered) -> None:
    if lacking := recovered.lacking:
        raise Corruption(
            f"the newest version of {len(lacking)} shards is incomplete: {first_names(lacking)}. A dry "
            "run shows what would be recovered; accept that by --accept-loss"
        )


# --- the steps


def mark_recovery(location: Location, epoch: int) -> LocationBinding:
    """Write the binding that is to be, of this epoch, to the new consensus store, which keeps it until it is bound.

    Repeating it returns the first one, whatever the epoch. Raises InvalidUsage, Conflict (another store took over).
    """
    blob, consensus = location.blob, location.consensus
    mark, _ = _check_target(blob, consensus, location.settings.build)
    if mark is not None and read_or_none(blob, epoch_key(mark.epoch)) in (None, encode_binding(mark)):
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
    """Write the epoch: processes of the old one become read-only once they see it. Safe to repeat. Raises Conflict."""
    write_epoch(blob, binding)
    with translated():
        last_epoch = epochs_in(blob)[-1]
    if last_epoch > binding.epoch:
        raise Conflict(f"another consensus store has taken over {blob.url} at epoch {last_epoch}")


def _versions(location: Location, least: int) -> Versions:
    """The versions of stores that are not bound yet, at the format version of the blob store.

    A copy may lack the blob of a format version that something else has: the version is raised to `least`.
    """
    blob, consensus, build = location.blob, location.consensus, location.settings.build

    def up_to(version: int) -> Build:
        return Build(tuple(known for known in build.formats if known <= version), build.features)

    version = read_format(blob, build)
    if version < least:
        _, version = raise_format(blob, up_to(least))
    unbound = _Unbound(blob, consensus, location.ids, location.clock, up_to(version))
    return Versions(blob, consensus, location.ids, up_to(version), unbound)


def publish_heads(location: Location, names: list[str]) -> None:
    """Publish the newest commit of each shard, so that the blob store has it if the logs are lost."""
    publisher = Publisher(location.blob, location.identity, location.clock, location.ids, PublishSettings())
    for start in range(0, len(names), PUBLISHED_AT_ONCE):
        for name in names[start : start + PUBLISHED_AT_ONCE]:
            with translated():
                head = location.consensus.head(name)
            if head is not None:
                publisher.add(name, head.data)
        with translated():
            publisher.publish(now=True)


# The mark in a consensus store that is to become a location's: the binding that is to be, and its outcome.
#
# Its log has a mark at each odd seqno: the binding. The even one after it decides: the same binding again when the logs
# of shards begin, or one without a pair if it was revoked. So exactly one of continuing and revoking wins, whenever
# either is killed; and a revoked mark never becomes a home under that epoch.


MARK_KEY = HIDDEN + "recovery"


@dataclass(frozen=True, slots=True)
class RecoveryMark:
    """The newest entry of the mark's log. `binding.pair` is "" if it was revoked."""

    seqno: int
    binding: LocationBinding

    @property
    def is_revoked(self) -> bool:
        """Whether it was revoked. Another mark may follow, of a later epoch."""
        return not self.binding.pair

    @property
    def has_begun(self) -> bool:
        """Whether logs of shards have begun, or are about to: it can no longer be revoked."""
        return self.seqno % 2 == 0 and not self.is_revoked


def read_mark(consensus: Consensus, build: Build) -> RecoveryMark | None:
    """The mark in the store. Raises Unavailable, Corruption."""
    with translated():
        entry = consensus.head(MARK_KEY)
    return None if entry is None else RecoveryMark(entry.seqno, decode_binding(entry.data, build))


def is_bound(consensus: Consensus, mark: RecoveryMark) -> bool:
    """Whether the consensus store is bound as the mark says: the recovery is complete. Raises Unavailable."""
    with translated():
        entry = consensus.head(LOG_KEY)
    return entry is not None and entry.data == encode_binding(mark.binding)


def set_mark(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Mark a store without a mark, or with a revoked one. Raises Conflict: another process was faster."""
    previous = read_mark(consensus, build)
    with translated():
        consensus.compare_and_set(MARK_KEY, 1 if previous is None else previous.seqno + 1, encode_binding(binding))
    mark = read_mark(consensus, build)
    if mark is None or mark.binding != binding:
        raise Conflict(f"another recovery into {consensus.url} was begun; check, then retry")


def confirm_mark(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Decide that logs begin under this binding. Safe to repeat. Raises Conflict: it was revoked meanwhile."""
    mark = read_mark(consensus, build)
    if mark is not None and mark.binding == binding and not mark.has_begun:
        with translated():
            consensus.compare_and_set(MARK_KEY, mark.seqno + 1, encode_binding(binding))
        mark = read_mark(consensus, build)
    if mark is None or mark.binding != binding:
        raise Conflict(f"the recovery into {consensus.url} was revoked meanwhile; check, then retry")


def revoke_mark(consensus: Consensus, mark: RecoveryMark, build: Build) -> None:
    """Decide that the mark is not continued. Safe to repeat. Raises Conflict: it has begun as home."""
    if mark.is_revoked:
        return
    revoked = LocationBinding(mark.binding.location_id, mark.binding.epoch, "")
    with translated():
        is_in_use = consensus.head(LOG_KEY) is not None or bool(consensus.keys("", "", 1))
        if not mark.has_begun and not is_in_use:
            consensus.compare_and_set(MARK_KEY, mark.seqno + 1, encode_binding(revoked))
    newest = read_mark(consensus, build)
    if newest is None or newest.binding != revoked:
        raise Conflict(f"{consensus.url} has begun as home: repeat the switch; it cannot be undone")


def write_epoch(blob: Blob, binding: LocationBinding) -> None:
    """Write the epoch, once. Safe to repeat. Raises Conflict: it belongs to another consensus store."""
    with translated():
        try:
            blob.put(epoch_key(binding.epoch), encode_binding(binding))
        except BlobExists:
            if blob.get(epoch_key(binding.epoch)) != encode_binding(binding):
                raise Conflict(f"another consensus store has taken over {blob.url} at epoch {binding.epoch}") from None
