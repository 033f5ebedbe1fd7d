"""How deep JSON is nested, told by its brackets alone: Arrow's parser has no bound, and ends the process."""

from __future__ import annotations

import re

import numpy as np

DEPTH_MAX = 100  # a column of a shard has far fewer levels
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # one that is not closed goes to the end
_OPEN, _CLOSE, _MARKS = b"[{", b"]}", b"[{]}\n"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPEN)], _STEPS[list(_CLOSE)] = 1, -1


def too_deep(data: bytes, most: int = DEPTH_MAX) -> int | None:
    """The line, from 1, on which JSON is nested deeper than this first; None: it nowhere is.

    Lines do not begin anew: parsers take an object that goes on in the next line. Where brackets do not match, what
    follows does not count, since no parser comes so far.
    """
    marks = _STRING.sub(b"", data).translate(None, _OTHERS)
    depths = np.cumsum(_STEPS[np.frombuffer(marks, np.uint8)], dtype=np.int64)
    deep = np.flatnonzero(depths > most)
    return marks.count(b"\n", 0, int(deep[0])) + 1 if len(deep) else None
