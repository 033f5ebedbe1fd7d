"""Shards of which the blob store knows, and the consensus store nothing: their logs are lost, and no listing of names
shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from persist.commit.versions import FIRST
from persist.copies.readable import Readable
from persist.core.errors import Corruption
from persist.core.ids import family_of, shard_id_of
from persist.core.keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.formats.store_errors import translated

FAMILIES_MAX = 10_000  # that are looked into: each takes one blob


def lost_logs(place: Readable, known: Collection[str], prefix: str = "") -> Iterator[str]:
    """Names of shards that begin so, that are not `known` to the log, and of which a rollup tells a later version.

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
        if state is not None and family_of(state.shard_id) == family and state.name.startswith(prefix):
            names.add(state.name)
    yield from sorted(names)
