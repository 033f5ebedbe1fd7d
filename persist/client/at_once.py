"""Reads of few rows, which are over at once: without a hold, so that nothing is written for them.

A view is one State of the shard, and a part never changes. So the rows are exact where all parts are there still. Where
one of them is gone, maintenance was quicker: then nothing is given, and the caller reads again, with a hold.
"""

from __future__ import annotations

import pyarrow as pa

from blob import BlobNotFound
from persist.client.complete import BEFORE_ALL, NothingWritten, latest
from persist.client.expanding import limited
from persist.client.part_reading import part_reader
from persist.client.snapshot import FEW_BATCH_ROWS, FEW_MEMORY_BYTES, ReadSettings
from persist.client.transport import Transport
from persist.core.drops import contents
from persist.core.errors import Corruption, NotReadable
from persist.core.view import ViewRequest
from persist.formats.store_errors import translated_but_missing
from persist.parts import TIME, Selection, sound_schemas
from persist.parts.then import selected


def rows_at_once(
    transport: Transport, name: str, at: int | None, selection: Selection, limit: int, settings: ReadSettings
) -> pa.Table | None:
    """The first rows of what is selected as of a time (None: the latest complete one): the columns and `__diff`.

    None: it cannot be told without a hold, or without waiting. Raises InvalidUsage, UnknownShard, Unavailable.
    """
    view = transport.view(name, ViewRequest())
    try:
        as_of = latest(view) if at is None else at
    except NothingWritten:
        as_of = BEFORE_ALL
    except NotReadable:
        return None
    if as_of == BEFORE_ALL and view.since.less_equal(0):
        return selected(sound_schemas(view.schemas), selection).no_updates().drop_columns([TIME])
    if as_of == BEFORE_ALL or not view.since.less_equal(as_of) or view.upper.less_equal(as_of):
        return None
    wanted = selected(sound_schemas(view.schemas), selection)
    few = ReadSettings(memory_bytes=min(settings.memory_bytes, FEW_MEMORY_BYTES), bound=settings.bound)
    _, reader = part_reader(transport, view, few, wanted.keeps)
    runs = contents((run for batch in view.batches for run in batch.runs), view.drops, as_of)
    pieces = reader.read_range(
        runs,
        as_of=as_of,
        key_range=wanted.key_range,
        columns=wanted.read,
        batch_rows=max(1, min(limit, FEW_BATCH_ROWS)),
    )
    try:
        with translated_but_missing():
            found = list(limited(filter(len, map(wanted.apply, pieces)), limit))
    except (BlobNotFound, Corruption):  # with a hold it is told what is wrong
        return None
    return pa.concat_tables([wanted.no_updates().drop_columns([TIME]), *found])
