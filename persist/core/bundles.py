"""Bundles: lists of parts in the blob store, so that a batch of very many parts takes little room in the State.

In the State a bundle replaces its parts, as one part with `bundle` set. So a merge, a claim and the garbage collector
treat it as any part: by its id and its key. Its parts count as named while it is named. They leave the State with it,
unless the State names them directly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from persist.core import commands as c
from persist.core.batch import FORMAT_BUNDLE, Bundle, HollowBatch, Part, Run, diff_sum_of, parts_of
from persist.core.blob_keys import is_bundle_key
from persist.core.ids import PartId, ShardId
from persist.core.named_holds import is_foreign
from persist.core.record import Record
from persist.core.state import Policy, State

INT64_MAX = 2**63 - 1

Listed = tuple[Run, ...]  # the contents of one bundle


class Moves(Record, frozen=True):
    """The parts that a commit moved between the State and bundles, which the keys in the State do not show.

    `bundled` are the keys of parts that a bundle lists now. `emptied` are the keys of bundles whose parts did not leave
    with them: the State names these, or the bundle could not be read. `left` are the keys of their parts that did.
    """

    bundled: frozenset[str] = frozenset()
    emptied: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()

    def gone(self, unnamed: tuple[str, ...]) -> tuple[str, ...]:
        """The keys that left the State, of those that it no longer names directly."""
        if not self.bundled and not self.left:
            return unnamed
        return tuple(sorted(self.left.union(unnamed) - self.bundled))


NO_MOVES = Moves()


def bundle_of(bundle_id: PartId, key: str, listed: Listed, size: int, checksum: int) -> Part:
    """The part that represents a bundle in the State: its blob has `size` bytes with this checksum."""
    parts = list(parts_of(listed))
    diff_sum = diff_sum_of(parts)
    uppers = [part.key_upper for part in parts if part.key_upper is not None]
    return Part(
        id=bundle_id,
        key=key,
        data=None,
        format=FORMAT_BUNDLE,
        schema_id=min(part.schema_id for part in parts),  # the oldest, so that old parts are found
        rows=sum(part.rows for part in parts),
        size=sum(part.size for part in parts),
        checksum=checksum,
        footer_size=0,
        footer_checksum=0,
        key_lower=min(part.key_lower for part in parts),
        key_upper=max(uppers) if len(uppers) == len(parts) else None,
        time=None,
        time_min=min(part.time_min for part in parts),
        time_max=max(part.time_max for part in parts),
        diff_min=min(part.diff_min for part in parts),
        diff_max=max(part.diff_max for part in parts),
        diff_sum=diff_sum if diff_sum is not None and abs(diff_sum) <= INT64_MAX else None,
        sorted=False,
        bundle=Bundle(len(parts), len(listed), max(sum(part.rows for part in run.parts) for run in listed), size),
    )


def to_bundle(batch: HollowBatch, policy: Policy, shard: ShardId) -> Sequence[Run]:
    """The runs of a batch that should be bundled: those of the shard's own blobs, if they have too many parts.

    Borrowed parts are not bundled, since the shard that has lent them must see which ones are still needed.
    """
    if sum(len(run.parts) for run in batch.runs) <= policy.plain_parts_max:
        return ()

    def is_own_blob(part: Part) -> bool:
        return part.key is not None and part.bundle is None and not is_foreign(part.key, shard)

    plain = [run for run in batch.runs if all(map(is_own_blob, run.parts))]
    return plain if sum(len(run.parts) for run in plain) > policy.plain_parts_max else ()


def packed(runs: Iterable[Run], parts_max: int) -> Iterator[list[Listed]]:
    """The runs grouped into bundles of at most `parts_max` parts: each list is a run of bundles, in key order.

    A longer run is split. Shorter ones are grouped by their first keys, so that a read of few keys needs few bundles.
    """
    held: list[Run] = []
    count = 0
    for run in sorted(runs, key=lambda run: run.parts[0].key_lower):
        if len(run.parts) > parts_max:
            starts = range(0, len(run.parts), parts_max)
            yield [(Run(run.parts[start : start + parts_max]),) for start in starts]
            continue
        if held and count + len(run.parts) > parts_max:
            yield [tuple(held)]
            held, count = [], 0
        held.append(run)
        count += len(run.parts)
    if held:
        yield [tuple(held)]


def unpacked(run: Run, read: Callable[[Part], Listed]) -> Iterator[Run]:
    """The runs that a run represents; `read` returns what a bundle lists."""
    if len(run.parts) == 1 and run.parts[0].bundle is not None:
        yield from read(run.parts[0])
        return
    parts: list[Part] = []
    for part in run.parts:
        parts.extend([part] if part.bundle is None else [inner for listed in read(part) for inner in listed.parts])
    yield Run(tuple(parts))


def moves(old: State, new: State, group: Iterable[c.Command]) -> Moves:
    """The parts that the commands of a commit moved, also if a later command of the group removed them again.

    The orphan sweep deletes such parts.
    """
    bundled: set[str] = set()
    emptied: set[str] = set()
    left: set[str] = set()
    for command in group:
        if isinstance(command, c.BundleParts):
            if any(new.trace.holds(part.id) for part in parts_of(command.outputs)):
                wanted = frozenset(command.inputs)
                bundled.update(part.key for part in old.trace.parts() if part.id in wanted and part.key is not None)
        elif isinstance(command, c.ReplacePart) and _left(old, new, command.within or command.part):
            emptied.add(command.within or command.part)
            listed = parts_of(command.listed)
            left.update(part.key for part in listed if part.id == command.part and part.key is not None)
    if not bundled and not emptied:
        return NO_MOVES
    keys = (part.key for part in old.trace.parts() if part.id in emptied and part.key is not None)
    return Moves(frozenset(bundled), tuple(sorted(filter(is_bundle_key, keys))), frozenset(left))


def _left(old: State, new: State, part_id: str) -> bool:
    return old.trace.holds(part_id) and not new.trace.holds(part_id)
