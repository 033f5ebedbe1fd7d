"""The merge of a State's inline rows, made by hand."""

from __future__ import annotations

from blob import Blob
from persist.commit.blob_tasks import merged
from persist.core import commands as c
from persist.core.ids import IdSource
from persist.core.merge_plan import inline_stretch
from persist.core.state import State


def flushed(state: State, blob: Blob, ids: IdSource) -> c.MergeResult | None:
    """The merge that moves the longest stretch of inline rows into one part, whose blob is written; or None."""
    return merged(state, inline_stretch(state.trace, frozenset()), blob, ids)
