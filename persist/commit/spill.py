"""Inline rows that do not fit into the State any more, written to the blob store instead."""

from __future__ import annotations

from blob import Blob
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.ids import IdSource
from persist.core.record import replace
from persist.core.state import State
from persist.formats.store_errors import translated
from persist.parts import spill_inline


def spilled(command: c.Command, state: State, blob: Blob, ids: IdSource) -> c.Command:
    """The same command with its inline parts written to the blob store. A part that is never committed is an orphan."""
    assert isinstance(command, (c.CompareAndAppend, c.Append, c.Insert))
    runs: list[Run] = [run for run in command.runs if not any(part.is_inline for part in run.parts)]
    inline = [part for run in command.runs for part in run.parts if part.is_inline]
    with translated():
        for part in inline:
            written = spill_inline(part, state.schemas, blob, state.shard_id, command.writer, ids)
            if written is not None:
                runs.append(Run((written,)))
    return replace(command, runs=tuple(runs))
