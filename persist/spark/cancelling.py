"""Whether anything remains of the rows that a job has staged: rows that come and go as often change nothing."""

from __future__ import annotations

from persist.core.batch import Run, diff_sum_of
from persist.formats.store_errors import translated
from persist.parts import PartReader, ShardSchema
from persist.spark import executors
from persist.spark.options import Target

Runs = tuple[Run, ...]


def lasting(target: Target, runs: Runs, schema: ShardSchema) -> Runs:
    """The runs, or none where all of their rows cancel out. They are of one time, and what one job has staged.

    They are read up to the first row that remains; not at all where their multiplicities tell that there is one. Raises
    what reading parts may.
    """
    parts = [part for run in runs for part in run.parts]
    if len(parts) < 2 or diff_sum_of(parts):  # one part alone has what remains of its rows
        return runs
    blob, memory = executors.transport(target.connection).blob, target.connection.handles.read.memory_bytes
    reader = PartReader(blob, {part.schema_id: schema for part in parts}, schema, memory_bytes=memory)
    with translated():
        return runs if any(map(len, reader.read_range(runs))) else ()
