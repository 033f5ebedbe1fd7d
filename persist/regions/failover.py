"""Promotion: once a home is lost, a copy of its blob store becomes home, from the newest versions that are whole.

It is a recovery on the copy, under the next epoch. Before that it is looked whether the old home is still there. What
that home has acknowledged and was not copied is its divergence (`salvage`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from blob import Blob
from persist.commit.location import Location
from persist.commit.location_identity import ID_KEY
from persist.copies.recovery import How, Recovered, Told, begin_anew, ended
from persist.core.errors import Conflict, InvalidUsage, Unavailable
from persist.formats.store_errors import translated
from persist.regions.asking import presence
from persist.regions.failover_record import Promotion, kept_of, promotion_to, write_promotion
from persist.regions.region_index import Entry, Index, change_index

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
    how: How,
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


def moved_home(path: str, of: str, servers: tuple[str, ...], epoch: int) -> Entry:
    """Set in the index that region `of` is written at these servers from now on; its entry.

    Raises InvalidUsage, Corruption (the file is damaged), Conflict (it has a later epoch: this home would only read),
    Unavailable (another one changes it, and does not end).
    """

    def moved(index: Index) -> Index:
        before = index.regions.get(of, Entry())
        if before.epoch > epoch:
            raise Conflict(
                f"the index {path} has epoch {before.epoch} of region {of!r}, and this home is of epoch {epoch}: it "
                "would only read. Another home has taken over, or the index was set meanwhile; look, then set it by "
                "`persist region`, or promote to another empty consensus store"
            )
        return Index({**index.regions, of: replace(before, write=servers, epoch=epoch, home_blob="")})

    return change_index(path, moved).regions[of]
