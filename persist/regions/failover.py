"""Failover: after a home is lost, a copy of its blob store becomes home, from the newest complete versions.

It is a recovery on the copy, under the next epoch. First it checks whether the old home is still alive. What that home
acknowledged and was not copied is its divergence (`salvage`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from blob import Blob, BlobExists
from persist.commit.location import Location
from persist.commit.location_identity import ID_KEY, LOOK_EVERY_S, Identity
from persist.copies.recovery import Recovered, RecoveryRequest, find_ended_recovery, run_recovery
from persist.core.errors import Conflict, Corruption, InvalidUsage, PersistError, ReadOnly, Unavailable, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.formats.records import json_crc
from persist.formats.store_errors import translated
from persist.regions.region_index import (
    IndexFile,
    IndexUrl,
    OlderIndex,
    RegionEntry,
    RegionIndex,
    change_index,
    probe_server,
)

log = logging.getLogger("persist.regions")


@dataclass(frozen=True, slots=True)
class OldHome:
    """The home that is lost. `urls`: its servers. `blob`: its blob store, which is fenced by the new epoch.

    `is_lost`: the operator knows that it takes no writes any more, or accepts their loss.
    """

    urls: tuple[str, ...] = ()
    blob: Blob | None = None
    is_lost: bool = False

    def check_gone(self, of: str) -> None:
        """Raises Conflict: it answers, or may. InvalidUsage: there is nothing by which to check it."""
        if self.is_lost:
            return
        if not self.urls and self.blob is None:
            raise InvalidUsage(
                f"it is unknown whether the home of region {of!r} is lost: give its servers (--home, or --index), or "
                "its blob store (--home-blob); or --home-is-lost, if you know that it takes no writes any more"
            )
        servers = [probe_server(url) for url in self.urls]
        answering = [str(server) for server in servers if not server.is_silent]
        if answering and self.blob is None:
            raise Conflict(
                f"the home of region {of!r} answers at {', '.join(answering)}: writes that it acknowledges from now on "
                "would be lost. `persist region switch` loses nothing; or give --home-blob, to fence it; or "
                "--home-is-lost, if you know that it takes no writes any more"
            )
        for server in servers:
            log.warning(
                "the home of region %r %s: %s", of, "is silent at" if server.is_silent else "answers at", server
            )

    def stores(self, location_id: bytes) -> tuple[Blob, ...]:
        """The stores to fence. Raises InvalidUsage: it has another location, or none; Unavailable."""
        if self.blob is None:
            return ()
        try:
            with translated():
                if self.blob.stat(ID_KEY) is None:
                    raise InvalidUsage(f"{self.blob.url} has no location: give the blob store of the lost home")
                if self.blob.get(ID_KEY) != location_id:
                    raise InvalidUsage(f"{self.blob.url} has another location than the copy")
        except Unavailable as error:
            if not self.is_lost:
                raise Unavailable(
                    f"the home cannot be fenced: {error.message}. Retry, or give --home-is-lost if it takes no writes"
                ) from error
            log.warning("the home cannot be fenced: %s", error.message)
            return ()
        return (self.blob,)


def check_copy(location: Location) -> bytes:
    """The id of the location in this blob store. Raises InvalidUsage: there is none."""
    with translated():
        if location.blob.stat(ID_KEY) is None:
            raise InvalidUsage(f"{location.blob.url} has no location: give the copy")
        return location.blob.get(ID_KEY)


def promote(location: Location, region: str, of: str, home: OldHome, request: RecoveryRequest) -> Recovered:
    """Make the copy a home, whose logs begin in the location's consensus store, which is empty.

    Repeating it after an error, or after it has ended, continues it. Raises as `run_recovery`, Conflict (the old
    home answers), InvalidUsage, Unavailable (the old home's store was given, and does not answer).
    """
    request.check()
    if (recovered := find_ended_recovery(location)) is not None:
        return recovered
    location_id = check_copy(location)
    home.check_gone(of)
    request = replace(request, fenced=home.stores(location_id), note=partial(record_promotion, location, region, of))
    return run_recovery(location, request)


def record_promotion(location: Location, region: str, of: str, recovery: Recovered, begun: Iterable[str]) -> None:
    """Record from which versions the shards continue; those that have begun keep their earlier record."""
    earlier_try = promotion_to(location.blob, recovery.epoch)
    recorded = {} if earlier_try is None else earlier_try.shards
    shards = {**kept_versions(recovery), **{name: recorded[name] for name in begun if name in recorded}}
    location_id = check_copy(location).decode("ascii", "replace")
    promotion = Promotion(location_id, recovery.epoch, region, of, location.clock.now_ms(), shards)
    data = _encode(promotion)
    with translated():
        number = len(list(location.blob.list(_prefix(promotion.epoch))))  # after those of earlier tries
        while True:
            try:
                location.blob.put(f"{_prefix(promotion.epoch)}{number:06d}", data)
                return
            except BlobExists:
                number += 1


def record_new_home(path: str, of: str, servers: tuple[str, ...], epoch: int) -> RegionEntry:
    """Set in the index that region `of` is written at these servers from now on; returns its entry.

    Raises InvalidUsage, Corruption (the file is damaged), Conflict (it has a later epoch: this home would be
    read-only), Unavailable (another process keeps the index locked).
    """

    def with_new_home(index: RegionIndex) -> RegionIndex:
        entry = index.regions.get(of, RegionEntry())
        if entry.epoch > epoch:
            raise Conflict(
                f"the index {path} has epoch {entry.epoch} for region {of!r}, and this home has epoch {epoch}: it "
                "is read-only. Another home has taken over, or the index was set meanwhile; check, then set it by "
                "`persist region`, or promote to another empty consensus store"
            )
        return RegionIndex({**index.regions, of: replace(entry, write=servers, epoch=epoch, home_blob="")})

    return change_index(path, with_new_home).regions[of]


# The record of a promotion in the blob store that becomes home: from which version each shard continued.
#
# What the old home acknowledged beyond that is its divergence, which `salvage` finds by this record.

PREFIX = "promotions/"
VERSION = 1


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """What the new home had of one shard: its version and upper. `resumes`: the upper from which it continued.

    `shard_id`: its incarnation. `acknowledged`: the digest of what callers were acknowledged besides rows.
    """

    version: int
    upper: Antichain
    resumes: Antichain
    shard_id: str = ""
    acknowledged: str = ""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The promotion to the home of this epoch, in `region`, of the shards of region `of`. Other shards were lost.

    `earlier`: the promotions before it, ascending, if they were read as well.
    """

    location_id: str
    epoch: int
    region: str
    of: str
    at_ms: int
    shards: Mapping[str, KeptVersion]
    earlier: tuple[Promotion, ...] = ()


def kept_versions(recovered: Recovered) -> dict[str, KeptVersion]:
    """What a recovery recovers, by name."""
    return {
        shard.name: _kept(shard.version, shard.upper, shard.resumes, shard.shard_id, shard.acknowledged)
        for shard in recovered.shards
        if shard.name and shard.version is not None and shard.upper is not None and shard.resumes is not None
    }


def _kept(version: int, upper: list[int], resumes: list[int], shard_id: str, acknowledged: str) -> KeptVersion:
    return KeptVersion(version, Antichain.from_json(upper), Antichain.from_json(resumes), shard_id, acknowledged)


def promotions_in(blob: Blob) -> tuple[Promotion, ...]:
    """The last record of each promotion that led to this store, by epoch. Raises Corruption, UpgradeNeeded."""
    with translated():
        epochs = {int(key.split("/")[1]) for stat in blob.list(PREFIX) if (key := stat.key).count("/") == 2}
    promotions = (promotion_to(blob, epoch) for epoch in sorted(epochs))
    return tuple(promotion for promotion in promotions if promotion is not None)


def last_promotion(blob: Blob) -> Promotion | None:
    """The last promotion to this store, with those before; None: it has none. Raises as `promotions_in`."""
    promotions = promotions_in(blob)
    return replace(promotions[-1], earlier=promotions[:-1]) if promotions else None


def promotion_to(blob: Blob, epoch: int) -> Promotion | None:
    """The last record of the promotion to this epoch; None: there is none. Raises Corruption, UpgradeNeeded."""
    with translated():
        keys = [stat.key for stat in blob.list(_prefix(epoch))]
        return _decode(blob.get(keys[-1]), f"{keys[-1]} in {blob.url}") if keys else None


def _prefix(epoch: int) -> str:
    return f"{PREFIX}{epoch}/"


def _encode(promotion: Promotion) -> bytes:
    body = {
        "location": promotion.location_id,
        "epoch": promotion.epoch,
        "region": promotion.region,
        "of": promotion.of,
        "at_ms": promotion.at_ms,
        "shards": {
            name: [kept.version, kept.upper.to_json(), kept.resumes.to_json(), kept.shard_id, kept.acknowledged]
            for name, kept in sorted(promotion.shards.items())
        },
    }
    return json.dumps({"persist": "promotion", "version": VERSION, "body": body, "crc32": json_crc(body)}).encode()


def _decode(data: bytes, where: str) -> Promotion:
    try:
        document = json.loads(data)
        if document["persist"] != "promotion":
            raise InvalidUsage(f"{where} is not a record of a promotion")
        if document["version"] > VERSION:
            raise UpgradeNeeded(f"{where} is of a later version than this persist supports: upgrade persist")
        body = document["body"]
        if document["crc32"] != json_crc(body):
            raise Corruption(f"{where} fails its checksum")
        shards = {name: _kept(*kept) for name, kept in body["shards"].items()}
        return Promotion(body["location"], body["epoch"], body["region"], body["of"], body["at_ms"], shards)
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"{where} is malformed: {error!r}") from error


# Watching whether another home has taken over: in the stores of this home, and in the index of regions.
#
# A later epoch in either ends writes, at most `LOOK_EVERY_S` after it is visible there. A process that was suspended
# checks before it writes again.

FENCE_S_MIN = 2 * LOOK_EVERY_S
FENCE_S_MAX = 86_400.0
PAUSE_S = 0.5  # minimum pause between checks


def check_fence(fence_s: float) -> None:
    """Raise InvalidUsage unless it is a valid time after which a home fences itself. 0: it never does."""
    if fence_s and not FENCE_S_MIN <= fence_s <= FENCE_S_MAX:
        least, most = f"{FENCE_S_MIN:.0f}", f"{FENCE_S_MAX:.0f}"
        raise InvalidUsage(f"self_fence is {fence_s:g}; it must be 0, or in [{least}, {most}] seconds")


class HomeWatch:
    """Checks from `start` on until `close` whether another home has taken over. `region`: that of this home."""

    def __init__(
        self, identity: Identity, region: str, index: IndexFile | IndexUrl | None = None, fence_s: float = 0.0
    ) -> None:
        check_fence(fence_s)
        self._identity = identity
        self._region = region
        self._index = index
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        identity.look_elsewhere(self.taken_over, fence_s or None)

    def taken_over(self) -> ReadOnly | None:
        """Why this process is read-only, by the index; None: it may write. Raises Unavailable."""
        if self._index is None or not self._region:
            return None
        epoch = self._identity.binding().epoch
        try:
            return taken_over(self._index.fetch(), self._region, epoch)
        except OlderIndex as error:
            if (taken := taken_over(error.index, self._region, epoch)) is not None:
                return taken  # a later epoch in an older index suffices
            raise

    def start(self) -> None:
        """Check now, and from now on in the background."""
        self._look()
        self._thread = threading.Thread(target=self._run, name="persist-fence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        duration_s = 0.0
        while not self._ended.wait(max(PAUSE_S, LOOK_EVERY_S / 2 - duration_s)):
            began_s = time.monotonic()
            self._look()
            duration_s = time.monotonic() - began_s

    def _look(self) -> None:
        try:
            self._identity.check_home()
        except PersistError as error:
            log.warning("cannot check whether another home has taken over: %s", error)
        except Exception:  # a bug; the next check may succeed
            log.exception("checking whether another home has taken over failed")

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


def taken_over(index: RegionIndex, region: str, epoch: int) -> ReadOnly | None:
    """The error for writes at a home of this epoch, if the index has a later one."""
    entry = index.regions.get(region)
    if entry is None or entry.epoch <= epoch:
        return None
    at = f", at {', '.join(entry.write)}" if entry.write else ""
    return ReadOnly(
        f"region {region!r} is at home elsewhere since epoch {entry.epoch}{at}; this home has epoch {epoch}, and is "
        "read-only",
        home=list(entry.write),
        region=region,
    )
