"""The parts of a shard, by batch and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blob import BlobNotFound
from persist.core.batch import Description, Part
from persist.core.bundles import Listed
from persist.core.errors import Corruption
from persist.core.ids import family_of
from persist.core.keys import born_ms
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing
from persist.inspect.documents import Document, Findings, Frontier, JsonRecord, KeyShower, instant
from persist.inspect.looking import Look
from persist.inspect.states import Rechecked, newest
from persist.parts.bundles import read_bundle


class PartRow(JsonRecord, frozen=True):
    """A part, in the run `run` of the batch `batch`, which holds the times `[lower, upper)`.

    `key` is None where its rows are in the State. `bundle` is the id of the bundle that lists it.

    `lists` counts the parts that a bundle stands for. `writer` is who wrote it, `minted` when its key was made, by that
    process's clock. `there`: whether its blob is there with its size; None: it has none.
    """

    batch: int
    run: int
    lower: Frontier
    upper: Frontier
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
class Placed:
    """A part, and the positions of its batch and run. `bundle` is the one that lists it."""

    batch: int
    run: int
    desc: Description
    part: Part
    bundle: Part | None = None


def placed(look: Look, state: State, findings: Findings) -> Iterator[Placed]:
    """Every part that the State names, each bundle before what it lists. A bundle that cannot be read is noted."""
    again = Rechecked(look, state)
    for number, batch in enumerate(state.trace.batches):
        for at, run in enumerate(batch.runs):
            for part in run.parts:
                yield Placed(number, at, batch.desc, part)
                for listed in listed_by(look, part, findings, again):
                    for inner in listed.parts:
                        yield Placed(number, at, batch.desc, inner, part)


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


def parts_document(look: Look, name: str, keys: KeyShower) -> Document:
    """The parts of a shard, also those that bundles list. Each is compared with a listing of the blob store."""
    seen = newest(look, name)
    state = seen.known()
    findings = seen.findings

    def rows() -> Iterator[PartRow]:
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


def _part(one: Placed, there: bool | None, keys: KeyShower) -> PartRow:
    part = one.part
    return PartRow(
        batch=one.batch,
        run=one.run,
        lower=one.desc.lower.to_json(),
        upper=one.desc.upper.to_json(),
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
