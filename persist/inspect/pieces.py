"""What the trace of a shard is made of (batches, runs, parts), and its rollups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blob import BlobNotFound
from persist.core.antichain import Antichain
from persist.core.batch import HollowBatch, Part, Run
from persist.core.bundles import Listed
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.ids import SeqNo, family_of
from persist.core.keys import belongs_to, born_ms, is_rollup_key, rollup_seqno, shard_of
from persist.core.state import State
from persist.formats.state_frames import decode_state, format_of
from persist.formats.store_errors import translated, translated_but_missing
from persist.inspect.log import walked
from persist.inspect.looking import Look
from persist.inspect.records import Document, Findings, KeyShower, Told, instant
from persist.inspect.states import Rechecked, Seen, newest
from persist.parts.bundles import read_bundle

NO_KEYS = KeyShower()


@dataclass(frozen=True, slots=True)
class BatchTold(Told):
    """A batch by its position. `bytes` are the encoded bytes of its parts, `inline_bytes` those in the State.

    `diff_sum` is the sum of all multiplicities, `kept` are the times before its since that merges told apart.
    """

    batch: int
    lower: Antichain
    upper: Antichain
    since: Antichain
    kept: list[int]
    runs: int
    parts: int
    updates: int
    bytes: int
    inline_bytes: int
    diff_sum: int | None


@dataclass(frozen=True, slots=True)
class RunTold(Told):
    """A run of a batch by its position. The bounds of keys are inclusive; None is above all keys."""

    batch: int
    run: int
    runs: int
    parts: int
    updates: int
    bytes: int
    key_lower: str | None
    key_upper: str | None


@dataclass(frozen=True, slots=True)
class PartTold(Told):
    """A part. `key` is None where its rows are in the State. `bundle` is the id of the bundle that lists it.

    `lists` counts the parts that a bundle stands for. `writer` is who wrote it, `minted` when its key was made, by that
    process's clock. `there`: whether its blob is there with its size; None: it has none.
    """

    batch: int
    run: int
    id: str
    key: str | None
    bundle: str | None
    lists: int | None
    format: str
    schema_id: int
    updates: int
    bytes: int
    diff_sum: int | None
    key_lower: str | None
    key_upper: str | None
    time: int | None
    time_min: int
    time_max: int
    clip: int | None
    writer: str | None
    minted: str | None
    there: bool | None


@dataclass(frozen=True, slots=True)
class RollupTold(Told):
    """A rollup. `named`: whether the State names it. `live`: whether the log still has its version.

    `bytes` are those of the blob. `same`: whether it is of the commit that the log has at its version; None: the
    log does not tell, or it cannot be read.
    """

    seqno: int
    key: str
    bytes: int | None
    named: bool
    live: bool
    timestamp: str | None
    format_version: int | None
    same: bool | None


def batches_document(look: Look, name: str) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = (_batch(number, batch) for number, batch in enumerate(state.trace.batches))
    return Document("batches", seen.findings, name, int(state.seqno), rows=rows)


def _batch(number: int, batch: HollowBatch) -> BatchTold:
    desc = batch.desc
    counts = (batch.run_count, batch.part_count, batch.rows, batch.size, batch.inline_size)
    return BatchTold(number, desc.lower, desc.upper, desc.since, list(desc.kept), *counts, batch.diff_sum)


def runs_document(look: Look, name: str, keys: KeyShower = NO_KEYS) -> Document:
    seen = newest(look, name)
    state = seen.known()
    rows = (
        _run(number, at, run, keys)
        for number, batch in enumerate(state.trace.batches)
        for at, run in enumerate(batch.runs)
    )
    return Document("runs", seen.findings, name, int(state.seqno), rows=rows)


def _run(batch: int, at: int, run: Run, keys: KeyShower) -> RunTold:
    uppers = [part.key_upper for part in run.parts]
    upper = None if None in uppers or not uppers else max(upper for upper in uppers if upper is not None)
    return RunTold(
        batch,
        at,
        run.run_count,
        sum(1 if part.bundle is None else part.bundle.parts for part in run.parts),
        sum(part.rows for part in run.parts),
        sum(part.size for part in run.parts),
        keys(min((part.key_lower for part in run.parts), default=b"")),
        keys(upper),
    )


@dataclass(frozen=True, slots=True)
class Placed:
    """A part and where it stands. `bundle` is the one that lists it."""

    batch: int
    run: int
    part: Part
    bundle: Part | None = None


def placed(look: Look, state: State, findings: Findings) -> Iterator[Placed]:
    """Every part that the State names, each bundle before what it lists. A bundle that cannot be read is noted."""
    again = Rechecked(look, state)
    for number, batch in enumerate(state.trace.batches):
        for at, run in enumerate(batch.runs):
            for part in run.parts:
                yield Placed(number, at, part)
                for listed in listed_by(look, part, findings, again):
                    for inner in listed.parts:
                        yield Placed(number, at, inner, part)


def listed_by(look: Look, part: Part, findings: Findings, again: Rechecked | None = None) -> Listed:
    """What a bundle lists; nothing where it is none, or cannot be read."""
    if part.bundle is None:
        return ()
    try:
        with translated_but_missing():
            return read_bundle(part, look.blob)
    except BlobNotFound:
        if again is not None and not again.is_named(part.key or ""):
            return ()
        findings.note(f"the bundle {part.id} is not there, so nobody knows what it lists", part.key)
    except Corruption as error:
        findings.note(f"nobody knows what the bundle {part.id} lists: {error.message}", part.key)
    return ()


def sizes_of(look: Look, state: State) -> dict[str, int]:
    """The blobs that are there of a shard, in any of its lives, with their sizes."""
    with translated():
        return {stat.key: stat.size for stat in look.blob.list(family_of(state.shard_id))}


def parts_document(look: Look, name: str, keys: KeyShower = NO_KEYS) -> Document:
    """The parts of a shard, also those that bundles list. Each is compared with a listing of the blob store."""
    seen = newest(look, name)
    state = seen.known()
    findings = seen.findings

    def rows() -> Iterator[PartTold]:
        sizes, again = sizes_of(look, state), Rechecked(look, state)
        for one in placed(look, state, findings):
            yield _part(one, _is_there(look, one, sizes, again, findings), keys)

    return Document("parts", findings, name, int(state.seqno), rows=rows())


def _is_there(look: Look, one: Placed, sizes: dict[str, int], again: Rechecked, findings: Findings) -> bool | None:
    part = one.part
    if part.key is None:
        return None
    size = sizes.get(part.key)
    if size is None:  # borrowed, or gone
        with translated():
            stat = look.blob.stat(part.key)
        size = None if stat is None else stat.size
    if size is None and not again.is_named((one.bundle or part).key or ""):
        return False
    if size is None:
        findings.note(f"the blob {part.key} is not there", part.key)
    elif size != part.blob_size:
        findings.note(f"the blob {part.key} has {size} bytes, not {part.blob_size}", part.key)
    return size == part.blob_size


def _part(one: Placed, there: bool | None, keys: KeyShower) -> PartTold:
    part = one.part
    return PartTold(
        batch=one.batch,
        run=one.run,
        id=str(part.id),
        key=part.key,
        bundle=None if one.bundle is None else str(one.bundle.id),
        lists=None if part.bundle is None else part.bundle.parts,
        format=part.format,
        schema_id=part.schema_id,
        updates=part.rows,
        bytes=part.size,
        diff_sum=part.diff_sum,
        key_lower=keys(part.key_lower),
        key_upper=keys(part.key_upper),
        time=part.time,
        time_min=part.time_min,
        time_max=part.time_max,
        clip=part.clip,
        writer=None if part.key is None else part.key.split("/")[1],
        minted=None if part.key is None else instant(born_ms(part.key)),
        there=there,
    )


def rollups_document(look: Look, name: str) -> Document:
    """The rollups that the State names, and those that lie there besides. Each is read."""
    seen = newest(look, name)
    return Document("rollups", seen.findings, name, seen.head, rows=_rollups(look, seen))


def _rollups(look: Look, seen: Seen) -> Iterator[RollupTold]:
    state, findings = seen.known(), seen.findings
    named = {rollup.key: seqno for seqno, rollup in state.rollups.items()}
    sizes = sizes_of(look, state)
    there = {key: rollup_seqno(key) for key in sizes if is_rollup_key(key) and belongs_to(key, shard_of(key))}
    commits = {one.seqno: one.change.commit_id for one in walked(look, seen.name) if one.change is not None}
    again = Rechecked(look, state)
    for key, seqno in sorted({**there, **named}.items(), key=lambda item: (item[1], item[0])):
        found, version = _read_rollup(look, key, seqno, again if key in named else None, findings)
        same = None
        if found is not None and found.commit_id and seqno in commits:
            same = found.commit_id == commits[seqno]
            if not same and key in named:
                findings.note(f"rollup v{seqno} holds another State than the log", key)
        yield RollupTold(
            seqno=int(seqno),
            key=key,
            bytes=sizes.get(key),
            named=key in named,
            live=seqno in commits,
            timestamp=None if found is None else instant(found.walltime_ms),
            format_version=version,
            same=same,
        )


def _read_rollup(
    look: Look, key: str, seqno: SeqNo, named: Rechecked | None, findings: Findings
) -> tuple[State | None, int | None]:
    """The State in a rollup, and its format version. What is wrong is noted; `named`: whether the State names it."""
    try:
        with translated_but_missing():
            data = look.blob.get(key)
        found = decode_state(data, look.build)
        if found.seqno != seqno:
            raise Corruption(f"it holds the State v{found.seqno}")
        return found, format_of(data)
    except BlobNotFound:
        if named is not None and named.is_named(key):
            findings.note(f"the blob {key} is not there", key)
    except (Corruption, UpgradeNeeded) as error:
        findings.note(f"rollup v{seqno} cannot be read: {error.message}", key)
    return None, None
