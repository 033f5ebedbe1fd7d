"""What a promotion notes in the blob store that becomes home: from which version each shard went on.

What the old home has acknowledged beyond that is its divergence, which `salvage` finds by this note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from blob import Blob, BlobExists
from persist.copies.recovery import Recovered
from persist.core.errors import Corruption, InvalidUsage, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.formats.records import json_crc
from persist.formats.store_errors import translated

PREFIX = "promotions/"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Kept:
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
    shards: Mapping[str, Kept]
    earlier: tuple[Promotion, ...] = ()

    def of_shard(self, name: str) -> Kept | None:
        """What was kept of the shard of this name; None: nothing."""
        return self.shards.get(name)


def kept_of(found: Recovered) -> dict[str, Kept]:
    """What a recovery brings back, by name."""
    return {
        one.name: Kept(
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
            name: Kept(version, Antichain.from_json(upper), Antichain.from_json(resumes), shard_id, acknowledged)
            for name, (version, upper, resumes, shard_id, acknowledged) in body["shards"].items()
        }
        return Promotion(body["location"], body["epoch"], body["region"], body["of"], body["at_ms"], shards)
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"{where} does not make sense: {error!r}") from error
