"""What a token stands for: a digest of the verb, the frontiers, the attributes and the rows of a command.

Keys of parts do not count: an honest retry stages its rows anew. A field that a later build adds to a command must not
count either while it has its default, so that a retry by that build is known.
"""

from __future__ import annotations

import hashlib
import json

from persist.core import commands as c
from persist.core.outcomes import DIGEST_BYTES
from persist.parts.digest import RowsDigest


def digest_of(command: c.Insert | c.CompareAndAppend | c.Append | c.UpdateAttributes, rows: RowsDigest | None) -> bytes:
    """The digest of a command. `rows` has seen its rows; None: they were staged before, and bounds stand for them."""
    said: list[object] = [type(command).__name__]
    if isinstance(command, c.CompareAndAppend):
        said += [command.expected_upper.to_json(), command.new_upper.to_json()]
    elif isinstance(command, c.Append):
        said += [command.lower.to_json(), command.upper.to_json()]
    said.append([(change.key, change.verb, change.value, change.expected) for change in command.attributes])
    if not isinstance(command, c.UpdateAttributes):
        said.append(rows.digest().hex() if rows is not None else _bounds(command))
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=DIGEST_BYTES).digest()


def _bounds(command: c.Insert | c.CompareAndAppend | c.Append) -> list[object]:
    parts = [part for run in command.runs for part in run.parts]
    return [
        sum(part.rows for part in parts),
        min((part.key_lower.hex() for part in parts), default=""),
        sum(part.diff_sum or 0 for part in parts),
    ]
