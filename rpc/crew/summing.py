"""The figures of all worker processes of a server as those of one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from persist.formats.exposition import Family, Labelled, Spread
from rpc.crew.board import POOLS

FIGURES = b"application/vnd.persist.figures"  # the content type as which one worker tells another its own
_LARGEST = frozenset(
    {
        "persist_build_info",
        "persist_group_commands_max",
        "persist_quota_most",
        "persist_quota_file_unreadable",
        "persist_region_published_age_seconds",
        "persist_region_lag_seconds",
        "persist_region_missing_blobs",
        "persist_region_accepted_seqno",
        "persist_region_bad_blobs_total",
    }
)
_LEAST = frozenset({"persist_region_link_up"})


class _Family(msgspec.Struct, array_like=True):
    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    plain: list[tuple[tuple[str, ...], float]]
    spread: list[tuple[tuple[str, ...], tuple[tuple[float, ...], tuple[int, ...], float]]]


def encoded(families: Iterable[Family]) -> bytes:
    """Families as another worker reads them."""
    told = []
    for family in families:
        plain = [(key, float(value)) for key, value in family.samples if not isinstance(value, Spread)]
        spread = [(key, (v.bounds, v.counts, v.total)) for key, v in family.samples if isinstance(v, Spread)]
        told.append(_Family(family.name, family.kind, family.text, family.labels, plain, spread))
    return msgspec.msgpack.encode(told)


def decoded(data: bytes) -> list[Family]:
    """What `encoded` gave. Raises ValueError."""
    found = []
    for told in msgspec.msgpack.decode(data, type=list[_Family]):
        samples: list[Labelled] = [*told.plain, *((key, Spread(*spread)) for key, spread in told.spread)]
        found.append(Family(told.name, told.kind, told.text, told.labels, samples))
    return found


def summed(workers: Iterable[Iterable[Family]]) -> list[Family]:
    """One family of each name, in the order in which they came first.

    Counts, seconds and what is in use add up. Of what every worker tells of the same thing it is the largest: the size
    of a pool that all share, the age of a copy.
    """
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, ...], float | Spread]] = {}
    for families in workers:
        for family in families:
            found.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            for labels, value in family.samples:
                known[labels] = value if labels not in known else _together(family, labels, known[labels], value)
    return [
        Family(family.name, family.kind, family.text, family.labels, list(values[family.name].items()))
        for family in found.values()
    ]


def _together(family: Family, labels: tuple[str, ...], one: float | Spread, other: float | Spread) -> float | Spread:
    if isinstance(one, Spread) and isinstance(other, Spread):
        counts = tuple(here + there for here, there in zip(one.counts, other.counts, strict=True))
        return Spread(one.bounds, counts, one.total + other.total)
    assert not isinstance(one, Spread)
    assert not isinstance(other, Spread)
    is_shared = family.name == "persist_pool_size" and labels[0] in POOLS
    if is_shared or family.name in _LARGEST:
        return max(one, other)
    if family.name in _LEAST:
        return min(one, other)
    return one + other
