"""Writes bundles, and compares those that a command brings with what the State says."""

from __future__ import annotations

import zlib

from blob import Blob
from persist.commit.versions import Versions
from persist.core import commands as c
from persist.core.batch import HollowBatch, Listing, Part, Run
from persist.core.bundles import Listed, bundle_of, packed, to_bundle
from persist.core.errors import InvalidUsage
from persist.core.ids import IdSource, PartId, ShardId, mint
from persist.core.keys import COMPACTOR, FLUSHER, bundle_key, is_of_maintenance
from persist.core.state import Policy, State
from persist.formats.state_frames import encode_listing
from persist.formats.store_errors import translated
from persist.parts.bundles import expanded, listed_in, read_bundle


class Bundler:
    """Writes bundles of one location. Thread-safe. Raises the errors of the blob store."""

    def __init__(self, versions: Versions, ids: IdSource, policy: Policy) -> None:
        self._versions = versions
        self._ids = ids
        self._policy = policy

    def bundled(self, state: State, batch: HollowBatch) -> c.BundleParts | None:
        """Write the parts of which the batch has too many to bundles. None: there are not too many.

        One bundle is in memory at a time.
        """
        plain = to_bundle(batch, self._policy, state.shard_id)
        if not plain:
            return None
        groups = packed(plain, self._policy.bundle_parts_max)
        runs = tuple(Run(tuple(self._written(state.shard_id, listed) for listed in group)) for group in groups)
        return c.BundleParts(tuple(part.id for run in plain for part in run.parts), runs)

    def _written(self, shard: ShardId, listed: Listed) -> Part:
        is_merged = all(part.key is not None and is_of_maintenance(part.key) for run in listed for part in run.parts)
        bundle_id = mint(PartId, self._ids)
        key = bundle_key(shard, COMPACTOR if is_merged else FLUSHER, bundle_id)
        data = encode_listing(Listing(listed), self._versions.format_version)
        with translated():
            self._versions.blob.put(key, data)
        return bundle_of(bundle_id, key, listed, len(data), zlib.crc32(data))


def keys_in(blob: Blob, key: str) -> list[str]:
    """The keys of the parts that the bundle `key` lists.

    Raises BlobNotFound: it is gone; Corruption: it is damaged; Unavailable.
    """
    data = blob.get(key)
    return [part.key for run in listed_in(data, key) for part in run.parts if part.key is not None]


def check_moved(command: c.BundleParts | c.ReplacePart, state: State, blob: Blob) -> None:
    """Raise InvalidUsage unless the command moves parts as they are; what the State does not name the plan refuses.

    Raises the errors of the blob store as well.
    """
    held = {part.id: part for part in state.trace.parts()}
    if isinstance(command, c.ReplacePart):
        bundle = held.get(command.within or command.part)
        is_same = bundle is not None and bundle.bundle is not None and read_bundle(bundle, blob) == command.listed
    else:
        named = [part for run in command.outputs for part in run.parts]
        if any(part.bundle is None or part.id in held for part in named):
            raise InvalidUsage(f"parts of shard {state.name!r} can only be bundled in new bundles")
        listed = [part for run in expanded(command.outputs, blob) for part in run.parts]
        ids = [part.id for part in listed]
        is_same = sorted(ids) == sorted(command.inputs) and all(held.get(part.id) == part for part in listed)
    if not is_same:
        raise InvalidUsage(f"a bundle of shard {state.name!r} does not list the parts in whose place it stands")
