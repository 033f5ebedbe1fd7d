"""What a token stands for: a digest of the verb, the frontiers, the attributes and the rows of a command.

Keys of parts do not count: an honest retry stages its rows anew. A field that a later build adds to a command must not
count either while it has its default, so that a retry by that build is known. The rows count by the sum of the digests
of the parts, so it does not matter how they were cut into parts, nor whether they were staged before the command.
"""

from __future__ import annotations

import hashlib
import json

from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.core.outcomes import DIGEST_BYTES
from persist.core.record import replace
from persist.core.transitions.outcomes import Written
from persist.parts.digest import MODULUS as MODULUS
from persist.parts.digest import digest_of_rows as digest_of_rows


def digest_of(command: Written, rows: int | None = None) -> bytes:
    """The digest of a command. Raises InvalidUsage where a part does not tell the digest of its rows.

    `rows`: the digest of those that a command without parts would have, if their times are their own.
    """
    said: list[object] = [type(command).__name__]
    if isinstance(command, c.Erase):  # whichever time it finds
        return _digest([*said, command.question.hex(), command.tags])
    if isinstance(command, c.Editing):  # whatever was there by then
        return _digest([*said, command.verb, command.question.hex()])
    if isinstance(command, c.Restore) and command.attributes:
        return _digest([*said, command.as_of, _attributes(command.attributes)])
    if isinstance(command, c.Rewrite):  # a retry finds other rows: those that differ by then
        return _digest([*said, command.as_of])
    if isinstance(command, c.CompareAndAppend):
        said += [command.expected_upper.to_json(), command.new_upper.to_json()]
    elif isinstance(command, c.Append):
        said += [command.lower.to_json(), command.upper.to_json()]
    said.append(_attributes(command.attributes))
    if not isinstance(command, c.UpdateAttributes):
        said.append(_rows(command) if rows is None else [("None", rows)] if rows else [])
    return _digest(said)


def _attributes(changes: tuple[AttributeUpdate, ...]) -> list[tuple[object, ...]]:
    return [(change.key, change.verb, change.value, change.expected) for change in changes]


def standing_for_themselves(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs, whose parts a token does not know again where their rows come in other parts."""
    return tuple(Run(tuple(replace(part, rows_digest=_by_id(part)) for part in run.parts)) for run in runs)


def _by_id(part: Part) -> int:
    return int.from_bytes(hashlib.blake2b(part.id.encode(), digest_size=8).digest()) % MODULUS


def _digest(said: list[object]) -> bytes:
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=DIGEST_BYTES).digest()


def _rows(command: c.Insert | c.CompareAndAppend | c.Append) -> list[tuple[str, int]]:
    """The digests of the rows by the time that was chosen for them after they were staged (None: none was)."""
    sums: dict[str, int] = {}
    for part in (part for run in command.runs for part in run.parts):
        if part.rows_digest is None:
            raise InvalidUsage(
                f"part {part.id} does not tell the digest of its rows, which a token needs; stage its rows again"
            )
        time = str(part.time)
        sums[time] = (sums.get(time, 0) + part.rows_digest) % MODULUS
    return sorted((time, found) for time, found in sums.items() if found)
