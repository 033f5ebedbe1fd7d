"""Which parts of a shard cannot be read: each is looked at alone, so that one that is bad hides no other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from blob import Blob, BlobError, BlobNotFound
from persist.commit.sound import auxiliary_faults
from persist.core.batch import Part
from persist.core.errors import Corruption, PersistError
from persist.core.manifests import Listed
from persist.core.state import State
from persist.formats.state_frames import THIS_BUILD, Build
from persist.formats.store_errors import translate, translated_but_missing
from persist.parts import decode_inline, sound_schemas
from persist.parts.part_validation import PartCheck, check_presence
from persist.parts.read_plan import read_bundle

THREADS = 4
WINDOW = 64  # parts that are looked at together
PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one blob or part. `part` is None for a blob that is not a part.

    `within` is the bundle that lists the part, `listed` all that this lists.
    """

    key: str
    what: str
    part: Part | None = None
    within: Part | None = None
    listed: Listed = ()


@dataclass(frozen=True, slots=True)
class Named:
    """A part that the State names. `within` is the bundle that lists it, `listed` all that this lists.

    `failed` is why it cannot be read, where it is a bundle.
    """

    part: Part
    within: Part | None = None
    listed: Listed = ()
    failed: BlobNotFound | Corruption | None = None


def everything(name: str) -> bool:
    """Whatever it is called, it is looked at."""
    return True


def faults(
    state: State,
    blob: Blob,
    build: Build = THIS_BUILD,
    *,
    deep: bool = False,
    takes: Callable[[str], bool] = everything,
    threads: int = THREADS,
) -> Iterator[Fault]:
    """What is wrong with the blobs and inline parts that the State names, in their order; then with other blobs.

    Every byte is read once and compared with its checksum; `deep`: every row is decoded too. `takes` says by their ids
    which parts are looked at, and by their keys which other blobs; every bundle is. Raises Unavailable: the
    store does not answer. Memory: a piece of `PIECE_BYTES` for each of the `threads`, with `deep` a row group.
    """
    schemas = sound_schemas(state.schemas)
    checks = {number: PartCheck(schema) for number, schema in schemas.items()}

    def look(named: Named) -> str | None:
        part = named.part
        try:
            if named.failed is not None:
                raise named.failed
            if part.bundle is not None:
                return None
            if part.key is None:
                decode_inline(part, schemas)
                if deep:
                    _check_of(checks, part).inline_rows(part)
            else:
                check_presence(part, blob)
                _check_bytes(part, blob)
                if deep:
                    _check_of(checks, part).blob(part, blob, whole=True)
        except BlobNotFound:
            return f"the blob of {'part' if part.bundle is None else 'bundle'} {part.id} is not there"
        except BlobError as error:
            raise translate(error) from error
        except PersistError as error:
            return error.message.partition("; write its rows again")[0]
        return None

    parts = (named for named in all_parts(state, blob) if named.failed is not None or takes(str(named.part.id)))
    with ExitStack() as stack:
        look_at: Callable[..., Iterator[str | None]] = map
        if threads > 1:
            look_at = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="persist-examine")).map
        while window := list(islice(parts, WINDOW)):
            for named, what in zip(window, look_at(look, window), strict=True):
                if what is not None:
                    yield Fault(named.part.key or "inline", what, named.part, named.within, named.listed)
    for key, what in auxiliary_faults(state, blob, build, takes):
        yield Fault(key, what)


def all_parts(state: State, blob: Blob) -> Iterator[Named]:
    """The parts that the State names, each bundle before what it lists. A bundle is read once.

    What a bundle that cannot be read lists is left out. Raises Unavailable.
    """
    for part in state.trace.parts():
        if part.bundle is None:
            yield Named(part)
            continue
        try:
            with translated_but_missing():
                listed = read_bundle(part, blob)
        except (BlobNotFound, Corruption) as error:
            yield Named(part, failed=error)
            continue
        yield Named(part)
        for run in listed:
            for inner in run.parts:
                yield Named(inner, part, listed)


def _check_of(checks: Mapping[int, PartCheck], part: Part) -> PartCheck:
    if part.schema_id not in checks:
        raise Corruption(f"part {part.id} names schema {part.schema_id}, which is not registered, or does not fit")
    return checks[part.schema_id]


def _check_bytes(part: Part, blob: Blob) -> None:
    checksum = 0
    for start in range(0, part.size, PIECE_BYTES):
        piece = blob.get_range(part.key or "", start, min(PIECE_BYTES, part.size - start))
        checksum = zlib.crc32(piece, checksum)
    if checksum != part.checksum:
        raise Corruption(f"part {part.id} does not match its checksum")
