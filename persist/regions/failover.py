"""Promotion: once a home is lost, a copy of its blob store becomes home, from the newest versions that are whole.

It is a recovery on the copy, under the next epoch. Before that it is looked whether the old home is still there. What
that home has acknowledged and was not copied is its divergence (`salvage`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from blob import Blob, BlobExists
from persist.commit.location import Location
from persist.commit.location_identity import ID_KEY, LOOK_EVERY_S, Identity
from persist.copies.recovery import Recovered, RecoveryRequest, Told, begin_anew, ended
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
    presence,
)

log = logging.getLogger("persist.regions")


@dataclass(frozen=True, slots=True)
class OldHome:
    """`urls`: its servers. `blob`: its blob store, to which the new epoch goes, so that it stops. `is_lost`: the

    operator knows that nobody writes there any more, or takes what comes of it.
    """

    urls: tuple[str, ...] = ()
    blob: Blob | None = None
    is_lost: bool = False

    def check_gone(self, of: str) -> None:
        """Raises Conflict: it answers, or may. InvalidUsage: nothing is given by which it could be asked."""
        if self.is_lost:
            return
        if not self.urls and self.blob is None:
            raise InvalidUsage(
                f"nothing tells whether the home of region {of!r} is lost: give its servers (--home, or --index), or "
                "its blob store (--home-blob); or --home-is-lost, if you know that nobody writes there any more"
            )
        found = [presence(url) for url in self.urls]
        answering = [str(one) for one in found if not one.is_silent]
        if answering and self.blob is None:
            raise Conflict(
                f"the home of region {of!r} answers at {', '.join(answering)}: what it acknowledges from now on "
                "would be lost. `persist region switch` loses nothing; or give --home-blob, so that it stops; or "
                "--home-is-lost, if you know that nobody writes there any more"
            )
        for one in found:
            log.warning("the home of region %r %s: %s", of, "is silent at" if one.is_silent else "answers at", one)

    def stores(self, location_id: bytes) -> tuple[Blob, ...]:
        """The stores that are to be fenced. Raises InvalidUsage: it is of another location, or of none; Unavailable."""
        if self.blob is None:
            return ()
        try:
            with translated():
                if self.blob.stat(ID_KEY) is None:
                    raise InvalidUsage(f"{self.blob.url} has no location: give the blob store of the home that is lost")
                if self.blob.get(ID_KEY) != location_id:
                    raise InvalidUsage(f"{self.blob.url} is of another location than the copy")
        except Unavailable as error:
            if not self.is_lost:
                raise Unavailable(
                    f"the home cannot be stopped: {error.message}. Retry, or give --home-is-lost if nobody writes there"
                ) from error
            log.warning("the home cannot be stopped: %s", error.message)
            return ()
        return (self.blob,)


def check_copy(location: Location) -> bytes:
    """The id of the location of which this blob store is a copy. Raises InvalidUsage: it is none, and no home's."""
    with translated():
        if location.blob.stat(ID_KEY) is None:
            raise InvalidUsage(f"{location.blob.url} has no location: give the copy")
        return location.blob.get(ID_KEY)


def promote(
    location: Location,
    region: str,
    of: str,
    home: OldHome,
    how: RecoveryRequest,
    told: Told = lambda done, of: None,
) -> Recovered:
    """Make the copy a home, whose logs begin in the location's consensus store, which is empty.

    Repeating it after an error goes on, also once it has ended. Raises what `recover` raises, Conflict (the old home
    answers), InvalidUsage, Unavailable (the old home's store was given, and does not answer).
    """
    how.check()
    if (done := ended(location)) is not None:
        return done
    location_id = check_copy(location)
    home.check_gone(of)
    how = replace(how, fenced=home.stores(location_id), note=Note(location, region, of))
    return begin_anew(location, how, told)


@dataclass(frozen=True, slots=True)
class Note:
    """Called by a recovery, it notes from which versions the shards go on; of those begun before what was noted."""

    location: Location
    region: str
    of: str

    def __call__(self, found: Recovered, begun: Iterable[str]) -> None:
        blob = self.location.blob
        earlier = promotion_to(blob, found.epoch)
        before = {} if earlier is None else {name: earlier.shards[name] for name in begun if name in earlier.shards}
        shards = {**kept_of(found), **before}
        location_id = check_copy(self.location).decode("ascii", "replace")
        at_ms = self.location.clock.now_ms()
        write_promotion(blob, Promotion(location_id, found.epoch, self.region, self.of, at_ms, shards))


def moved_home(path: str, of: str, servers: tuple[str, ...], epoch: int) -> RegionEntry:
    """Set in the index that region `of` is written at these servers from now on; its entry.

    Raises InvalidUsage, Corruption (the file is damaged), Conflict (it has a later epoch: this home would only read),
    Unavailable (another one changes it, and does not end).
    """

    def moved(index: RegionIndex) -> RegionIndex:
        before = index.regions.get(of, RegionEntry())
        if before.epoch > epoch:
            raise Conflict(
                f"the index {path} has epoch {before.epoch} of region {of!r}, and this home is of epoch {epoch}: it "
                "would only read. Another home has taken over, or the index was set meanwhile; look, then set it by "
                "`persist region`, or promote to another empty consensus store"
            )
        return RegionIndex({**index.regions, of: replace(before, write=servers, epoch=epoch, home_blob="")})

    return change_index(path, moved).regions[of]


# What a promotion notes in the blob store that becomes home: from which version each shard went on.
#
# What the old home has acknowledged beyond that is its divergence, which `salvage` finds by this note.


PREFIX = "promotions/"
VERSION = 1


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """What the new home had of one shard: its version, and the upper of that. `resumes`: the upper it went on from.

    `shard_id`: of which life of the name that was. `acknowledged`: the digest of what callers were told besides rows.
    """

    version: int
    upper: Antichain
    resumes: Antichain
    shard_id: str = ""
    acknowledged: str = ""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Of the home of this epoch, in `region`, of the shards of region `of`. A shard that is not among them was lost.

    `earlier`: those that led to the home before it, ascending, where they were read as well.
    """

    location_id: str
    epoch: int
    region: str
    of: str
    at_ms: int
    shards: Mapping[str, KeptVersion]
    earlier: tuple[Promotion, ...] = ()

    def of_shard(self, name: str) -> KeptVersion | None:
        """What was kept of the shard of this name; None: nothing."""
        return self.shards.get(name)


def kept_of(found: Recovered) -> dict[str, KeptVersion]:
    """What a recovery brings back, by name."""
    return {
        one.name: KeptVersion(
            one.version,
            Antichain.from_json(one.upper),
            Antichain.from_json(one.resumes),
            one.shard_id,
            one.acknowledged,
        )
        for one in found.shards
        if one.name and one.version is not None and one.upper is not None and one.resumes is not None
    }


def write_promotion(blob: Blob, promotion: Promotion) -> None:
    """Note it, after those of earlier tries. Raises what the blob store raises."""
    data = _encode(promotion)
    with translated():
        number = len(list(blob.list(_prefix(promotion.epoch))))
        while True:
            try:
                blob.put(f"{_prefix(promotion.epoch)}{number:06d}", data)
                return
            except BlobExists:
                number += 1


def promotions_in(blob: Blob) -> tuple[Promotion, ...]:
    """The note of each promotion that led to this store, by epoch. Raises Corruption, UpgradeNeeded."""
    with translated():
        epochs = {int(key.split("/")[1]) for stat in blob.list(PREFIX) if (key := stat.key).count("/") == 2}
    found = (promotion_to(blob, epoch) for epoch in sorted(epochs))
    return tuple(promotion for promotion in found if promotion is not None)


def last_promotion(blob: Blob) -> Promotion | None:
    """The note of the last promotion to this store, with those before; None: it has none. Raises as `promotions_in`."""
    found = promotions_in(blob)
    return replace(found[-1], earlier=found[:-1]) if found else None


def promotion_to(blob: Blob, epoch: int) -> Promotion | None:
    """The last note of the promotion to this epoch; None: there is none. Raises Corruption, UpgradeNeeded."""
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
        told = json.loads(data)
        if told["persist"] != "promotion":
            raise InvalidUsage(f"{where} is no note of a promotion")
        if told["version"] > VERSION:
            raise UpgradeNeeded(f"{where} is of a later version than this persist knows: upgrade it")
        body = told["body"]
        if told["crc32"] != json_crc(body):
            raise Corruption(f"{where} fails its checksum")
        shards = {
            name: KeptVersion(version, Antichain.from_json(upper), Antichain.from_json(resumes), shard_id, acknowledged)
            for name, (version, upper, resumes, shard_id, acknowledged) in body["shards"].items()
        }
        return Promotion(body["location"], body["epoch"], body["region"], body["of"], body["at_ms"], shards)
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"{where} does not make sense: {error!r}") from error


# A home looks whether another one has taken over: in its stores, and in the index of regions.
#
# A later epoch in either ends its writes, at most `LOOK_EVERY_S` after it can be seen there. A process that slept
# looks before it writes again.


FENCE_S_MIN = 2 * LOOK_EVERY_S
FENCE_S_MAX = 86_400.0
PAUSE_S = 0.5  # between looks that take long
log = logging.getLogger("persist.regions")


def check_fence(fence_s: float) -> None:
    """Raises InvalidUsage where that is no time after which a home can stop by itself. 0: it never does."""
    if fence_s and not FENCE_S_MIN <= fence_s <= FENCE_S_MAX:
        least, most = f"{FENCE_S_MIN:.0f}", f"{FENCE_S_MAX:.0f}"
        raise InvalidUsage(f"self_fence is {fence_s:g}; it must be 0, or in [{least}, {most}] seconds")


class HomeWatch:
    """Looks for one process, from `start` on until `close`. `region`: the one that it is home of."""

    def __init__(
        self, identity: Identity, region: str, index: IndexFile | IndexUrl | None = None, fence_s: float = 0.0
    ) -> None:
        check_fence(fence_s)
        self._identity = identity
        self._region = region
        self._index = index
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        identity.look_elsewhere(self.taken_over, fence_s or None)

    def taken_over(self) -> ReadOnly | None:
        """Why this process only reads, by the index; None: it may write. Raises Unavailable."""
        if self._index is None or not self._region:
            return None
        epoch = self._identity.binding().epoch
        try:
            return taken_over(self._index.fetch(), self._region, epoch)
        except OlderIndex as error:
            if (taken := taken_over(error.index, self._region, epoch)) is not None:
                return taken  # it tells enough where it has a later epoch
            raise

    def start(self) -> None:
        """Look now, and from now on in the background."""
        self._look()
        self._thread = threading.Thread(target=self._run, name="persist-fence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        took_s = 0.0
        while not self._ends.wait(max(PAUSE_S, LOOK_EVERY_S / 2 - took_s)):
            began_s = time.monotonic()
            self._look()
            took_s = time.monotonic() - began_s

    def _look(self) -> None:
        try:
            self._identity.look()
        except PersistError as error:
            log.warning("it could not be looked whether another home has taken over: %s", error)
        except Exception:  # a bug: the next look may tell
            log.exception("looking whether another home has taken over failed")

    def close(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()


def taken_over(index: RegionIndex, region: str, epoch: int) -> ReadOnly | None:
    """What is said to who would write at a home of this epoch, where the index has a later one."""
    entry = index.regions.get(region)
    if entry is None or entry.epoch <= epoch:
        return None
    at = f", at {', '.join(entry.write)}" if entry.write else ""
    return ReadOnly(
        f"region {region!r} is at home elsewhere since epoch {entry.epoch}{at}; this one is of epoch {epoch}, and only "
        "reads",
        home=list(entry.write),
        region=region,
    )
