"""What callers were told of a shard, besides rows, as a digest: maintenance and leases leave it as it is. Pure."""

from __future__ import annotations

import hashlib

from persist.core.state import State


def digest_of(state: State) -> str:
    """Two States of one shard with the same digest differ in nothing that a caller asked for and was given.

    It has frontiers of writers, the count of rows, schemas, critical readers, attributes, settings, tags and erasures.
    What moves by itself is left out: since, marks of wall clocks, leases, batches, files. Where maintenance has moved
    attributes to their index, or has forgotten a tag, the digests differ although nothing was asked for.
    """
    erased = {name: (erasure.at, erasure.question, erasure.reason) for name, erasure in state.erasures.items()}
    told = (
        state.shard_id,
        state.is_closed,
        state.upper.to_json(),
        state.event_count,
        sorted(state.schemas.items()),
        sorted(state.critical_readers.items()),
        sorted(state.attributes.items(), key=repr),
        state.attribute_root,
        state.settings,
        sorted(state.tags.items()),
        sorted(erased.items()),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
